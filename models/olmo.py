"""OLMo 2 (OLMo Team 2024, arXiv:2501.00656) and OLMo 3 (OLMo Team 2025, arXiv:2512.13961).

Norms follow attention and feed-forward layer. Queries and keys have norms over all heads together. In OLMo 3, three of four
layers attend to a window, and only the other layers' positional encoding is extended. Dimensions are those of the config.json
files that Ai2 published.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from models.blocks import PostNormBlock
from models.components import AllHeadsRMSNorm, Attention, FeedForward
from models.decoder import Decoder
from models.huggingface import (
    NAMES,
    HuggingFace,
    read_rope,
    read_windows,
    sliding_theta,
    text_of,
    write_rope,
    write_rope_by_type,
    write_windows,
)
from models.rope import Rope
from models.sizes import DEBUG, DecoderSizes, WindowedSizes
from models.spec import LayerKind, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Olmo2Sizes(DecoderSizes):
    norm_eps: float = 1e-6
    rope_theta: float = 500_000.0
    attention_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Olmo3Sizes(WindowedSizes):
    norm_eps: float = 1e-6
    rope_theta: float = 500_000.0
    attention_bias: bool = False

    def kinds(self) -> dict[str, LayerKind]:
        full, sliding = super().kinds().values()
        return {"full": full, "sliding": replace(sliding, rope=Rope(dim=self.head_dim, theta=self.rope_theta))}


def _decoder(sizes: Olmo2Sizes | Olmo3Sizes, kinds: Mapping[str, LayerKind], layer_kinds: Sequence[str]) -> Decoder:
    norm, bias = partial(nn.RMSNorm, eps=sizes.norm_eps), sizes.attention_bias

    def block(kind: LayerKind) -> PostNormBlock:
        q_norm, k_norm = (
            AllHeadsRMSNorm(heads * sizes.head_dim, eps=sizes.norm_eps) for heads in (sizes.n_heads, sizes.n_kv_heads)
        )
        attention = Attention(sizes, kind, qkv_bias=bias, out_bias=bias, q_norm=q_norm, k_norm=k_norm)
        return PostNormBlock(sizes.dim, norm, attention, FeedForward(sizes))

    return Decoder(sizes, kinds, layer_kinds, block, norm)


def olmo2(sizes: Olmo2Sizes) -> Decoder:
    return _decoder(sizes, {"full": LayerKind(rope=sizes.rope())}, ["full"] * sizes.n_layers)


def olmo3(sizes: Olmo3Sizes) -> Decoder:
    return _decoder(sizes, sizes.kinds(), sizes.all_layer_types)


_common = {
    "fixed": {"hidden_act": "silu"},
    "fields": {"head_dim": "head_dim", "attention_bias": "attention_bias"},
    "defaults": {"norm_eps": 1e-5, "tied_embeddings": False, "attention_bias": False},
    "names": NAMES | {"attention_norm": "post_attention_layernorm", "ffn_norm": "post_feedforward_layernorm"},
}

_olmo2 = partial(Olmo2Sizes, head_dim=128, vocab_size=100352)
OLMO2 = ModelSpec(
    model=olmo2,
    sizes={
        "debug": Olmo2Sizes(**DEBUG),
        "1b": _olmo2(dim=2048, n_layers=16, n_heads=16, n_kv_heads=16, hidden_dim=8192),
        "7b": _olmo2(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, hidden_dim=11008),
        "13b": _olmo2(dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, hidden_dim=13824),
        "32b": _olmo2(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, hidden_dim=27648),
    },
    huggingface=HuggingFace(
        **_common,
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        sizes_type=Olmo2Sizes,
        read=read_rope,
        write=write_rope,
    ),
)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = read_rope(config, default_theta=500_000.0)
    theta = sliding_theta(config, rope["rope_theta"])
    if theta != rope["rope_theta"]:
        raise ValueError(f"rope_theta {text_of(theta)}: must be equal in full_attention and sliding_attention")
    types = ["full" if (i + 1) % 4 == 0 else "sliding" for i in range(config["num_hidden_layers"])]
    return rope | read_windows({"sliding_window": 4096, **config}, default=types)


def _write(sizes: Olmo3Sizes) -> dict[str, Any]:
    return {**write_rope_by_type(sizes, sizes.rope_theta), **write_windows(sizes)}


_olmo3 = partial(
    Olmo3Sizes,
    **{"head_dim": 128, "vocab_size": 100278, "window": 4096, "layer_types": ("sliding", "sliding", "sliding", "full")},
    **{"rope_type": "yarn", "rope_factor": 8.0, "rope_original_seq_len": 8192},
)
OLMO3 = ModelSpec(
    model=olmo3,
    sizes={
        "debug": _olmo3(**DEBUG | {"window": 40, "rope_original_seq_len": 32}),
        "7b": _olmo3(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, hidden_dim=11008),
        "32b": _olmo3(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, hidden_dim=27648),
    },
    huggingface=HuggingFace(
        **_common,
        model_type="olmo3",
        architecture="Olmo3ForCausalLM",
        sizes_type=Olmo3Sizes,
        read=_read,
        write=_write,
    ),
)
