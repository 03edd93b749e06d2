"""GPT-OSS (OpenAI 2025, arXiv:2508.10925): mixtures of experts with biases and a clamped SwiGLU. Every other layer attends to a
window, and each head has a sink, a score without a key. Dimensions: config.json of the published models."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from models.attention import Attention, AttentionKind
from models.config_json import Config, first, with_layer_types, write_rope, write_windows
from models.decoder import Decoder, pre_norm_decoder
from models.gguf import NAMES as GGUF_NAMES
from models.gguf import Gguf
from models.huggingface import NAMES, HuggingFace, StoredStack
from models.mixture_sizes import DEBUG_EXPERTS, MixtureSizes
from models.moe import Experts, MixtureOfExperts, Router, Routing
from models.sizes import DEBUG, MixedSizes, repeated, shortest_period
from models.spec import ModelSpec, SizeError


@dataclass(frozen=True, kw_only=True)
class GptOssSizes(MixedSizes, MixtureSizes):
    rope_theta: float = 150_000.0
    attention_bias: bool = True
    normalize_weights: bool = True
    swiglu_limit: float = 7.0
    """Largest gate, and largest magnitude of the other factor, in an expert."""
    swiglu_alpha: float = 1.702
    """Factor of the gate inside the sigmoid."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.normalize_weights or not all(self.all_sparse_layers):
            message = "normalize_weights and sparse_layers must be true: this model has no other routers or layers"
            raise SizeError(message, "normalize_weights", "sparse_layers")

    def kinds(self) -> dict[str, AttentionKind]:
        return {name: replace(kind, sinks=True) for name, kind in super().kinds().items()}


class BiasedRouter(Router):
    """Chooses the experts of each token by the largest logits, which have biases. The weights are their softmax."""

    def __init__(self, sizes: MixtureSizes):
        super().__init__(sizes)
        self.bias = nn.Parameter(torch.empty(sizes.n_experts))

    def forward(self, x: Tensor) -> Routing:
        """See Router. Logits and softmax are computed in fp32, for which transformers uses the dtype of x.

        Args:
            x: (batch, seq, dim).
        """
        logits = self.logits(x)
        experts = self.choose(logits)
        return Routing(logits.gather(-1, experts).softmax(-1), experts, logits.softmax(-1), logits)

    def logits(self, x: Tensor) -> Tensor:
        """See Router. x: (batch, seq, dim)."""
        return super().logits(x) + self.bias.float()


class ClampedExperts(Experts):
    """Experts with biases, whose factors are clamped: (up + 1) * gate * sigmoid(alpha * gate)."""

    BIASES: ClassVar = ("b1", "b2", "b3")

    def __init__(self, sizes: GptOssSizes):
        super().__init__(sizes.n_experts, sizes.dim, sizes.expert_dim, sizes.experts_per_token)
        self.limit, self.alpha = sizes.swiglu_limit, sizes.swiglu_alpha
        self.b1 = nn.Parameter(torch.empty(sizes.n_experts, sizes.expert_dim))
        self.b2 = nn.Parameter(torch.empty(sizes.n_experts, sizes.dim))
        self.b3 = nn.Parameter(torch.empty(sizes.n_experts, sizes.expert_dim))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        gate = self.product("w1", rows, counts, self.b1).clamp(max=self.limit)  # (rows, expert dim)
        up = self.product("w3", rows, counts, self.b3).clamp(-self.limit, self.limit)
        return self.product("w2", (up + 1) * gate * torch.sigmoid(self.alpha * gate), counts, self.b2)


def gpt_oss(sizes: GptOssSizes) -> Decoder:
    attention = partial(Attention, sizes.dim, qkv_bias=sizes.attention_bias, out_bias=sizes.attention_bias)
    return pre_norm_decoder(
        sizes, attention, lambda index: MixtureOfExperts(sizes, BiasedRouter(sizes), ClampedExperts(sizes))
    )


_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
"""Positional encoding of files that describe none."""


def _read(config: Config) -> Config:
    if config.get("rope_parameters") is None and not config.get("rope_scaling"):
        config = {**config, "rope_parameters": _ROPE}
    return with_layer_types(config, lambda i: i % 2 == 0)


def _write(sizes: GptOssSizes) -> Config:
    rope = first(write_rope(sizes)["rope_scaling"], {"rope_type": "default"})  # null would mean _ROPE
    if sizes.rope_type == "yarn":  # vLLM requires these two
        rope = {"beta_fast": sizes.rope_beta_fast, "beta_slow": sizes.rope_beta_slow} | rope
    return write_windows(sizes) | {"rope_scaling": rope}


_YARN = dict(rope_type="yarn", rope_factor=32.0, rope_original_seq_len=4096, rope_truncate=False)
_gpt_oss = partial(
    GptOssSizes,
    **{"dim": 2880, "n_heads": 64, "n_kv_heads": 8, "head_dim": 64, "hidden_dim": 2880, "vocab_size": 201088},
    **{"experts_per_token": 4, "window": 128, "layer_types": ("sliding", "full")},
    **_YARN,
)
GPT_OSS = ModelSpec(
    model=gpt_oss,
    by_size={
        "debug": GptOssSizes(
            **DEBUG | DEBUG_EXPERTS | _YARN | {"rope_factor": 4.0, "rope_original_seq_len": 32},
            **{"window": 40, "layer_types": ("sliding", "full")},
        ),
        "20b": _gpt_oss(n_layers=24, n_experts=32),
        "120b": _gpt_oss(n_layers=36, n_experts=128),
    },
    huggingface=HuggingFace(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        sizes_type=GptOssSizes,
        defaults={"rms_norm_eps": 1e-5, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088}
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "rope_theta": 150_000.0}
        | {"max_position_embeddings": 131072},
        read=_read,
        write=_write,
        size_keys={"n_experts": "num_local_experts"},
        aliases={"num_experts": "num_local_experts"},
        omitted=("normalize_weights",),
        names=NAMES | {"attention": "self_attn", "feed_forward.router": "mlp.router"},
        stacks={
            "feed_forward.experts.w1": StoredStack(name="mlp.experts.gate_up_proj", transposed=True, first=0, step=2),
            "feed_forward.experts.w3": StoredStack(name="mlp.experts.gate_up_proj", transposed=True, first=1, step=2),
            "feed_forward.experts.w2": StoredStack(name="mlp.experts.down_proj", transposed=True),
            "feed_forward.experts.b1": StoredStack(name="mlp.experts.gate_up_proj_bias", first=0, step=2),
            "feed_forward.experts.b3": StoredStack(name="mlp.experts.gate_up_proj_bias", first=1, step=2),
            "feed_forward.experts.b2": StoredStack(name="mlp.experts.down_proj_bias"),
        },
        quantizations=("mxfp4",),
    ),
    gguf=Gguf(
        architecture="gpt-oss",
        names=GGUF_NAMES
        | {
            "attention.sinks": "attn_sinks.weight",
            "ffn_norm": "post_attention_norm",
            "feed_forward.experts.b1": "ffn_gate_exps.bias",
            "feed_forward.experts.b2": "ffn_down_exps.bias",
            "feed_forward.experts.b3": "ffn_up_exps.bias",
        },
        has_windows=True,
        writes_tied=True,
        fixed=lambda sizes: {
            "layer_types": shortest_period(repeated(("sliding", "full"), sizes.n_layers)),
            "attention_bias": True,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
        },
        keys=lambda sizes: {
            "attention.sliding_window": sizes.window,
            "expert_feed_forward_length": sizes.expert_dim,
        },
    ),
)
