"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437), and models of the same architecture: Moonlight (Liu et al. 2025,
arXiv:2502.16982) and Kimi K2 (Kimi Team 2025, arXiv:2507.20534). Attention with compressed queries, keys and values, and mixtures
of experts whose load is balanced by a correction of the router's scores. Dimensions: config.json of the published models."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models.attention import AttentionKind, attention_kernel
from models.blocks import PredictionBlock
from models.components import FeedForward
from models.config_json import PREDICTION_KEY, Config, first, number_of_layers, read_prediction, write_prediction
from models.context import Context
from models.decoder import Decoder, pre_norm_decoder
from models.gguf import NAMES as GGUF_NAMES
from models.gguf import Gguf, HeadRows, Keys
from models.huggingface import MIXTURE_NAMES, PREDICTION_COPIES, HuggingFace, shared_expert_names
from models.mixture_sizes import DEBUG_EXPERTS, GroupedMixtureSizes
from models.moe import CorrectedRouter, MixtureOfExperts
from models.rope import YarnRope, rotate_halves, rotate_pairs, without_rotation
from models.sizes import DEBUG, PredictionSizes, text_of
from models.spec import ModelSpec, SizeError

_LATENT_EPS = 1e-6
"""Constant of the norms of compressed queries, keys and values. The published code has no setting for it."""


@dataclass(frozen=True, kw_only=True)
class DeepSeekSizes(PredictionSizes, GroupedMixtureSizes):
    """`head_dim` is the number of rotated dims of a head's queries and keys."""

    ROPE_TYPES: ClassVar = ("default", "yarn")
    GROWING: ClassVar = (*GroupedMixtureSizes.GROWING, "q_lora_rank", "kv_lora_rank")
    norm_eps: float = 1e-6
    attention_bias: bool = False
    """Whether the projections from and to the residual stream have biases, except that of queries that are not compressed."""
    q_lora_rank: int | None = None
    """Width of the compressed queries. None: queries are not compressed."""
    kv_lora_rank: int
    """Width of the compressed keys and values."""
    qk_nope_head_dim: int
    """Number of dims of a head's queries and keys that are not rotated."""
    v_head_dim: int
    rope_interleave: bool = True
    """Whether rotated pairs are neighbouring values. Otherwise they are half of the rotated dims apart."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_kv_heads != self.n_heads:
            message = (
                f"n_kv_heads {self.n_kv_heads} must be n_heads {self.n_heads}: each head has its own keys and values"
            )
            raise SizeError(message, "n_kv_heads", "n_heads")
        require_leading_dense(self)

    @property
    def head_widths(self) -> tuple[int, int]:
        return self.qk_nope_head_dim + self.head_dim, self.v_head_dim

    def kinds(self) -> dict[str, AttentionKind]:
        rope, scale = self.rope(), self.head_widths[0] ** -0.5
        if isinstance(rope, YarnRope) and rope.mscale_all_dim:
            scale *= rope.amplitude_of(rope.mscale_all_dim) ** 2
        return {name: replace(kind, scale=scale) for name, kind in super().kinds().items()}


def require_leading_dense(sizes: GroupedMixtureSizes) -> None:
    """Raise SizeError if a dense layer follows one with experts, which the files cannot express."""
    sparse = sizes.all_sparse_layers
    if list(sparse) != sorted(sparse):
        message = f"sparse_layers {text_of(sparse)}: dense layers must precede all layers with experts"
        raise SizeError(message, "sparse_layers", "n_layers")


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434). The keys and values of all heads are
    projections of one compressed vector, as are the queries. The rotated dims of keys are the same for all heads.

    Names of the matrices are those of DeepSeek's code."""

    TENSOR: ClassVar = {
        "": "gather_latents",
        "wq_a": "token",
        "q_norm": "norm",
        "wq_b": "local_column",
        "wq": "local_column",
        "wkv_a": "token",
        "kv_norm": "norm",
        "wkv_b": "local_column",
        "wo": "row",
    }
    INTO_RESIDUAL: ClassVar = ("wo",)

    def __init__(self, sizes: DeepSeekSizes, kind: AttentionKind):
        super().__init__()
        self.kind = kind
        (self.head_dim, self.v_dim), self.rope_dim = sizes.head_widths, sizes.head_dim
        rotate = rotate_pairs if sizes.rope_interleave else rotate_halves
        self.rotate = without_rotation if kind.rope is None else rotate
        q_dim, bias = sizes.n_heads * self.head_dim, sizes.attention_bias
        is_compressed = sizes.q_lora_rank is not None
        q_rank = first(sizes.q_lora_rank, sizes.dim)
        self.wq = nn.Identity() if is_compressed else nn.Linear(sizes.dim, q_dim, bias=False)
        self.wq_a = nn.Linear(sizes.dim, q_rank, bias=bias) if is_compressed else nn.Identity()
        self.q_norm = nn.RMSNorm(q_rank, _LATENT_EPS) if is_compressed else nn.Identity()
        self.wq_b = nn.Linear(q_rank, q_dim, bias=False) if is_compressed else nn.Identity()
        self.wkv_a = nn.Linear(sizes.dim, sizes.kv_lora_rank + self.rope_dim, bias=bias)
        self.kv_norm = nn.RMSNorm(sizes.kv_lora_rank, _LATENT_EPS)
        self.wkv_b = nn.Linear(sizes.kv_lora_rank, sizes.n_heads * (sizes.qk_nope_head_dim + self.v_dim), bias=False)
        self.wo = nn.Linear(sizes.n_heads * self.v_dim, sizes.dim, bias=bias)
        self.core = attention_kernel(kind)
        self.latent_dims = q_rank, sizes.kv_lora_rank, self.rope_dim

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x: (batch, seq, dim)."""
        kv, k_rope = self.wkv_a(x).split(self.latent_dims[1:], -1)
        # One tensor, so that tensor parallelism gathers it once. Under it, a rank has computed only some tokens of it.
        latents = torch.cat((self.q_norm(self.wq_a(x)), self.kv_norm(kv), k_rope), -1)
        return self.attend(latents, context)

    def attend(self, latents: Tensor, context: Context) -> Tensor:
        """Return the result of attention, (batch, seq, dim). latents: input of the queries' projection, compressed keys and
        values, and rotated dims of the keys before their rotation, (batch, seq, sum of latent_dims)."""
        q, kv, k_rope = latents.split(self.latent_dims, -1)
        # -1, not n_heads: under tensor parallelism a rank holds only its own heads.
        q = self.wq_b(self.wq(q)).unflatten(-1, (-1, self.head_dim))  # (batch, seq, local heads, head_dim)
        q, q_rope = q.split((self.head_dim - self.rope_dim, self.rope_dim), -1)
        kv = self.wkv_b(kv).unflatten(-1, (-1, self.head_dim - self.rope_dim + self.v_dim))
        k, v = kv.split((self.head_dim - self.rope_dim, self.v_dim), -1)
        k_rope = self.rotate(k_rope[:, :, None], context.rope).expand(*k.shape[:-1], -1)
        q, k = torch.cat((q, self.rotate(q_rope, context.rope)), -1), torch.cat((k, k_rope), -1)
        out = self.core(*(x.transpose(1, 2) for x in (q, k, v)), context.mask)  # (batch, local heads, seq, v_dim)
        return self.wo(out.transpose(1, 2).flatten(-2))


def sparse_or_dense(sizes: GroupedMixtureSizes, index: int) -> nn.Module:
    """Return the feed-forward layer of a block, which is given by its index."""
    if sizes.is_sparse(index):
        return MixtureOfExperts(sizes, CorrectedRouter(sizes), shared=FeedForward(sizes.dim, sizes.shared_dim))
    return FeedForward(sizes.dim, sizes.hidden_dim)


def deepseek(sizes: DeepSeekSizes) -> Decoder:
    return pre_norm_decoder(sizes, partial(LatentAttention, sizes), partial(sparse_or_dense, sizes))


def read_leading_dense(config: Config, default: int) -> list[bool]:
    """Return whether each layer is a mixture of experts: all but the first. Raises ValueError.

    Args:
        config: Content of config.json.
        default: Number of the first layers, which are dense, if the file does not have it.
    """
    dense, layers = number_of_layers(config, "first_k_dense_replace", default), config["num_hidden_layers"]
    if dense >= layers:
        message = f"first_k_dense_replace {dense} must be below num_hidden_layers {layers}"
        raise ValueError(f"{message}: without experts it is a dense model")
    return [i >= dense for i in range(layers)]


def _read(config: Config) -> Config:
    """Return the configuration with the dense layers as sparse_layers."""
    sparse, rotated = read_leading_dense(config, 3), config["qk_rope_head_dim"]
    if config.get("head_dim") not in (None, rotated):
        raise ValueError(f"head_dim {text_of(config['head_dim'])} must be qk_rope_head_dim {text_of(rotated)}")
    return {**config, "sparse_layers": sparse, **read_prediction(config)}


def write_leading_dense(sizes: GroupedMixtureSizes) -> dict[str, Any]:
    """Inverse of read_leading_dense."""
    return {"first_k_dense_replace": sizes.all_sparse_layers.index(True)}


def _gguf_fixed(sizes: DeepSeekSizes) -> Keys:
    fixed = {"attention_bias": False, "rope_interleave": True}
    # llama.cpp takes each model of these sizes for a "lite" one.
    has_no_rank = sizes.n_layers in (26, 27) or (sizes.n_layers, sizes.vocab_size) == (48, 128256)
    is_compressed = sizes.q_lora_rank is not None
    return fixed | ({"q_lora_rank": None} if has_no_rank else {} if is_compressed else {"q_lora_rank": "a number"})


def _gguf_keys(sizes: DeepSeekSizes) -> Keys:
    rank = {} if sizes.q_lora_rank is None else {"attention.q_lora_rank": sizes.q_lora_rank}
    return {
        # llama.cpp computes with the compressed keys and values, which all heads share.
        "attention.head_count_kv": 1,
        "attention.key_length": sizes.kv_lora_rank + sizes.head_dim,
        "attention.value_length": sizes.kv_lora_rank,
        "attention.key_length_mla": sizes.head_widths[0],
        "attention.value_length_mla": sizes.v_head_dim,
        "attention.kv_lora_rank": sizes.kv_lora_rank,
        **rank,
        "leading_dense_block_count": sizes.all_sparse_layers.index(True),
        "expert_feed_forward_length": sizes.expert_dim,
        "expert_shared_count": sizes.n_shared_experts,
        "expert_group_count": sizes.n_groups,
        "expert_group_used_count": sizes.groups_per_token,
        "expert_gating_func": 2,  # sigmoid
        "expert_weights_scale": sizes.weight_scale,
        "expert_weights_norm": sizes.normalize_weights,
        **_gguf_rope(sizes),
    }


def _gguf_remarks(sizes: DeepSeekSizes) -> tuple[str, ...]:
    what = "llama.cpp takes it for the compressed queries and keys too, instead of 1e-06"
    return () if sizes.norm_eps == 1e-6 else (f"norm_eps {sizes.norm_eps}: {what}",)


def _gguf_rope(sizes: DeepSeekSizes) -> Keys:
    """llama.cpp multiplies cosine and sine by a factor A, and the scores by (A (1 + 0.1 L ln(factor))) ** 2."""
    rope = sizes.rope()
    if not isinstance(rope, YarnRope) or rope.factor <= 1:
        return {}
    scale = rope.amplitude_of(rope.mscale_all_dim) if rope.mscale_all_dim else 1.0
    log_multiplier = (scale / rope.amplitude - 1) / (0.1 * math.log(rope.factor))
    return {
        "rope.scaling.attn_factor": rope.amplitude,
        "rope.scaling.yarn_log_multiplier": 0.1 * log_multiplier,
    }


CORRECTED_NAMES = (
    MIXTURE_NAMES
    | shared_expert_names("mlp.shared_experts")
    | {"feed_forward.router.correction": "mlp.gate.e_score_correction_bias"}
)
"""MIXTURE_NAMES with those of shared experts and of the correction of a router."""
ROUTED_KEYS = {
    "n_experts": "n_routed_experts",
    "n_groups": "n_group",
    "groups_per_token": "topk_group",
    "weight_scale": "routed_scaling_factor",
}
"""Size of a mixture of experts -> its key in config.json."""
ROUTED_ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": PREDICTION_KEY}
LATENT_NAMES = CORRECTED_NAMES | {
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
}

_YARN = {"rope_type": "yarn", "rope_original_seq_len": 4096, "rope_mscale": 1.0, "rope_mscale_all_dim": 1.0}
_SIZES = {
    "debug": DeepSeekSizes(
        **DEBUG | DEBUG_EXPERTS | {"n_kv_heads": 8, "hidden_dim": 352, "head_dim": 16, "expert_hidden_dim": 96},
        n_shared_experts=1, n_groups=4, groups_per_token=2, weight_scale=2.5,
        q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=24, v_head_dim=24,
        sparse_layers=(False, True, True, True),
    ),
    "16b-a3b": DeepSeekSizes(
        dim=2048, n_layers=27, n_heads=16, n_kv_heads=16, head_dim=64, hidden_dim=11264,
        vocab_size=163840, norm_eps=1e-5, rope_theta=50_000.0, n_experts=64, experts_per_token=6,
        expert_hidden_dim=1408, n_shared_experts=2, weight_scale=2.446, kv_lora_rank=512,
        qk_nope_head_dim=128, v_head_dim=128, sparse_layers=(False,) + (True,) * 26,
    ),
    "671b": DeepSeekSizes(
        dim=7168, n_layers=61, n_heads=128, n_kv_heads=128, head_dim=64, hidden_dim=18432,
        vocab_size=129280, n_experts=256, experts_per_token=8, expert_hidden_dim=2048,
        n_shared_experts=1, n_groups=8, groups_per_token=4, weight_scale=2.5, q_lora_rank=1536,
        kv_lora_rank=512, qk_nope_head_dim=128, v_head_dim=128, rope_factor=40.0, **_YARN,
        sparse_layers=(False,) * 3 + (True,) * 58, prediction_layers=1,
    ),
    "kimi-k2-1t": DeepSeekSizes(
        dim=7168, n_layers=61, n_heads=64, n_kv_heads=64, head_dim=64, hidden_dim=18432,
        vocab_size=163840, rope_theta=50_000.0, n_experts=384, experts_per_token=8, expert_hidden_dim=2048,
        n_shared_experts=1, weight_scale=2.827, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
        v_head_dim=128, rope_factor=32.0, rope_beta_fast=1.0, **_YARN, sparse_layers=(False,) + (True,) * 60,
    ),
}  # fmt: skip
DEEPSEEK_V3 = ModelSpec(
    model=deepseek,
    by_size=_SIZES,
    huggingface=HuggingFace(
        model_type="deepseek_v3",
        other_model_types=("kimi_k2",),
        architecture="DeepseekV3ForCausalLM",
        sizes_type=DeepSeekSizes,
        # Other readers than transformers need the last three.
        fixed={"hidden_act": "silu", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        defaults={
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "intermediate_size": 18432,
            "max_position_embeddings": 4096,
            "num_attention_heads": 128,
        },
        read=_read,
        write=lambda sizes: write_leading_dense(sizes) | write_prediction(sizes),
        size_keys=ROUTED_KEYS | {"head_dim": "qk_rope_head_dim"},
        aliases=ROUTED_ALIASES,
        omitted=("sparse_layers",),
        names=LATENT_NAMES | PredictionBlock.NAMES,
        prediction_copies=PREDICTION_COPIES,
    ),
    gguf=Gguf(
        architecture="deepseek2",
        names=GGUF_NAMES
        | {
            "attention.wq_a": "attn_q_a",
            "attention.q_norm": "attn_q_a_norm",
            "attention.wq_b": "attn_q_b",
            "attention.wkv_a": "attn_kv_a_mqa",
            "attention.kv_norm": "attn_kv_a_norm",
            "feed_forward.router.correction": "exp_probs_b.bias",
            "feed_forward.shared.w1": "ffn_gate_shexp",
            "feed_forward.shared.w2": "ffn_down_shexp",
            "feed_forward.shared.w3": "ffn_up_shexp",
        },
        head_rows={
            "attention.wkv_b": (
                HeadRows(name="attn_k_b", rows=lambda sizes: slice(0, sizes.qk_nope_head_dim), transposed=True),
                HeadRows(name="attn_v_b", rows=lambda sizes: slice(sizes.qk_nope_head_dim, None)),
            )
        },
        fixed=_gguf_fixed,
        remarks=_gguf_remarks,
        keys=_gguf_keys,
    ),
)
