"""OLMo 2 (OLMo Team 2024, arXiv:2501.00656) and OLMo 3 (OLMo Team 2025, arXiv:2512.13961): norms follow attention and
feed-forward layer, and queries and keys have norms over all heads. OLMoE (Muennighoff et al. 2024, arXiv:2409.02060) has norms
before them, and mixtures of experts. In OLMo 3, three of four layers attend to a window, and only
the other layers' context window is extended. In OLMo Hybrid (OLMo Team 2026, https://huggingface.co/allenai/Olmo-Hybrid-7B), they
are Gated DeltaNet, with norms before them. Dimensions: config.json of the published models."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import nn

from models.attention import Attention, AttentionKind
from models.blocks import Block, LaterNormBlock, PostNormBlock, PreNormBlock
from models.components import AllHeadsRMSNorm, FeedForward
from models.config_json import (
    Config,
    first,
    rope_object,
    sliding_theta,
    split_rope,
    with_layer_types,
    write_layer_types,
    write_rope_by_type,
    write_windows,
)
from models.decoder import Decoder, pre_norm_decoder
from models.delta_net import GatedDeltaNet
from models.gguf import NAMES as GGUF_NAMES
from models.gguf import Gguf, Keys
from models.huggingface import MIXTURE_NAMES, NAMES, HuggingFace
from models.hybrid import DEBUG_HYBRID, HybridSizes
from models.mixture_sizes import DEBUG_EXPERTS, MixtureSizes
from models.moe import MixtureOfExperts
from models.rope import Rope
from models.sizes import DEBUG_DERIVED, DecoderSizes, MixedSizes, SizeError, require, text_of
from models.spec import LayerKind, ModelSpec

_THETA = 500_000.0
"""Default of rope_theta, also of transformers."""
_GATED_NORM_EPS = 1e-5
"""Constant of the norms of a recurrence's results. The published code has no setting for it."""


@dataclass(frozen=True, kw_only=True)
class Olmo2Sizes(DecoderSizes):
    norm_eps: float = 1e-6
    rope_theta: float = _THETA
    attention_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Olmo3Sizes(Olmo2Sizes, MixedSizes):
    def kinds(self) -> dict[str, AttentionKind]:
        full, sliding = super().kinds().values()
        return {"full": full, "sliding": replace(sliding, rope=Rope(dim=self.head_dim, theta=self.rope_theta))}


@dataclass(frozen=True, kw_only=True)
class OlmoHybridSizes(HybridSizes):
    ROPE_TYPES: ClassVar = ("default", "linear", "llama3", "yarn")
    norm_eps: float = 1e-6
    rope_theta: float | None = 10_000.0
    """None: layers with attention have no positional encoding."""
    attention_bias: bool = False
    linear_allow_neg_eigval: bool = True
    """Whether corrections of a recurrence may reverse the sign of a value: their part is up to 2 instead of 1."""

    def kinds(self) -> dict[str, LayerKind]:
        kinds = super().kinds()
        return kinds if self.rope_theta is not None else kinds | {"full": replace(kinds["full"], rope=None)}


@dataclass(frozen=True, kw_only=True)
class OlmoeSizes(MixtureSizes):
    attention_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_heads * self.head_dim != self.dim:  # transformers normalizes dim values of the queries
            message = f"head_dim {self.head_dim} x n_heads {self.n_heads} must be dim {self.dim}"
            raise SizeError(message, "head_dim", "n_heads", "dim")


def _attention(sizes: Olmo2Sizes | OlmoeSizes | OlmoHybridSizes, kind: AttentionKind) -> Attention:
    norm, bias = partial(AllHeadsRMSNorm, eps=sizes.norm_eps), sizes.attention_bias
    q_norm, k_norm = norm(sizes.n_heads * sizes.head_dim), norm(sizes.n_kv_heads * sizes.head_dim)
    return Attention(sizes.dim, kind, qkv_bias=bias, out_bias=bias, q_norm=q_norm, k_norm=k_norm)


def olmo(sizes: Olmo2Sizes) -> Decoder:
    norm = partial(nn.RMSNorm, eps=sizes.norm_eps)

    def block(index: int, kind: AttentionKind) -> PostNormBlock:
        feed_forward = FeedForward(sizes.dim, sizes.hidden_dim)
        return PostNormBlock(sizes, norm, _attention(sizes, kind), feed_forward)

    return Decoder(sizes, norm, block)


def olmo_hybrid(sizes: OlmoHybridSizes) -> Decoder:
    norm = partial(nn.RMSNorm, eps=sizes.norm_eps)
    scale = 2.0 if sizes.linear_allow_neg_eigval else 1.0

    def block(index: int, kind: LayerKind) -> Block:
        feed_forward = FeedForward(sizes.dim, sizes.hidden_dim)
        if isinstance(kind, AttentionKind):
            return LaterNormBlock(sizes, norm, _attention(sizes, kind), feed_forward)
        return PreNormBlock(sizes, norm, GatedDeltaNet(sizes.dim, kind, _GATED_NORM_EPS, scale), feed_forward)

    return Decoder(sizes, norm, block)


def olmoe(sizes: OlmoeSizes) -> Decoder:
    return pre_norm_decoder(sizes, partial(_attention, sizes), lambda index: MixtureOfExperts(sizes))


_huggingface = partial(
    HuggingFace, names=NAMES | {"attention_norm": "post_attention_layernorm", "ffn_norm": "post_feedforward_layernorm"}
)

_OLMO2_GGUF = Gguf(
    architecture="olmo2",
    names=GGUF_NAMES
    | {
        "attention_norm": "post_attention_norm",
        "ffn_norm": "post_ffw_norm",
    },
    has_windows=True,
    writes_tied=True,
    fixed=lambda sizes: {"head_dim": sizes.dim // sizes.n_heads, "attention_bias": False},
)

_olmo2 = partial(Olmo2Sizes, head_dim=128, vocab_size=100352)
OLMO2 = ModelSpec(
    model=olmo,
    by_size={
        "debug": Olmo2Sizes(**DEBUG_DERIVED),
        "1b": _olmo2(dim=2048, n_layers=16, n_heads=16, n_kv_heads=16, hidden_dim=8192),
        "7b": _olmo2(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, hidden_dim=11008),
        "13b": _olmo2(dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, hidden_dim=13824),
        "32b": _olmo2(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, hidden_dim=27648),
    },
    huggingface=_huggingface(
        model_type="olmo2", architecture="Olmo2ForCausalLM", sizes_type=Olmo2Sizes, defaults={"rms_norm_eps": 1e-5}
    ),
    gguf=_OLMO2_GGUF,
)


def _read(config: Config) -> Config:
    config, sliding = split_rope(config)
    full = first(rope_object(config).get("rope_theta"), config["rope_theta"])
    windowed = sliding_theta(sliding, _THETA)
    if windowed != full:
        given = (
            "sliding_attention has"
            if sliding.get("rope_theta") is not None
            else "transformers gives layers with a window"
        )
        message = f"{given} {text_of(windowed)}, and this model supports only one rope_theta for all layers"
        raise ValueError(f"rope_theta {text_of(full)}: {message}")
    return with_layer_types(config, lambda i: (i + 1) % 4 != 0)


def _window_keys(sizes: Olmo3Sizes) -> Keys:
    if sizes.window is None:
        return {}
    pattern = [name == "sliding" for name in sizes.all_layer_types]
    return {"attention.sliding_window": sizes.window, "attention.sliding_window_pattern": pattern}


_YARN = dict(rope_type="yarn", rope_factor=8.0, rope_original_seq_len=8192, rope_attention_factor=1.2079441541679836)
_olmo3 = partial(
    Olmo3Sizes, head_dim=128, vocab_size=100278, window=4096, layer_types=("sliding",) * 3 + ("full",), **_YARN
)
OLMO3 = ModelSpec(
    model=olmo,
    by_size={
        "debug": _olmo3(**DEBUG_DERIVED, window=40, rope_original_seq_len=32),
        "7b": _olmo3(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, hidden_dim=11008),
        "32b": _olmo3(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, hidden_dim=27648),
    },
    huggingface=_huggingface(
        model_type="olmo3",
        architecture="Olmo3ForCausalLM",
        sizes_type=Olmo3Sizes,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": _THETA, "sliding_window": 4096},
        read=_read,
        write=lambda sizes: write_windows(sizes) | write_rope_by_type(sizes, sizes.rope_theta),
    ),
    gguf=replace(_OLMO2_GGUF, keys=_window_keys),
)
OLMOE = ModelSpec(
    model=olmoe,
    by_size={
        "debug": OlmoeSizes(**DEBUG_DERIVED | DEBUG_EXPERTS),
        "7b-a1b": OlmoeSizes(
            **{"dim": 2048, "n_layers": 16, "n_heads": 16, "n_kv_heads": 16, "head_dim": 128, "hidden_dim": 1024},
            **{"vocab_size": 50304, "n_experts": 64, "experts_per_token": 8},
        ),
    },
    huggingface=HuggingFace(
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        sizes_type=OlmoeSizes,
        fixed={"hidden_act": "silu", "clip_qkv": None},
        defaults={"rms_norm_eps": 1e-5, "intermediate_size": 2048, "num_experts": 64, "num_experts_per_tok": 8}
        | {"max_position_embeddings": 4096},
        aliases={"num_local_experts": "num_experts"},
        names=MIXTURE_NAMES,
    ),
    gguf=Gguf(
        architecture="olmoe",
        writes_tied=True,
        fixed=lambda sizes: {"n_kv_heads": sizes.n_heads, "normalize_weights": False, "attention_bias": False},
    ),
)


def _read_hybrid(config: Config) -> Config:
    """Return the configuration with the sizes that are derived from others."""
    heads, dim, layers = config["num_attention_heads"], config["hidden_size"], config["num_hidden_layers"]
    keys = first(config.get("linear_num_key_heads"), heads)
    require("linear_num_key_heads", keys, int)
    key_dim = first(config.get("linear_key_head_dim"), int(0.75 * dim / keys))
    derived = {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": first(config.get("linear_num_value_heads"), heads),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": first(config.get("linear_value_head_dim"), 2 * key_dim),
    }
    last = 3 if layers > 3 else layers - 1
    config = with_layer_types({**config, **derived}, lambda i: i % 4 != last, "linear")
    types: Any = config["layer_types"]
    if isinstance(types, list) and len({*types}) == 1:
        raise ValueError(f"layer_types {text_of(types)}: this model has layers of both types")
    return config


_LINEAR = "linear_attn"
_hybrid_names = NAMES | {
    "attention_norm": "attention_layer_norm",
    "ffn_norm": "feedforward_layer_norm",
    "attention_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    "delta_net": _LINEAR,
    **{f"delta_net.w{x}": f"{_LINEAR}.{x}_proj" for x in "qkvabo"},
    "delta_net.wz": f"{_LINEAR}.g_proj",
    **{f"delta_net.{x}_filter": f"{_LINEAR}.{x}_conv1d.weight" for x in "qkv"},
    "delta_net.norm": f"{_LINEAR}.o_norm",
}
OLMO_HYBRID = ModelSpec(
    model=olmo_hybrid,
    by_size={
        "debug": OlmoHybridSizes(**DEBUG_DERIVED | DEBUG_HYBRID, rope_theta=None),
        "7b": OlmoHybridSizes(
            dim=3840,
            n_layers=32,
            n_heads=30,
            n_kv_heads=30,
            head_dim=128,
            hidden_dim=11008,
            vocab_size=100352,
            rope_theta=None,
            linear_num_key_heads=30,
            linear_num_value_heads=30,
            linear_key_head_dim=96,
            linear_value_head_dim=192,
        ),
    },
    huggingface=HuggingFace(
        model_type="olmo_hybrid",
        architecture="OlmoHybridForCausalLM",
        sizes_type=OlmoHybridSizes,
        defaults={"hidden_size": 3840, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 30}
        | {"vocab_size": 100352, "max_position_embeddings": 65536},
        read=_read_hybrid,
        write=write_layer_types,
        names=_hybrid_names,
        other_names={"post_attention_layernorm": "feedforward_layer_norm"},  # transformers 5.24 writes it so
    ),
    gguf=None,
)
