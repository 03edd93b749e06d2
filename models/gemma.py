"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118) and the text models of Gemma 3 (Gemma Team 2025, arXiv:2503.19786).

Norms surround attention and feed-forward layer, and some layers attend to a window. Gemma 2 limits scores and logits. Gemma 3 has
norms of each head's queries and keys, and another positional encoding in the windowed layers. Dimensions: config.json of the
published models."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from models.attention import Attention, AttentionKind
from models.blocks import SandwichBlock
from models.components import FeedForward, OffsetRMSNorm, Output, ScaledEmbedding, gelu_tanh
from models.config_json import (
    Config,
    first,
    full_attention_interval,
    sliding_theta,
    split_rope,
    with_layer_types,
    write_rope_by_type,
    write_windows,
)
from models.decoder import Decoder
from models.gguf import SANDWICH_NAMES, Gguf, Keys
from models.huggingface import NAMES, HuggingFace
from models.rope import Rope
from models.sizes import DEBUG, MixedSizes, repeated, require, shortest_period
from models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class GemmaSizes(MixedSizes):
    norm_eps: float = 1e-6
    tied_embeddings: bool = True
    query_pre_attn_scalar: int
    """The scores are divided by its square root."""

    def kinds(self) -> dict[str, AttentionKind]:
        scale = self.query_pre_attn_scalar**-0.5
        return {name: replace(kind, scale=scale) for name, kind in super().kinds().items()}


@dataclass(frozen=True, kw_only=True)
class Gemma2Sizes(GemmaSizes):
    attn_logit_softcapping: float | None = 50.0
    """Limit of the scores, see AttentionKind.softcap. None: no limit."""
    final_logit_softcapping: float | None = 30.0
    """Limit of the logits, see Output. None: no limit."""

    def kinds(self) -> dict[str, AttentionKind]:
        return {name: replace(kind, softcap=self.attn_logit_softcapping) for name, kind in super().kinds().items()}


@dataclass(frozen=True, kw_only=True)
class Gemma3Sizes(GemmaSizes):
    rope_theta: float = 1e6
    rope_local_base_freq: float = 10_000.0
    """rope_theta of the layers of the type "sliding"."""

    def kinds(self) -> dict[str, AttentionKind]:
        full, sliding = super().kinds().values()
        rope = Rope(dim=self.head_dim, theta=self.rope_local_base_freq)
        return {"full": full, "sliding": replace(sliding, rope=rope)}


class GemmaEmbedding(ScaledEmbedding):
    """An embedding multiplied by sqrt(dim), which is rounded to the dtype of the table."""

    WIDTH: ClassVar = "scaled_input"

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.Embedding.forward(self, tokens) * torch.tensor(self.scale, dtype=self.weight.dtype).item()


def _decoder(sizes: GemmaSizes, attention: Callable[[AttentionKind], Attention], softcap: float | None) -> Decoder:
    norm = partial(OffsetRMSNorm, eps=sizes.norm_eps)
    embedding = GemmaEmbedding(sizes.vocab_size, sizes.dim, math.sqrt(sizes.dim))
    output = Output(sizes.dim, sizes.vocab_size, softcap)

    def block(index: int, kind: AttentionKind) -> SandwichBlock:
        return SandwichBlock(sizes, norm, attention(kind), FeedForward(sizes.dim, sizes.hidden_dim, gelu_tanh))

    return Decoder(sizes, norm, block, embedding, output)


def gemma2(sizes: Gemma2Sizes) -> Decoder:
    return _decoder(sizes, partial(Attention, sizes.dim), sizes.final_logit_softcapping)


def gemma3(sizes: Gemma3Sizes) -> Decoder:
    norm = partial(OffsetRMSNorm, sizes.head_dim, eps=sizes.norm_eps)
    return _decoder(sizes, lambda kind: Attention(sizes.dim, kind, q_norm=norm(), k_norm=norm()), None)


def _read(config: Config, period: int = 2) -> Config:
    """period: distance between layers without a window."""
    if config.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention true: this model supports only false")
    return with_layer_types(config, lambda i: (i + 1) % period != 0)


def _read_gemma3(config: Config) -> Config:
    config, sliding = split_rope(config)
    theta = sliding_theta(sliding, first(config.get("rope_local_base_freq"), 10_000.0))
    period = first(config.get("sliding_window_pattern"), 6)
    require("sliding_window_pattern", period, int)
    return {**_read(config, period), "rope_local_base_freq": theta}


def _write_gemma3(sizes: Gemma3Sizes) -> Config:
    """Return the fields of all versions of transformers: 4.51 reads the distance between layers without a window instead of
    layer_types."""
    period = full_attention_interval(sizes.all_layer_types)
    pattern = {} if period is None else {"sliding_window_pattern": period}
    return write_windows(sizes) | pattern | write_rope_by_type(sizes, sizes.rope_local_base_freq)


def _fixed(sizes: GemmaSizes, layer_types: tuple[str, ...], wide: int) -> Keys:
    """Return what llama.cpp has built in. wide: number of layers of the model whose scores have another scale."""
    scalar = sizes.dim // sizes.n_heads if sizes.n_layers == wide else sizes.head_dim
    types = shortest_period(repeated(layer_types, sizes.n_layers))
    return {"layer_types": types, "query_pre_attn_scalar": scalar}


SANDWICH_MODULES = NAMES | {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
_huggingface = partial(HuggingFace, names=SANDWICH_MODULES)
_gguf = partial(Gguf, names=SANDWICH_NAMES, norm_offset=1.0, has_windows=True)
_FIXED = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
# Published files of Gemma 3 rely on these defaults of transformers.
_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

_gemma2 = partial(Gemma2Sizes, vocab_size=256000, layer_types=("sliding", "full"))
_GEMMA2_SIZES = {
    "debug": _gemma2(
        **DEBUG, query_pre_attn_scalar=24, window=40,
        attn_logit_softcapping=2.0, final_logit_softcapping=5.0,
    ),
    "2b": _gemma2(
        dim=2304, n_layers=26, n_heads=8, n_kv_heads=4, head_dim=256, hidden_dim=9216,
        window=4096, query_pre_attn_scalar=256,
    ),
    "9b": _gemma2(
        dim=3584, n_layers=42, n_heads=16, n_kv_heads=8, head_dim=256, hidden_dim=14336,
        window=4096, query_pre_attn_scalar=256,
    ),
    "27b": _gemma2(
        dim=4608, n_layers=46, n_heads=32, n_kv_heads=16, head_dim=128, hidden_dim=36864,
        window=4096, query_pre_attn_scalar=144,
    ),
}  # fmt: skip
GEMMA2 = ModelSpec(
    model=gemma2,
    by_size=_GEMMA2_SIZES,
    huggingface=_huggingface(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        sizes_type=Gemma2Sizes,
        fixed=_FIXED,
        defaults=_DEFAULTS | {"vocab_size": 256000, "max_position_embeddings": 8192},
        read=_read,
        write=write_windows,
    ),
    gguf=_gguf(
        architecture="gemma2",
        fixed=lambda sizes: (
            _fixed(sizes, ("sliding", "full"), wide=46)
            | {
                "tied_embeddings": True,
                "attn_logit_softcapping": first(sizes.attn_logit_softcapping, "a number"),
                "final_logit_softcapping": first(sizes.final_logit_softcapping, "a number"),
            }
        ),
        keys=lambda sizes: {
            "attention.sliding_window": sizes.window,
            "attn_logit_softcapping": sizes.attn_logit_softcapping,
            "final_logit_softcapping": sizes.final_logit_softcapping,
        },
    ),
)

_gemma3 = partial(Gemma3Sizes, layer_types=("sliding",) * 5 + ("full",))
_LINEAR = {"rope_type": "linear", "rope_factor": 8.0}
_GEMMA3_SIZES = {
    # Six layers, because some readers assume that exactly every sixth layer has no window.
    "debug": _gemma3(**DEBUG | {"n_layers": 6}, query_pre_attn_scalar=24, window=40),
    "270m": _gemma3(
        dim=640, n_layers=18, n_heads=4, n_kv_heads=1, head_dim=256, hidden_dim=2048,
        vocab_size=262144, window=512, query_pre_attn_scalar=256,
    ),
    "1b": _gemma3(
        dim=1152, n_layers=26, n_heads=4, n_kv_heads=1, head_dim=256, hidden_dim=6912,
        vocab_size=262144, window=512, query_pre_attn_scalar=256,
    ),
    "4b": _gemma3(
        dim=2560, n_layers=34, n_heads=8, n_kv_heads=4, head_dim=256, hidden_dim=10240,
        vocab_size=262208, window=1024, query_pre_attn_scalar=256, **_LINEAR,
    ),
    "12b": _gemma3(
        dim=3840, n_layers=48, n_heads=16, n_kv_heads=8, head_dim=256, hidden_dim=15360,
        vocab_size=262208, window=1024, query_pre_attn_scalar=256, **_LINEAR,
    ),
    "27b": _gemma3(
        dim=5376, n_layers=62, n_heads=32, n_kv_heads=16, head_dim=128, hidden_dim=21504,
        vocab_size=262208, window=1024, query_pre_attn_scalar=168, **_LINEAR,
    ),
}  # fmt: skip
GEMMA3 = ModelSpec(
    model=gemma3,
    by_size=_GEMMA3_SIZES,
    huggingface=_huggingface(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        sizes_type=Gemma3Sizes,
        fixed=_FIXED | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        defaults=_DEFAULTS | {"vocab_size": 262208, "rope_theta": 1e6, "max_position_embeddings": 131072},
        read=_read_gemma3,
        write=_write_gemma3,
    ),
    gguf=_gguf(
        architecture="gemma3",
        fixed=lambda sizes: _fixed(sizes, ("sliding",) * 5 + ("full",), wide=62),
        keys=lambda sizes: {
            "attention.sliding_window": sizes.window,
            "rope.freq_base_swa": sizes.rope_local_base_freq,
        },
    ),
)
