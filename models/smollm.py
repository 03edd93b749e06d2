"""SmolLM3 (Bakouch et al. 2025, https://huggingface.co/blog/smollm3): every fourth layer has no positional encoding. The
dimensions are those of the published config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from models.blocks import PreNormBlock
from models.components import Attention, FeedForward
from models.decoder import Decoder
from models.huggingface import (
    HuggingFace,
    first,
    get,
    read_rope,
    read_windows,
    shortest_period,
    write_rope,
    write_windows,
)
from models.sizes import DEBUG, WindowedSizes, repeated
from models.spec import LayerKind, ModelSpec, SizeError


@dataclass(frozen=True, kw_only=True)
class SmolLM3Sizes(WindowedSizes):
    norm_eps: float = 1e-6
    rope_theta: float = 5e6
    rotated_layers: tuple[bool, ...] = (True, True, True, False)
    """Whether each layer has a positional encoding. The sequence is repeated up to n_layers."""
    attention_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rotated_layers:
            raise SizeError("rotated_layers must have at least one value", "rotated_layers")

    @property
    def all_rotated_layers(self) -> tuple[bool, ...]:
        return repeated(self.rotated_layers, self.n_layers)


def smollm3(sizes: SmolLM3Sizes) -> Decoder:
    norm, bias = partial(nn.RMSNorm, eps=sizes.norm_eps), sizes.attention_bias

    def block(kind: LayerKind) -> PreNormBlock:
        attention = Attention(sizes, kind, qkv_bias=bias, out_bias=bias)
        return PreNormBlock(sizes.dim, norm, attention, FeedForward(sizes))

    kinds = sizes.kinds()
    kinds |= {f"{name}_without_rope": replace(kind, rope=None) for name, kind in kinds.items()}
    layers = zip(sizes.all_layer_types, sizes.all_rotated_layers, strict=True)
    return Decoder(sizes, kinds, [t if rotated else f"{t}_without_rope" for t, rotated in layers], block, norm)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, interval = config["num_hidden_layers"], get(config, "no_rope_layer_interval", int, 4)
    listed = first(config.get("no_rope_layers"), [(i + 1) % interval for i in range(layers)])
    if not isinstance(listed, list) or len(listed) != layers:
        raise ValueError("no_rope_layers must have one entry for each of the num_hidden_layers layers")
    rotated = tuple(bool(has_rope) for has_rope in listed)
    sliding = {} if config.get("use_sliding_window") else {"sliding_window": None}
    types = ["full" if has_rope else "sliding" for has_rope in rotated]
    windows = read_windows({**config, **sliding}, default=types)
    return read_rope(config, default_theta=2e6) | windows | {"rotated_layers": shortest_period(rotated)}


def _write(sizes: SmolLM3Sizes) -> dict[str, Any]:
    rotated = [int(has_rope) for has_rope in sizes.all_rotated_layers]
    windows = {"use_sliding_window": sizes.window is not None, **write_windows(sizes)}
    return {**write_rope(sizes), **windows, "no_rope_layers": rotated}


SMOLLM3 = ModelSpec(
    model=smollm3,
    sizes={
        "debug": SmolLM3Sizes(**DEBUG),
        "3b": SmolLM3Sizes(
            **{"dim": 2048, "n_layers": 36, "n_heads": 16, "n_kv_heads": 4, "head_dim": 128, "hidden_dim": 11008},
            **{"vocab_size": 128256, "tied_embeddings": True},
        ),
    },
    huggingface=HuggingFace(
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        sizes_type=SmolLM3Sizes,
        fixed={"hidden_act": "silu", "mlp_bias": False},
        fields={"head_dim": "head_dim", "attention_bias": "attention_bias"},
        defaults={"norm_eps": 1e-6, "tied_embeddings": True, "attention_bias": False},
        read=_read,
        write=_write,
    ),
)
