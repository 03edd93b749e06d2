"""Qwen2, Qwen2.5 (Qwen Team 2024, arXiv:2407.10671 and arXiv:2412.15115) and Qwen3 (Qwen Team 2025, arXiv:2505.09388).

Qwen2 has biases on queries, keys and values. Qwen3 has norms of each head's queries and keys instead. Dimensions are those of the
config.json files that the Qwen team published.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from models.blocks import PreNormBlock
from models.components import Attention, FeedForward
from models.decoder import Decoder
from models.huggingface import HuggingFace, first, read_rope, read_windows, text_of, write_rope, write_windows
from models.sizes import DEBUG, WindowedSizes
from models.spec import LayerKind, ModelSpec


@dataclass(frozen=True, kw_only=True)
class QwenSizes(WindowedSizes):
    norm_eps: float = 1e-6
    rope_theta: float = 1e6


@dataclass(frozen=True, kw_only=True)
class Qwen3Sizes(QwenSizes):
    attention_bias: bool = False


def qwen2(sizes: QwenSizes) -> Decoder:
    norm = partial(nn.RMSNorm, eps=sizes.norm_eps)

    def block(kind: LayerKind) -> PreNormBlock:
        return PreNormBlock(sizes.dim, norm, Attention(sizes, kind, qkv_bias=True), FeedForward(sizes))

    return Decoder(sizes, sizes.kinds(), sizes.all_layer_types, block, norm)


def qwen3(sizes: Qwen3Sizes) -> Decoder:
    norm, bias = partial(nn.RMSNorm, eps=sizes.norm_eps), sizes.attention_bias

    def block(kind: LayerKind) -> PreNormBlock:
        norms = {"q_norm": norm(sizes.head_dim), "k_norm": norm(sizes.head_dim)}
        attention = Attention(sizes, kind, qkv_bias=bias, out_bias=bias, **norms)
        return PreNormBlock(sizes.dim, norm, attention, FeedForward(sizes))

    return Decoder(sizes, sizes.kinds(), sizes.all_layer_types, block, norm)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    sliding = {} if config.get("use_sliding_window") else {"sliding_window": None}
    full = first(config.get("max_window_layers"), 28)
    if type(full) is not int:
        raise ValueError(f"max_window_layers {text_of(full)} must be an integer")
    types = ["sliding" if i >= full else "full" for i in range(config["num_hidden_layers"])]
    return read_rope(config) | read_windows({**config, **sliding}, default=types)


def _write(sizes: QwenSizes) -> dict[str, Any]:
    types = sizes.all_layer_types
    first_sliding = types.index("sliding") if "sliding" in types else sizes.n_layers
    windows = {"use_sliding_window": sizes.window is not None, "max_window_layers": first_sliding}
    return {**write_rope(sizes), **write_windows(sizes), **windows}


_qwen2_5 = partial(QwenSizes, head_dim=128, vocab_size=152064)
_small = partial(QwenSizes, n_kv_heads=2, vocab_size=151936, tied_embeddings=True)
QWEN2_5 = ModelSpec(
    model=qwen2,
    sizes={
        "debug": QwenSizes(**DEBUG),
        "0.5b": _small(dim=896, n_layers=24, n_heads=14, head_dim=64, hidden_dim=4864),
        "1.5b": _small(dim=1536, n_layers=28, n_heads=12, head_dim=128, hidden_dim=8960),
        "3b": _small(dim=2048, n_layers=36, n_heads=16, head_dim=128, hidden_dim=11008),
        "7b": _qwen2_5(dim=3584, n_layers=28, n_heads=28, n_kv_heads=4, hidden_dim=18944),
        "14b": _qwen2_5(dim=5120, n_layers=48, n_heads=40, n_kv_heads=8, hidden_dim=13824, norm_eps=1e-5),
        "32b": _qwen2_5(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, hidden_dim=27648, norm_eps=1e-5),
        "72b": _qwen2_5(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=29568, norm_eps=1e-5),
    },
    huggingface=HuggingFace(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        sizes_type=QwenSizes,
        fixed={"hidden_act": "silu"},
        fields={"head_dim": "head_dim"},
        defaults={"norm_eps": 1e-6, "tied_embeddings": False},
        read=_read,
        write=_write,
    ),
)

_qwen3 = partial(Qwen3Sizes, n_kv_heads=8, head_dim=128, vocab_size=151936)
QWEN3 = ModelSpec(
    model=qwen3,
    sizes={
        "debug": Qwen3Sizes(**DEBUG),
        "0.6b": _qwen3(dim=1024, n_layers=28, n_heads=16, hidden_dim=3072, tied_embeddings=True),
        "1.7b": _qwen3(dim=2048, n_layers=28, n_heads=16, hidden_dim=6144, tied_embeddings=True),
        "4b": _qwen3(dim=2560, n_layers=36, n_heads=32, hidden_dim=9728, tied_embeddings=True),
        "8b": _qwen3(dim=4096, n_layers=36, n_heads=32, hidden_dim=12288),
        "14b": _qwen3(dim=5120, n_layers=40, n_heads=40, hidden_dim=17408),
        "32b": _qwen3(dim=5120, n_layers=64, n_heads=64, hidden_dim=25600),
    },
    huggingface=HuggingFace(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        sizes_type=Qwen3Sizes,
        fixed={"hidden_act": "silu"},
        fields={"head_dim": "head_dim", "attention_bias": "attention_bias"},
        defaults={"norm_eps": 1e-6, "tied_embeddings": False, "head_dim": 128, "attention_bias": False},
        read=_read,
        write=_write,
    ),
)
