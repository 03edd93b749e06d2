"""GLM-4.5 (GLM-4.5 Team 2025, arXiv:2508.06471): mixtures of experts as in DeepSeek-V3, and grouped-query attention that rotates
half of each head. Dimensions: config.json of the published models."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import nn

from models.attention import Attention, AttentionKind
from models.blocks import PredictionBlock
from models.config_json import Config, read_prediction, rotary_factor, write_prediction
from models.decoder import Decoder, pre_norm_decoder
from models.deepseek import (
    CORRECTED_NAMES,
    ROUTED_ALIASES,
    ROUTED_KEYS,
    read_leading_dense,
    require_leading_dense,
    sparse_or_dense,
    write_leading_dense,
)
from models.huggingface import PREDICTION_COPIES, HuggingFace
from models.mixture_sizes import DEBUG_EXPERTS, GroupedMixtureSizes
from models.sizes import DEBUG, PartlyRotatedSizes, PredictionSizes
from models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class GlmSizes(PredictionSizes, PartlyRotatedSizes, GroupedMixtureSizes):
    ROPE_TYPES: ClassVar = ("default", "linear", "yarn")
    norm_eps: float = 1e-5
    attention_bias: bool = False
    """Whether the projections of queries, keys and values have biases."""
    use_qk_norm: bool = False
    """Whether queries and keys of each head have norms."""
    partial_rotary_factor: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_leading_dense(self)


def glm(sizes: GlmSizes) -> Decoder:
    def attention(kind: AttentionKind) -> Attention:
        norm = partial(nn.RMSNorm, sizes.head_dim, sizes.norm_eps) if sizes.use_qk_norm else nn.Identity
        return Attention(sizes.dim, kind, qkv_bias=sizes.attention_bias, q_norm=norm(), k_norm=norm())

    return pre_norm_decoder(sizes, attention, partial(sparse_or_dense, sizes))


def _read(config: Config) -> Config:
    others = {"sparse_layers": read_leading_dense(config, 1), "partial_rotary_factor": rotary_factor(config, 0.5)}
    return {**config, **others, **read_prediction(config)}


_glm = partial(
    GlmSizes, n_heads=96, n_kv_heads=8, head_dim=128, vocab_size=151552, rope_theta=1e6, attention_bias=True,
    experts_per_token=8, n_shared_experts=1, prediction_layers=1,
)  # fmt: skip
_SIZES = {
    "debug": GlmSizes(
        **DEBUG | DEBUG_EXPERTS | {"hidden_dim": 352, "expert_hidden_dim": 96}, n_shared_experts=1,
        use_qk_norm=True, attention_bias=True, sparse_layers=(False, True, True, True),
    ),
    "106b-a12b": _glm(
        dim=4096, n_layers=46, hidden_dim=10944, n_experts=128, expert_hidden_dim=1408,
        sparse_layers=(False,) + (True,) * 45,
    ),
    "355b-a32b": _glm(
        dim=5120, n_layers=92, hidden_dim=12288, n_experts=160, expert_hidden_dim=1536, weight_scale=2.5,
        use_qk_norm=True, sparse_layers=(False,) * 3 + (True,) * 89,
    ),
}  # fmt: skip
GLM_4_5 = ModelSpec(
    model=glm,
    by_size=_SIZES,
    huggingface=HuggingFace(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        sizes_type=GlmSizes,
        defaults={
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "vocab_size": 151552,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
        },
        read=_read,
        write=lambda sizes: write_leading_dense(sizes) | write_prediction(sizes),
        size_keys=ROUTED_KEYS,
        aliases=ROUTED_ALIASES,
        omitted=("sparse_layers",),
        names=CORRECTED_NAMES | PredictionBlock.NAMES,
        prediction_copies=PREDICTION_COPIES,
    ),
    gguf=None,
)
