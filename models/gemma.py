"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118) and Gemma 3 (Gemma Team 2025, arXiv:2503.19786), text models.

Norms surround attention and feed-forward layer. Some layers attend to a window. Gemma 2 limits scores and logits. Gemma 3 has
norms of each head's queries and keys, and another positional encoding in the windowed layers. Dimensions are those of the
config.json files that Google published.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from models.blocks import SandwichBlock
from models.components import GELU_TANH, Attention, FeedForward, OffsetRMSNorm, Output, ScaledEmbedding
from models.decoder import Decoder
from models.huggingface import (
    NAMES,
    HuggingFace,
    first,
    get,
    read_rope,
    read_windows,
    sliding_theta,
    write_rope,
    write_rope_by_type,
    write_windows,
)
from models.rope import Rope
from models.sizes import DEBUG, WindowedSizes
from models.spec import LayerKind, ModelSpec


@dataclass(frozen=True, kw_only=True)
class GemmaSizes(WindowedSizes):
    norm_eps: float = 1e-6
    tied_embeddings: bool = True
    query_pre_attn_scalar: int
    """The scores are divided by its square root."""

    def kinds(self) -> dict[str, LayerKind]:
        scale = self.query_pre_attn_scalar**-0.5
        return {name: replace(kind, scale=scale) for name, kind in super().kinds().items()}


@dataclass(frozen=True, kw_only=True)
class Gemma2Sizes(GemmaSizes):
    attention_softcap: float | None = 50.0
    output_softcap: float | None = 30.0

    def kinds(self) -> dict[str, LayerKind]:
        return {name: replace(kind, softcap=self.attention_softcap) for name, kind in super().kinds().items()}


@dataclass(frozen=True, kw_only=True)
class Gemma3Sizes(GemmaSizes):
    rope_theta: float = 1e6
    rope_sliding_theta: float = 10_000.0
    """rope_theta of the layers of the type "sliding"."""

    def kinds(self) -> dict[str, LayerKind]:
        full, sliding = super().kinds().values()
        return {"full": full, "sliding": replace(sliding, rope=Rope(dim=self.head_dim, theta=self.rope_sliding_theta))}


def _decoder(sizes: GemmaSizes, head_norms: bool, output_softcap: float | None) -> Decoder:
    norm = partial(OffsetRMSNorm, eps=sizes.norm_eps)

    def block(kind: LayerKind) -> SandwichBlock:
        norms = {name: norm(sizes.head_dim) for name in ("q_norm", "k_norm") if head_norms}
        feed_forward = FeedForward(sizes, GELU_TANH)
        return SandwichBlock(sizes.dim, norm, Attention(sizes, kind, **norms), feed_forward)

    return Decoder(
        sizes,
        sizes.kinds(),
        sizes.all_layer_types,
        block,
        norm,
        embedding=ScaledEmbedding(sizes.vocab_size, sizes.dim, math.sqrt(sizes.dim)),
        output=Output(sizes.dim, sizes.vocab_size, softcap=output_softcap),
    )


def gemma2(sizes: Gemma2Sizes) -> Decoder:
    return _decoder(sizes, head_norms=False, output_softcap=sizes.output_softcap)


def gemma3(sizes: Gemma3Sizes) -> Decoder:
    return _decoder(sizes, head_norms=True, output_softcap=None)


_common = {
    "fields": {"head_dim": "head_dim", "query_pre_attn_scalar": "query_pre_attn_scalar"},
    "names": NAMES
    | {
        "attention_post_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    },
}
_FIXED = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
_DEFAULTS = {
    **{"dim": 2304, "hidden_dim": 9216, "n_layers": 26, "n_heads": 8, "n_kv_heads": 4, "head_dim": 256},
    **{"norm_eps": 1e-6, "tied_embeddings": True, "query_pre_attn_scalar": 256},
}
"""transformers' defaults, on which published files of Gemma 3 rely."""


def _require_causal(config: Mapping[str, Any]) -> None:
    if config.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention true: this model supports only false")


def _read_gemma2(config: Mapping[str, Any]) -> dict[str, Any]:
    _require_causal(config)
    types = ["full" if i % 2 else "sliding" for i in range(config["num_hidden_layers"])]
    softcaps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} | config
    return {
        **read_rope(config),
        **read_windows({"sliding_window": 4096, **config}, default=types),
        "attention_softcap": softcaps["attn_logit_softcapping"],
        "output_softcap": softcaps["final_logit_softcapping"],
    }


def _write_gemma2(sizes: Gemma2Sizes) -> dict[str, Any]:
    softcaps = {
        "attn_logit_softcapping": sizes.attention_softcap,
        "final_logit_softcapping": sizes.output_softcap,
    }
    return {**write_rope(sizes), **write_windows(sizes), **softcaps}


_gemma2 = partial(Gemma2Sizes, vocab_size=256000, window=4096, layer_types=("sliding", "full"))
GEMMA2 = ModelSpec(
    model=gemma2,
    sizes={
        "debug": _gemma2(**DEBUG | {"window": 40}, query_pre_attn_scalar=24, attention_softcap=2.0, output_softcap=5.0),
        "2b": _gemma2(
            dim=2304, n_layers=26, n_heads=8, n_kv_heads=4, head_dim=256, hidden_dim=9216, query_pre_attn_scalar=256
        ),
        "9b": _gemma2(
            dim=3584, n_layers=42, n_heads=16, n_kv_heads=8, head_dim=256, hidden_dim=14336, query_pre_attn_scalar=256
        ),
        "27b": _gemma2(
            dim=4608, n_layers=46, n_heads=32, n_kv_heads=16, head_dim=128, hidden_dim=36864, query_pre_attn_scalar=144
        ),
    },
    huggingface=HuggingFace(
        **_common,
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        sizes_type=Gemma2Sizes,
        fixed=_FIXED,
        defaults=_DEFAULTS | {"vocab_size": 256000},
        read=_read_gemma2,
        write=_write_gemma2,
    ),
)


def _read_gemma3(config: Mapping[str, Any]) -> dict[str, Any]:
    _require_causal(config)
    theta = sliding_theta(config, first(config.get("rope_local_base_freq"), 10_000.0))
    period = get(config, "sliding_window_pattern", int, 6)
    types = ["sliding" if (i + 1) % period else "full" for i in range(config["num_hidden_layers"])]
    return {
        **read_rope(config, default_theta=1e6),
        **read_windows({"sliding_window": 4096, **config}, default=types),
        "rope_sliding_theta": theta,
    }


def _write_gemma3(sizes: Gemma3Sizes) -> dict[str, Any]:
    rope = write_rope_by_type(sizes, sizes.rope_sliding_theta) | {"rope_local_base_freq": sizes.rope_sliding_theta}
    return {**rope, **write_windows(sizes)}


_gemma3 = partial(
    Gemma3Sizes,
    **{"head_dim": 256, "query_pre_attn_scalar": 256, "vocab_size": 262144},
    **{"layer_types": ("sliding",) * 5 + ("full",)},
)
_small = partial(_gemma3, n_heads=4, n_kv_heads=1, window=512)
_large = partial(_gemma3, window=1024, vocab_size=262208, rope_type="linear", rope_factor=8.0)
GEMMA3 = ModelSpec(
    model=gemma3,
    sizes={
        "debug": _gemma3(
            **DEBUG | {"query_pre_attn_scalar": 24}, window=40, layer_types=("sliding", "sliding", "sliding", "full")
        ),
        "270m": _small(dim=640, n_layers=18, hidden_dim=2048),
        "1b": _small(dim=1152, n_layers=26, hidden_dim=6912),
        "4b": _large(dim=2560, n_layers=34, n_heads=8, n_kv_heads=4, hidden_dim=10240),
        "12b": _large(dim=3840, n_layers=48, n_heads=16, n_kv_heads=8, hidden_dim=15360),
        "27b": _large(
            dim=5376, n_layers=62, n_heads=32, n_kv_heads=16, head_dim=128, hidden_dim=21504, query_pre_attn_scalar=168
        ),
    },
    huggingface=HuggingFace(
        **_common,
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        sizes_type=Gemma3Sizes,
        fixed=_FIXED | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        defaults=_DEFAULTS | {"vocab_size": 262208},
        read=_read_gemma3,
        write=_write_gemma3,
    ),
)
