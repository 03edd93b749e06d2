"""The text models of Gemma 4 (Gemma Team 2026, https://ai.google.dev/gemma/docs/core), dense and without inputs of single layers.

Norms surround attention and feed-forward layer. Five of six layers attend to a window; the others have wider heads, fewer heads
of keys and values, which may be the same projection, and rotate only a part of the pairs. Dimensions: config.json of the
published models."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from models.attention import Attention, AttentionKind
from models.blocks import SandwichBlock
from models.components import ExactBuffers, FeedForward, Norm, Output, gelu_tanh
from models.config_json import (
    LAYER_TYPES,
    Config,
    first,
    sliding_theta,
    split_rope,
    with_layer_types,
    write_layer_types,
)
from models.context import Context
from models.decoder import Decoder
from models.gemma import SANDWICH_MODULES, GemmaEmbedding
from models.huggingface import HuggingFace
from models.rope import ProportionalRope, Rope
from models.sizes import DEBUG, MixedSizes, text_of
from models.spec import ModelSpec, SizeError

_THETAS = {"full": 1e6, "sliding": 1e4}
"""Type of layer -> transformers' rope_theta of files that describe none."""


@dataclass(frozen=True, kw_only=True)
class GlobalKind(AttentionKind):
    """The kind of the layers that attend to all earlier tokens."""

    HEADS: ClassVar = ("n_heads", "num_global_key_value_heads")


@dataclass(frozen=True, kw_only=True)
class Gemma4Sizes(MixedSizes):
    """`head_dim` and `n_kv_heads` are those of layers with a window."""

    ROPE_TYPES: ClassVar = ("default",)
    GROWING: ClassVar = (*MixedSizes.GROWING, "num_global_key_value_heads")
    norm_eps: float = 1e-6
    tied_embeddings: bool = True
    attention_bias: bool = False
    global_head_dim: int = 512
    """Width of the heads of layers that attend to all earlier tokens."""
    num_global_key_value_heads: int | None = None
    """Number of their heads of keys and values. None: n_kv_heads."""
    attention_k_eq_v: bool = False
    """Whether their keys and values are the same projection."""
    rope_theta: float = _THETAS["full"]
    partial_rotary_factor: float = 0.25
    """Fraction of the pairs that they rotate."""
    rope_local_base_freq: float = _THETAS["sliding"]
    """rope_theta of the layers of the type "sliding"."""
    final_logit_softcapping: float | None = None
    """Limit of the logits, see Output. None: no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_global_key_value_heads == self.n_kv_heads:
            object.__setattr__(self, "num_global_key_value_heads", None)
        if self.num_global_key_value_heads is not None and not self.attention_k_eq_v:
            message = (
                f"num_global_key_value_heads {self.num_global_key_value_heads} has no effect without attention_k_eq_v"
            )
            raise SizeError(message, "num_global_key_value_heads", "attention_k_eq_v")
        if self.n_heads % self.global_kv_heads:
            message = f"num_global_key_value_heads {self.global_kv_heads} must divide n_heads {self.n_heads}"
            raise SizeError(message, "num_global_key_value_heads", "n_heads")
        if self.global_head_dim % 2 or not 0 < self.partial_rotary_factor <= 1:
            message = f"global_head_dim {self.global_head_dim} must be even, and partial_rotary_factor at most 1"
            raise SizeError(message, "global_head_dim", "partial_rotary_factor")

    @property
    def global_kv_heads(self) -> int:
        """Number of heads of keys and values in layers that attend to all earlier tokens."""
        return first(self.num_global_key_value_heads, self.n_kv_heads)

    def kinds(self) -> dict[str, AttentionKind]:
        sliding = super().kinds()["sliding"]
        width, fraction = self.global_head_dim, self.partial_rotary_factor
        full = GlobalKind(
            n_heads=self.n_heads,
            n_kv_heads=self.global_kv_heads,
            widths=(width, width),
            scale=1.0,
            rope=ProportionalRope(dim=width, theta=self.rope_theta, fraction=fraction),
        )
        rope = Rope(dim=self.head_dim, theta=self.rope_local_base_freq)
        return {"full": full, "sliding": replace(sliding, scale=1.0, rope=rope)}


def init_query_norm(rows: Tensor, generator: Generator) -> None:
    """Fill the weights of a norm of queries. Scores are not divided, so they would start with the variance of the width."""
    rows.fill_(len(rows) ** -0.5)


class QueryNorm(nn.RMSNorm):
    INITIAL: ClassVar = {"weight": init_query_norm}


class Gemma4Attention(Attention):
    """Attention with norms of queries, keys and values. The norm of the values has no weight."""

    def __init__(self, sizes: Gemma4Sizes, kind: AttentionKind):
        width, bias = kind.widths[0], sizes.attention_bias
        q_norm, k_norm = QueryNorm(width, sizes.norm_eps), nn.RMSNorm(width, sizes.norm_eps)
        super().__init__(sizes.dim, kind, qkv_bias=bias, out_bias=bias, q_norm=q_norm, k_norm=k_norm)
        self.eps = sizes.norm_eps
        self.shares_keys = sizes.attention_k_eq_v and isinstance(kind, GlobalKind)
        if self.shares_keys:
            self.wv = nn.Identity()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x: (batch, seq, dim)."""
        # (batch, seq, local heads, head_dim)
        q, k = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk))
        v = k if self.shares_keys else self.wv(x).unflatten(-1, (-1, self.head_dim))
        v = F.rms_norm(v, (self.head_dim,), None, self.eps)
        return self.wo(self.attend(q, k, v, context).flatten(-2))


class LayerScale(ExactBuffers):
    """Multiplies the residual stream by a constant of the layer, which is not trained."""

    BUFFERS: ClassVar = {"value": 1.0}

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.ones(1, dtype=torch.float32))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.value.type_as(h)


class Gemma4Block(SandwichBlock):
    """A block with norms before and after each layer, whose result is multiplied by a constant."""

    def __init__(self, sizes: Gemma4Sizes, norm: Norm, mixer: nn.Module, feed_forward: nn.Module):
        super().__init__(sizes, norm, mixer, feed_forward)
        self.scale = LayerScale()

    def forward(self, h: Tensor, context: Context) -> Tensor:
        return self.scale(super().forward(h, context))


def gemma4(sizes: Gemma4Sizes) -> Decoder:
    norm = partial(nn.RMSNorm, eps=sizes.norm_eps)

    def block(index: int, kind: AttentionKind) -> Gemma4Block:
        feed_forward = FeedForward(sizes.dim, sizes.hidden_dim, gelu_tanh)
        return Gemma4Block(sizes, norm, Gemma4Attention(sizes, kind), feed_forward)

    embedding = GemmaEmbedding(sizes.vocab_size, sizes.dim, math.sqrt(sizes.dim))
    return Decoder(sizes, norm, block, embedding, Output(sizes.dim, sizes.vocab_size, sizes.final_logit_softcapping))


_ABSENT = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": False}
"""Key of config.json -> the only supported value, which says that the model has no such part."""


def _read(config: Config) -> Config:
    """Return the configuration with the sizes of layers that attend to all earlier tokens. Raises ValueError."""
    has_inputs = config.get("model_type") != "gemma4_unified_text"
    defaults = _ABSENT | ({"hidden_size_per_layer_input": 256} if has_inputs else {})
    for key, value in _ABSENT.items():
        if (given := first(config.get(key), defaults[key])) != value:
            raise ValueError(f"{key} {text_of(given)}: this model supports only {text_of(value)}")
    if config.get("use_bidirectional_attention") == "all":
        raise ValueError('use_bidirectional_attention "all": this model supports only causal attention to text')
    config = with_layer_types(config, lambda i: (i + 1) % 6 != 0 and i + 1 != config["num_hidden_layers"])
    if isinstance(config["layer_types"], list) and config["layer_types"][-1:] != [LAYER_TYPES["full"]]:
        raise ValueError(f"layer_types {text_of(config['layer_types'])}: the last must be {LAYER_TYPES['full']}")
    shares_keys = first(config.get("attention_k_eq_v"), False)
    sizes = {
        "global_head_dim": first(config.get("global_head_dim"), 512),
        "num_global_key_value_heads": config.get("num_global_key_value_heads") if shares_keys else None,
    }
    return {**config, **sizes, **_layer_config(config), **_read_rope(config)}


def _layer_config(config: Config) -> Config:
    """Return the sizes in per_layer_config, an object: index of a layer -> its sizes. Raises ValueError."""
    given = config.get("per_layer_config")
    if given is None:
        return {}
    if given == {}:
        return {"global_head_dim": config["head_dim"], "num_global_key_value_heads": None}
    full = [i for i, name in enumerate(config["layer_types"]) if name == LAYER_TYPES["full"]]
    by_index = given.items() if isinstance(given, Mapping) else ()
    # transformers pads the indices with zeros.
    indices = sorted(int(key) if str(key).isdecimal() else -1 for key, _ in by_index)
    objects = [sizes for _, sizes in by_index]
    if indices != full or any(sizes != objects[0] for sizes in objects):
        message = f"this model supports only the same sizes of all {LAYER_TYPES['full']} layers"
        raise ValueError(f"per_layer_config {text_of(given)}: {message}")
    if not isinstance(objects[0], Mapping) or objects[0].keys() - {"head_dim", "num_key_value_heads"}:
        raise ValueError(
            f"per_layer_config {text_of(given)}: this model supports only head_dim and num_key_value_heads"
        )
    return {
        "global_head_dim": first(objects[0].get("head_dim"), config["head_dim"]),
        "num_global_key_value_heads": objects[0].get("num_key_value_heads"),
    }


def _read_rope(config: Config) -> dict[str, Any]:
    """Return the sizes of the positional encodings. Raises ValueError."""
    if config.get("rope_parameters") is None:
        return {
            "rope_theta": _THETAS["full"],
            "partial_rotary_factor": 0.25,
            "rope_local_base_freq": _THETAS["sliding"],
        }
    split, sliding = split_rope(config)
    full = split["rope_scaling"]
    rope_type = first(full.get("rope_type"), full.get("type"), "default")
    if rope_type not in ("proportional", "default") or full.get("factor", 1.0) != 1.0:
        raise ValueError(
            f"rope_parameters {text_of(full)}: this model supports only the rope_type proportional without factor"
        )
    fraction = first(full.get("partial_rotary_factor"), 1.0) if rope_type == "proportional" else 1.0
    theta = first(full.get("rope_theta"), _THETAS["full"])
    return {
        "rope_theta": theta,
        "partial_rotary_factor": fraction,
        "rope_local_base_freq": sliding_theta(sliding, _THETAS["sliding"]),
        "rope_parameters": None,
        "rope_scaling": {"rope_type": "default", "rope_theta": theta},
    }


def _write(sizes: Gemma4Sizes) -> Config:
    full = {
        "rope_type": "proportional",
        "partial_rotary_factor": sizes.partial_rotary_factor,
        "rope_theta": sizes.rope_theta,
    }
    sliding = {"rope_type": "default", "rope_theta": sizes.rope_local_base_freq}
    rope = {"full_attention": full, "sliding_attention": sliding}
    return write_layer_types(sizes) | _ABSENT | {"rope_parameters": rope, "sliding_window": first(sizes.window, 512)}


_debug = DEBUG | {"n_layers": 6, "n_kv_heads": 8}
_PERIOD = ("sliding",) * 5 + ("full",)
GEMMA4 = ModelSpec(
    model=gemma4,
    by_size={
        "debug": Gemma4Sizes(
            **_debug,
            window=40,
            layer_types=_PERIOD,
            global_head_dim=48,
            num_global_key_value_heads=4,
            attention_k_eq_v=True,
            final_logit_softcapping=5.0,
        ),
        "31b": Gemma4Sizes(
            dim=5376,
            n_layers=60,
            n_heads=32,
            n_kv_heads=16,
            head_dim=256,
            hidden_dim=21504,
            vocab_size=262144,
            window=1024,
            layer_types=_PERIOD,
            num_global_key_value_heads=4,
            attention_k_eq_v=True,
            final_logit_softcapping=30.0,
        ),
    },
    huggingface=HuggingFace(
        model_type="gemma4_text",
        other_model_types=("gemma4_unified_text",),
        architecture="Gemma4ForCausalLM",
        sizes_type=Gemma4Sizes,
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
        defaults={
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262144,
            "sliding_window": 512,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
        },
        read=_read,
        write=_write,
        omitted=("partial_rotary_factor", "rope_local_base_freq"),
        names=SANDWICH_MODULES | {"scale.value": "layer_scalar"},
        has_layer_config=True,
        writes_rope=False,
    ),
    gguf=None,
)
