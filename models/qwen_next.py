"""Qwen3-Next (Qwen Team 2025, https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct), with mixtures of experts, and the dense
text models of Qwen3.5 (Qwen Team 2026): three of four layers are Gated DeltaNet, the others have attention with a gate on its
result. Norms multiply by 1 + weight, and a quarter of each head is rotated. Dimensions: config.json of the published models."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from models.attention import Attention, AttentionKind
from models.blocks import PredictionBlock
from models.components import FeedForward, Gate, OffsetRMSNorm
from models.config_json import (
    PREDICTION_KEY,
    Config,
    first,
    full_attention_interval,
    read_prediction,
    rotary_factor,
    with_layer_types,
    write_layer_types,
    write_prediction,
)
from models.context import Context
from models.decoder import Decoder, pre_norm_decoder
from models.delta_net import GatedDeltaNet, RecurrentMixer
from models.huggingface import MIXTURE_NAMES, NAMES, HuggingFace, shared_expert_names
from models.hybrid import DEBUG_HYBRID, HybridSizes
from models.mixture_sizes import DEBUG_EXPERTS, MixtureSizes, PartlySparseSizes
from models.moe import MixtureOfExperts
from models.qwen import read_sparse_layers, write_sparse_layers
from models.sizes import DEBUG, PartlyRotatedSizes, PredictionSizes, require
from models.spec import LayerKind, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Qwen35Sizes(PredictionSizes, PartlyRotatedSizes, HybridSizes):
    ROPE_TYPES: ClassVar = ("default",)
    MAX_PREDICTION_LAYERS: ClassVar = 1  # in the files, all would share projections and norms
    norm_eps: float = 1e-6
    rope_theta: float = 1e7
    attention_bias: bool = False
    partial_rotary_factor: float = 0.25


@dataclass(frozen=True, kw_only=True)
class QwenNextSizes(Qwen35Sizes, PartlySparseSizes):
    GROWING: ClassVar = (*HybridSizes.GROWING, "expert_hidden_dim", "shared_expert_intermediate_size")
    normalize_weights: bool = True
    shared_expert_intermediate_size: int
    """Width of the shared expert."""

    @property
    def shared_dim(self) -> int:
        """Width of the shared expert."""
        return self.shared_expert_intermediate_size


class GatedAttention(Attention):
    """Attention whose result is multiplied by a sigmoid gate (Qiu et al. 2025, "Gated Attention for Large Language Models",
    arXiv:2505.06708). The projection of queries also computes the gates: of each head, its queries, then its gates."""

    def __init__(self, sizes: Qwen35Sizes, kind: AttentionKind):
        norm, bias = partial(OffsetRMSNorm, sizes.head_dim, eps=sizes.norm_eps), sizes.attention_bias
        super().__init__(sizes.dim, kind, qkv_bias=bias, out_bias=bias, q_norm=norm(), k_norm=norm())
        self.wq = nn.Linear(sizes.dim, 2 * kind.n_heads * self.head_dim, bias=bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x: (batch, seq, dim)."""
        q, gate = self.wq(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)  # (batch, seq, local heads, head_dim)
        k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wk, self.wv))
        return self.wo((self.attend(q, k, v, context) * gate.sigmoid()).flatten(-2))


class GroupedDeltaNet(GatedDeltaNet):
    """Gated DeltaNet whose files join the projections: for each head of keys its queries, its keys, and the values and gates of
    its heads of values, and likewise wb x and wa x."""

    TENSOR: ClassVar = {"": "gather", "wqkvz": "column", "wba": "column", "norm": "head_norm", "wo": "row"}

    def build_projections(self, dim: int, keys: int, values: int) -> None:
        self.wqkvz = nn.Linear(dim, 2 * (keys + values), bias=False)
        self.wba = Gate(dim, 2 * self.kind.value_heads)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        key_dim, value_dim = self.kind.widths
        groups = self.kind.value_heads // self.kind.key_heads
        widths = key_dim, key_dim, groups * value_dim, groups * value_dim
        q, k, v, z = (
            self.wqkvz(x).unflatten(-1, (-1, sum(widths))).split(widths, -1)
        )  # (batch, seq, local key heads, width)
        v, z = (y.flatten(2).unflatten(-1, (-1, value_dim)) for y in (v, z))
        b, a = self.wba(x).unflatten(-1, (-1, 2 * groups)).split(groups, -1)
        return q, k, v, z, a.flatten(2), b.flatten(2)


class GatedSharedExpert(MixtureOfExperts):
    """A mixture of experts whose shared expert's result is multiplied by a gate of the token."""

    TENSOR: ClassVar = {"shared_gate": "token"}

    def __init__(self, sizes: QwenNextSizes):
        super().__init__(sizes, shared=FeedForward(sizes.dim, sizes.shared_dim))
        self.shared_gate = Gate(sizes.dim, 1)
        self.shared_gate.WIDTH = "output"

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """x: (batch, seq, dim)."""
        return self.routed(x, context) + self.shared_gate(x).sigmoid() * self.shared(x)


def _decoder(sizes: Qwen35Sizes, delta_net: type[GatedDeltaNet]) -> Decoder:
    def mixer(kind: LayerKind) -> nn.Module:
        is_attention = isinstance(kind, AttentionKind)
        return GatedAttention(sizes, kind) if is_attention else delta_net(sizes.dim, kind, sizes.norm_eps)

    def feed_forward(index: int) -> nn.Module:
        if isinstance(sizes, MixtureSizes) and sizes.is_sparse(index):
            return GatedSharedExpert(sizes)
        return FeedForward(sizes.dim, sizes.hidden_dim)

    return pre_norm_decoder(sizes, mixer, feed_forward, OffsetRMSNorm)


def qwen_next(sizes: QwenNextSizes) -> Decoder:
    return _decoder(sizes, GroupedDeltaNet)


def qwen35(sizes: Qwen35Sizes) -> Decoder:
    return _decoder(sizes, GatedDeltaNet)


def _read(config: Config, key: str) -> Config:
    """Return the configuration with the types of all layers. key: of the number of layers for multi-token prediction."""
    interval = first(config.get("full_attention_interval"), 4)
    require("full_attention_interval", interval, int)
    config = {**config, "partial_rotary_factor": rotary_factor(config, 0.25), **read_prediction(config, key)}
    return with_layer_types(config, lambda i: (i + 1) % interval != 0, "linear")


def _write(sizes: Qwen35Sizes) -> Config:
    """Return the types of the layers, and the distance between those with attention, which other readers read instead."""
    interval = full_attention_interval(sizes.all_layer_types)
    return write_layer_types(sizes) | ({} if interval is None else {"full_attention_interval": interval})


_FILTERS = dict.fromkeys((f"delta_net.{name}" for name in RecurrentMixer.FILTERS), "linear_attn.conv1d.weight")
_DELTA_NAMES = _FILTERS | {
    "delta_net": "linear_attn",
    "delta_net.norm": "linear_attn.norm",
    "delta_net.wo": "linear_attn.out_proj",
}
_GROUPED_NAMES = _DELTA_NAMES | {
    "delta_net.wqkvz": "linear_attn.in_proj_qkvz",
    "delta_net.wba": "linear_attn.in_proj_ba",
}
_SPLIT_NAMES = (
    _DELTA_NAMES
    | dict.fromkeys(("delta_net.wq", "delta_net.wk", "delta_net.wv"), "linear_attn.in_proj_qkv")
    | {"delta_net.wz": "linear_attn.in_proj_z", "delta_net.wa": "linear_attn.in_proj_a"}
    | {"delta_net.wb": "linear_attn.in_proj_b"}
)
_MIXTURE = (
    MIXTURE_NAMES | shared_expert_names("mlp.shared_expert") | {"feed_forward.shared_gate": "mlp.shared_expert_gate"}
)
_PREDICTION_KEY = "mtp_num_hidden_layers"
_PREDICTION_NAMES = {
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "eh_proj.": "mtp.fc.",
    "shared_head.norm.": "mtp.norm.",
    "": "mtp.layers.0.",
}
_DEFAULTS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
}
_HEADS = dict(head_dim=256, linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128)
_next = partial(QwenNextSizes, **_HEADS, vocab_size=151936, prediction_layers=1)
_next_sizes = {
    "debug": QwenNextSizes(
        **DEBUG | DEBUG_HYBRID | DEBUG_EXPERTS | {"hidden_dim": 352}, expert_hidden_dim=96,
        shared_expert_intermediate_size=96,
    ),
    "80b-a3b": _next(
        dim=2048, n_layers=48, n_heads=16, n_kv_heads=2, hidden_dim=5120, linear_num_value_heads=32,
        n_experts=512, experts_per_token=10, expert_hidden_dim=512, shared_expert_intermediate_size=512,
    ),
}  # fmt: skip
QWEN3_NEXT = ModelSpec(
    model=qwen_next,
    by_size=_next_sizes,
    huggingface=HuggingFace(
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        sizes_type=QwenNextSizes,
        defaults=_DEFAULTS
        | {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 2}
        | {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512},
        read=lambda config: read_sparse_layers(_read(config, PREDICTION_KEY)),
        write=lambda sizes: _write(sizes) | write_sparse_layers(sizes) | write_prediction(sizes),
        aliases={"num_local_experts": "num_experts"},
        omitted=("sparse_layers",),
        names=_MIXTURE | _GROUPED_NAMES | PredictionBlock.NAMES,
        prediction_names=_PREDICTION_NAMES,
    ),
    gguf=None,
)

_35 = partial(Qwen35Sizes, **_HEADS, vocab_size=248320, prediction_layers=1)
_small = partial(_35, n_layers=24, n_heads=8, n_kv_heads=2, linear_num_value_heads=16, tied_embeddings=True)
_large = partial(_35, n_layers=32, n_heads=16, n_kv_heads=4, linear_num_value_heads=32)
QWEN3_5 = ModelSpec(
    model=qwen35,
    by_size={
        "debug": Qwen35Sizes(**DEBUG | DEBUG_HYBRID),
        "0.8b": _small(dim=1024, hidden_dim=3584),
        "2b": _small(dim=2048, hidden_dim=6144),
        "4b": _large(dim=2560, hidden_dim=9216, tied_embeddings=True),
        "9b": _large(dim=4096, hidden_dim=12288),
        "27b": _35(dim=5120, n_layers=64, n_heads=24, n_kv_heads=4, hidden_dim=17408, linear_num_value_heads=48),
    },
    huggingface=HuggingFace(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        sizes_type=Qwen35Sizes,
        defaults=_DEFAULTS | {"hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 4},
        read=partial(_read, key=_PREDICTION_KEY),
        write=lambda sizes: _write(sizes) | write_prediction(sizes, _PREDICTION_KEY),
        size_keys={"prediction_layers": _PREDICTION_KEY},
        names=NAMES | _SPLIT_NAMES | PredictionBlock.NAMES,
        prediction_names=_PREDICTION_NAMES,
    ),
    gguf=None,
)
