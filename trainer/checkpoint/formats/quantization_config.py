"""What config.json says about weights that are stored in a quantized format."""

from collections.abc import Collection
from typing import Any

_METHODS = {
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8 without weight_block_size",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "mxfp4": "MXFP4",
}
"""quant_method -> its name in messages."""


def quantization_problem(config: Any, readable: Collection[str]) -> str:
    """Return why the weights cannot be read if config.json says that they are quantized, without the folder's name, or "".
    readable: methods of quantization whose weights can be read."""
    settings = config.get("quantization_config")
    if not settings:
        return ""
    if not isinstance(settings, dict):
        return f"has a quantization_config in config.json that is no object: {settings!r:.40}"
    method = settings.get("quant_method")
    if isinstance(method, str) and method in readable:
        return ""
    name = _METHODS.get(method, f"{method:.40}") if isinstance(method, str) else "an unnamed method"
    bits = next((f" in {n} bits" for n in (4, 8) if settings.get(f"load_in_{n}bit") is True), "")
    way_out = "use the original model, in bf16 or another float dtype"
    if bits == " in 4 bits":
        way_out += ", which [lora] base_dtype quantizes while it is loaded"
    return f"contains weights that are quantized with {name}{bits} (quantization_config in config.json); {way_out}"
