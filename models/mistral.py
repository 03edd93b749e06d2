"""Mistral (Jiang et al. 2023, arXiv:2310.06825) and Ministral 3 (Mistral AI 2025).

Mistral's head dim is independent of its width, and all its layers may attend to a window. Ministral 3 extends its context window
with YaRN, and multiplies the queries at late positions. Dimensions are those of the config.json files that Mistral AI published.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.blocks import PreNormBlock
from models.components import Attention, FeedForward
from models.decoder import Decoder
from models.huggingface import HuggingFace, first, read_rope, rope_object, write_rope
from models.rope import Rope
from models.sizes import DEBUG, DecoderSizes, WindowedSizes
from models.spec import LayerKind, ModelSpec


def mistral(sizes: WindowedSizes) -> Decoder:
    norm = partial(nn.RMSNorm, eps=sizes.norm_eps)

    def block(kind: LayerKind) -> PreNormBlock:
        return PreNormBlock(sizes.dim, norm, Attention(sizes, kind), FeedForward(sizes))

    return Decoder(sizes, sizes.kinds(), sizes.all_layer_types, block, norm)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    window = config.get("sliding_window")
    return read_rope(config) | {"window": window, "layer_types": ("full" if window is None else "sliding",)}


_24b = partial(WindowedSizes, dim=5120, n_layers=40, n_heads=32, n_kv_heads=8, head_dim=128, vocab_size=131072)
_7b = partial(WindowedSizes, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, hidden_dim=14336)
MISTRAL = ModelSpec(
    model=mistral,
    sizes={
        "debug": WindowedSizes(**DEBUG, window=40, layer_types=("sliding",)),
        "7b-v0.1": _7b(vocab_size=32000, window=4096, layer_types=("sliding",)),
        "7b-v0.2": _7b(vocab_size=32000, rope_theta=1e6),
        "7b-v0.3": _7b(vocab_size=32768, rope_theta=1e6),
        "nemo-12b": _24b(hidden_dim=14336, rope_theta=1e6),
        "small-22b": WindowedSizes(
            dim=6144,
            n_layers=56,
            n_heads=48,
            n_kv_heads=8,
            head_dim=128,
            hidden_dim=16384,
            vocab_size=32768,
            rope_theta=1e6,
        ),
        "small-24b": _24b(hidden_dim=32768, rope_theta=1e8),
    },
    huggingface=HuggingFace(
        model_type="mistral",
        architecture="MistralForCausalLM",
        sizes_type=WindowedSizes,
        fixed={"hidden_act": "silu"},
        fields={"head_dim": "head_dim"},
        defaults={"norm_eps": 1e-6, "tied_embeddings": False},
        read=_read,
        write=lambda sizes: {**write_rope(sizes), "sliding_window": sizes.window},
    ),
)


@dataclass(frozen=True, kw_only=True)
class Ministral3Sizes(DecoderSizes):
    query_beta: float = 0.1
    """Queries at position p are multiplied by 1 + query_beta * ln(1 + floor(p / rope_original_seq_len))."""


@dataclass(frozen=True, kw_only=True)
class QueryScale:
    """A positional encoding with a factor for the queries of each position (Nakanishi 2025, arXiv:2501.19399)."""

    rope: Rope
    beta: float
    seq_len: int

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoding and the factor, (batch, seq, 1, 1)."""
        scale = 1 + self.beta * torch.log1p(positions.div(self.seq_len, rounding_mode="floor").float())
        return self.rope(positions), scale[:, :, None, None]


class ScaledQueryAttention(Attention):
    """Attention with the positional encoding QueryScale."""

    def encode_positions(self, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        table, scale = rope
        q, k = super().encode_positions(q, k, table)
        return q * scale.type_as(q), k


def ministral3(sizes: Ministral3Sizes) -> Decoder:
    norm = partial(nn.RMSNorm, eps=sizes.norm_eps)
    kind = LayerKind(rope=QueryScale(rope=sizes.rope(), beta=sizes.query_beta, seq_len=sizes.rope_original_seq_len))

    def block(kind: LayerKind) -> PreNormBlock:
        return PreNormBlock(sizes.dim, norm, ScaledQueryAttention(sizes, kind), FeedForward(sizes))

    return Decoder(sizes, {"full": kind}, ["full"] * sizes.n_layers, block, norm)


_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1},
}
"""transformers' default of rope_parameters."""


def _read_ministral3(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = first(rope_object(config, "full_attention") or None, _YARN)
    values = read_rope({**config, "rope_parameters": rope}, types=("default", "yarn"), default_theta=1e6)
    if rope.get("original_max_position_embeddings") is not None:
        values["rope_original_seq_len"] = rope["original_max_position_embeddings"]
    if rope.get("llama_4_scaling_beta") is None:
        raise ValueError("llama_4_scaling_beta is missing")
    return values | {"query_beta": rope["llama_4_scaling_beta"]}


def _write_ministral3(sizes: Ministral3Sizes) -> dict[str, Any]:
    rope = first(write_rope(sizes)["rope_scaling"], {"rope_type": "default"})
    beta = {
        "llama_4_scaling_beta": sizes.query_beta,
        "original_max_position_embeddings": sizes.rope_original_seq_len,
    }
    return {"sliding_window": None, "rope_parameters": {"rope_theta": sizes.rope_theta, **rope, **beta}}


_ministral3 = partial(
    Ministral3Sizes,
    **{"n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "vocab_size": 131072, "rope_theta": 1e6, "rope_type": "yarn"},
    **{"rope_factor": 16.0, "rope_original_seq_len": 16384, "rope_mscale": 1.0, "rope_mscale_all_dim": 1.0},
)
MINISTRAL3 = ModelSpec(
    model=ministral3,
    sizes={
        "debug": Ministral3Sizes(**DEBUG, rope_type="yarn", rope_factor=4.0, rope_original_seq_len=32),
        "3b": _ministral3(dim=3072, n_layers=26, hidden_dim=9216, tied_embeddings=True),
        "8b": _ministral3(dim=4096, n_layers=34, hidden_dim=14336),
        "14b": _ministral3(dim=5120, n_layers=40, hidden_dim=16384, rope_theta=1e9),
    },
    huggingface=HuggingFace(
        model_type="ministral3",
        architecture="Ministral3ForCausalLM",
        sizes_type=Ministral3Sizes,
        fixed={"hidden_act": "silu", "sliding_window": None},
        fields={"head_dim": "head_dim"},
        defaults={"norm_eps": 1e-5, "tied_embeddings": False, "head_dim": 128},
        read=_read_ministral3,
        write=_write_ministral3,
    ),
)
