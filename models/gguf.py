"""Facts about GGUF, the format of llama.cpp: names of tensors, the order of rows, and keys of the metadata.

Each family states what differs for it, beside its mapping to Hugging Face's format. Facts are those of llama.cpp in the source
distribution of llama-cpp-python 0.3.36: conversion/*.py writes the files, src/models/*.cpp reads them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from models.huggingface_tensors import permute_from_hf
from models.rope import Llama3Rope, LongRope, Rope, YarnRope
from models.sizes import Sizes, text_of

Keys = Mapping[str, Any]
"""Key of the metadata -> value. Integers are written as uint32, numbers as float32, and sequences as arrays."""

NAMES = {
    "tok_embeddings": "token_embd",
    "norm": "output_norm",
    "output": "output",
    "attention_norm": "attn_norm",
    "attention.wq": "attn_q",
    "attention.wk": "attn_k",
    "attention.wv": "attn_v",
    "attention.wo": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.experts.w1": "ffn_gate_exps.weight",
    "feed_forward.experts.w2": "ffn_down_exps.weight",
    "feed_forward.experts.w3": "ffn_up_exps.weight",
}
"""Name of a module, or complete name of a parameter -> its name in a GGUF file. Names inside a block are relative to it."""
SANDWICH_NAMES = NAMES | {"attention_post_norm": "post_attention_norm", "ffn_post_norm": "post_ffw_norm"}
"""NAMES with those of norms after attention and feed-forward layer."""


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """A tensor of the same rows of each head, as one matrix for each head."""

    name: str
    """Of the tensor."""
    rows: Callable[[Any], slice]
    """Function (sizes) -> rows of a head."""
    transposed: bool = False


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """What differs in the files of a family."""

    architecture: str
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    """See NAMES. Modules of one name are written as one tensor, in this order."""
    rotates_pairs: bool = False
    """Whether llama.cpp rotates neighbouring values. The rows of queries and keys of a model that does not are reordered."""
    norm_offset: float = 0.0
    """Number that is added to the weights of norms."""
    writes_tied: bool = False
    """Whether a tied output matrix is written too, because llama.cpp does not take it from the embeddings."""
    has_windows: bool = False
    """Whether layers attend to windows in llama.cpp. If not, files of models with a window allow no longer context."""
    rope_types: tuple[str, ...] = ("default", "linear", "yarn")
    """Extensions of the context window that llama.cpp computes."""
    rope_settings: tuple[str, ...] = ()
    """Sizes of YaRN that llama.cpp reads. All others must have their defaults."""
    fixed: Callable[[Any], Keys] = lambda sizes: {}
    """Function (sizes) -> name of a size -> the only value with which llama.cpp computes, or words for several values."""
    keys: Callable[[Any], Keys] = lambda sizes: {}
    """Function (sizes) -> keys of the architecture that only this family has."""
    remarks: Callable[[Any], tuple[str, ...]] = lambda sizes: ()
    """Function (sizes) -> where llama.cpp computes this family a little differently."""
    head_rows: Mapping[str, tuple[HeadRows, ...]] = field(default_factory=dict)
    """Name of a module in a block -> tensors in which the rows of its heads are written."""

    def tensor_name(self, parameter: str) -> str:
        """Return the name of the tensor that contains a parameter."""
        leaf, module = parameter.rpartition(".")[2], module_in_block(parameter)
        prefix = f"blk.{parameter.split('.')[1]}." if parameter.startswith("layers.") else ""
        return prefix + (self.names.get(f"{module}.{leaf}") or f"{self.names[module]}.{leaf}")


def module_in_block(parameter: str) -> str:
    """Return the name of a parameter's module. Inside a block, it is relative to the block."""
    module = parameter.rpartition(".")[0]
    return module.split(".", 2)[2] if module.startswith("layers.") else module


def is_permuted(gguf: Gguf, is_paired: bool, parameter: str) -> bool:
    """Return whether a parameter's rows have another order within each head. is_paired: see HuggingFace."""
    is_rotated = parameter.rpartition(".")[0].endswith(("attention.wq", "attention.wk"))
    return gguf.rotates_pairs and not is_paired and is_rotated


def rows_of(gguf: Gguf, is_paired: bool, parameter: str, rows: Tensor, head_dim: int) -> Tensor:
    """Return rows of a parameter as llama.cpp reads them. rows: of complete heads, if they are permuted."""
    if parameter.endswith("norm.weight") and gguf.norm_offset:
        return rows + gguf.norm_offset
    return permute_from_hf(rows, head_dim) if is_permuted(gguf, is_paired, parameter) else rows


def problems(gguf: Gguf | None, sizes: Any) -> Iterator[str]:
    """Yield why llama.cpp would compute another model than this one. gguf: None for a family that is not written."""
    if gguf is None:
        yield "this model family is not among those that are written"
        return
    suffix = f"for the architecture {gguf.architecture}"
    for name, value in gguf.fixed(sizes).items():
        if getattr(sizes, name) != value:
            supported = value if isinstance(value, str) else text_of(value)
            yield f"{name} {text_of(getattr(sizes, name))}: llama.cpp computes only {supported} {suffix}"
    if sizes.rope_type not in gguf.rope_types:
        yield f"rope_type {sizes.rope_type}: llama.cpp computes only {', '.join(gguf.rope_types)} {suffix}"
    rope = sizes.rope()
    if isinstance(rope, YarnRope):
        for name, value in {"rope_beta_fast": 32.0, "rope_beta_slow": 1.0}.items():
            if name not in gguf.rope_settings and getattr(sizes, name) != value:
                yield f"{name} {getattr(sizes, name)}: llama.cpp computes only {value} {suffix}"


def remarks(gguf: Gguf, sizes: Any) -> Iterator[str]:
    """Yield where llama.cpp computes a little differently."""
    rope = sizes.rope()
    if isinstance(rope, YarnRope) and not rope.truncate:
        yield "rope_truncate false: llama.cpp rounds the ends of YaRN's interpolation, so its logits differ"
    if isinstance(rope, LongRope):
        length = rope.original_seq_len
        yield f"LongRoPE: llama.cpp takes the long factors if its context (-c) is longer than {length}, also for short texts"
    window = getattr(sizes, "window", None)
    if window is not None and not gguf.has_windows:
        what = f"llama.cpp computes no windows for the architecture {gguf.architecture}"
        yield f"window {window}: {what}, so it is the longest context of the file"
    if sizes.prediction_layers:
        yield f"prediction_layers {sizes.prediction_layers}: left out, because llama.cpp does not use them"
    yield from gguf.remarks(sizes)


def context_length(gguf: Gguf, sizes: Any, context_window: int) -> int:
    """Return the longest context in which llama.cpp computes this model."""
    longest, window = max(context_window, sizes.context_window), getattr(sizes, "window", None)
    return longest if gguf.has_windows or window is None else min(longest, window)


def architecture_keys(gguf: Gguf, sizes: Any, context_window: int) -> dict[str, Any]:
    """Return the keys of the architecture, without its name. context_window: longest sequence in training."""
    keys = {
        "block_count": sizes.n_layers,
        "context_length": context_length(gguf, sizes, context_window),
        "embedding_length": sizes.dim,
        "feed_forward_length": sizes.hidden_dim,
        "attention.head_count": sizes.n_heads,
        "attention.head_count_kv": sizes.n_kv_heads,
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
        "attention.layer_norm_rms_epsilon": sizes.norm_eps,
        "vocab_size": sizes.vocab_size,
        "rope.dimension_count": sizes.rotary_dim,
        "rope.freq_base": sizes.rope_theta,
        **_scaling_keys(sizes),
    }
    if hasattr(sizes, "n_experts"):
        keys |= {"expert_count": sizes.n_experts, "expert_used_count": sizes.experts_per_token}
    keys |= gguf.keys(sizes)
    return {key: value for key, value in keys.items() if (key, value) != ("rope.scaling.attn_factor", 1.0)}


def _scaling_keys(sizes: Sizes) -> dict[str, Any]:
    """Return the keys of the extension of the context window."""
    rope = sizes.rope()
    if sizes.rope_type == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
    if isinstance(rope, LongRope):
        return {
            "rope.scaling.original_context_length": rope.original_seq_len,
            "rope.scaling.attn_factor": rope.amplitude,
        }
    if not isinstance(rope, YarnRope):
        return {}
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope.factor,
        "rope.scaling.original_context_length": rope.original_seq_len,
        # llama.cpp multiplies cosine and sine by amplitude_of(1) too.
        "rope.scaling.attn_factor": rope.amplitude / rope.amplitude_of(1.0),
    }


def frequency_tensors(sizes: Sizes) -> dict[str, Tensor]:
    """Return name -> tensor of divisors of the rotary frequencies, (pairs,), fp32."""
    rope = sizes.rope()
    if isinstance(rope, LongRope):
        factors = {"long": rope.long_factors, "short": rope.short_factors}
        return {f"rope_factors_{name}.weight": torch.tensor(values) for name, values in factors.items()}
    if not isinstance(rope, Llama3Rope):
        return {}
    # The inverse of Llama3Rope, in the order of llama.cpp's converter, so that each bit is equal.
    wavelengths = 2 * math.pi / Rope(dim=rope.dim, theta=rope.theta).frequencies(torch.device("cpu"))
    turns, low, high = rope.original_seq_len / wavelengths, rope.low_freq_factor, rope.high_freq_factor
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return {"rope_freqs.weight": 1 / ((1 - unscaled) / rope.factor + unscaled)}
