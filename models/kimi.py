"""Kimi Linear (Kimi Team 2025, arXiv:2510.26692): most layers are Kimi Delta Attention, the others have latent attention without
positional encoding. Mixtures of experts as in DeepSeek-V3. Dimensions: config.json of the published model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

from torch import nn

from models.attention import AttentionKind
from models.config_json import LAYER_TYPES, Config, first, list_of_layers, write_layer_types
from models.decoder import Decoder, pre_norm_decoder
from models.deepseek import LATENT_NAMES, DeepSeekSizes, LatentAttention, read_leading_dense, sparse_or_dense
from models.huggingface import HuggingFace, shared_expert_names
from models.hybrid import require_filter
from models.kda import KimiDeltaAttention, KimiDeltaKind
from models.mixture_sizes import DEBUG_EXPERTS
from models.sizes import DEBUG, TypedLayers, require, text_of
from models.spec import LayerKind, ModelSpec, SizeError


@dataclass(frozen=True, kw_only=True)
class KimiLinearSizes(TypedLayers, DeepSeekSizes):
    """`head_dim` is the number of a head's dims of queries and keys that all heads share. They are not rotated."""

    ROPE_TYPES: ClassVar = ("default",)
    MAX_PREDICTION_LAYERS: ClassVar = 0
    GROWING: ClassVar = (*DeepSeekSizes.GROWING, "linear_num_heads")
    norm_eps: float = 1e-5
    layer_types: tuple[Literal["linear", "full"], ...] = ("linear", "linear", "linear", "full")
    """Types of the layers in order. The sequence is repeated up to n_layers."""
    linear_num_heads: int
    """Number of heads of a recurrence."""
    linear_head_dim: int
    linear_conv_kernel_dim: int = 4
    """Number of tokens that a short convolution reads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_filter(self.linear_conv_kernel_dim)
        if self.tied_embeddings:
            message = (
                "tied_embeddings true: transformers has an output projection of its own for all models of this family"
            )
            raise SizeError(message, "tied_embeddings")

    def kinds(self) -> dict[str, LayerKind]:
        recurrent = KimiDeltaKind(
            key_heads=self.linear_num_heads,
            value_heads=self.linear_num_heads,
            widths=(self.linear_head_dim, self.linear_head_dim),
            filter_width=self.linear_conv_kernel_dim,
        )
        return {"full": replace(self.attention_kind(), rope=None), "linear": recurrent}


def kimi_linear(sizes: KimiLinearSizes) -> Decoder:
    def mixer(kind: LayerKind) -> nn.Module:
        if isinstance(kind, AttentionKind):
            return LatentAttention(sizes, kind)
        return KimiDeltaAttention(sizes.dim, kind, sizes.norm_eps)

    return pre_norm_decoder(sizes, mixer, partial(sparse_or_dense, sizes))


_LINEAR_KEYS = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Name of a size -> its key in the object linear_attn_config, which takes precedence."""
_LISTS = {"linear_attention": "kda_layers", "full_attention": "full_attn_layers"}
"""Type of layer -> key of the list of its layers there, counted from 1."""


def _read(config: Config) -> Config:
    """Return the configuration with the sizes and the layers of linear_attn_config."""
    layers, linear = config["num_hidden_layers"], first(config.get("linear_attn_config"), {})
    if not isinstance(linear, Mapping):
        raise ValueError(f"linear_attn_config {text_of(linear)}: must be null or an object")
    given = {name: linear[key] for name, key in _LINEAR_KEYS.items() if linear.get(key) is not None}
    for name, value in given.items():
        require(f"linear_attn_config.{_LINEAR_KEYS[name]}", value, int)
    if len(listed := [key for key in _LISTS.values() if key in linear]) == 1:
        raise ValueError(f"linear_attn_config has {listed[0]}, but not {' or '.join({*_LISTS.values()} - {*listed})}")
    types = [LAYER_TYPES["full" if i and i % 4 == 0 else "linear"] for i in range(layers)]
    if all(key in linear for key in _LISTS.values()):
        lists = {name: linear[key] for name, key in _LISTS.items()}
        numbers = [i for listed in lists.values() if isinstance(listed, list) for i in listed]
        if any(type(i) is not int for i in numbers) or sorted(numbers) != [*range(1, layers + 1)]:
            names = " and ".join(_LISTS.values())
            raise ValueError(f"linear_attn_config: {names} must list each of the layers 1 to {layers} once")
        types = [next(name for name, listed in lists.items() if i in listed) for i in range(1, layers + 1)]
        if first(config.get("layer_types"), types) != types:
            raise ValueError(
                f"layer_types {text_of(config['layer_types'])}: contradicts the lists of linear_attn_config"
            )
    config = {**config, **given, "layer_types": first(config.get("layer_types"), types)}
    return {**config, "sparse_layers": _sparse_layers(config)}


def _sparse_layers(config: Config) -> list[bool]:
    """Return whether each layer is a mixture of experts. Raises ValueError."""
    if config.get("mlp_layer_types") is None:
        return read_leading_dense(config, 1)
    types = list_of_layers(config, "mlp_layer_types", [])
    if any(name not in ("dense", "sparse") for name in types):
        raise ValueError(f"mlp_layer_types {text_of(types)}: each value must be dense or sparse")
    if types != sorted(types):
        raise ValueError(f"mlp_layer_types {text_of(types)}: dense layers must precede all layers with experts")
    if "sparse" not in types:
        raise ValueError(f"mlp_layer_types {text_of(types)}: without experts it is a dense model")
    return [name == "sparse" for name in types]


def _write(sizes: KimiLinearSizes) -> Config:
    """Return the fields of the published code and of transformers."""
    types = write_layer_types(sizes)["layer_types"]
    lists = {key: [i for i, listed in enumerate(types, 1) if listed == name] for name, key in _LISTS.items()}
    linear = {key: getattr(sizes, name) for name, key in _LINEAR_KEYS.items()}
    return {
        "linear_attn_config": lists | linear,
        "layer_types": types,
        "first_k_dense_replace": sizes.all_sparse_layers.index(True),
    }


_KDA_NAMES = {
    "kda": "self_attn",
    **{f"kda.w{x}": f"self_attn.{x}_proj" for x in "qkvbo"},
    **{f"kda.{x}": f"self_attn.{x}_proj" for x in ("f_a", "f_b", "g_a", "g_b")},
    **{f"kda.{x}_filter": f"self_attn.{x}_conv1d.weight" for x in "qkv"},
    "kda.norm": "self_attn.o_norm",
}
_MIXTURE = "block_sparse_moe"
_NAMES = (
    LATENT_NAMES
    | _KDA_NAMES
    | {
        "feed_forward.router": f"{_MIXTURE}.gate",
        "feed_forward.router.correction": f"{_MIXTURE}.gate.e_score_correction_bias",
        **{f"feed_forward.experts.{w}": f"{_MIXTURE}.experts.{{}}.{w}" for w in ("w1", "w2", "w3")},
    }
    | shared_expert_names(f"{_MIXTURE}.shared_experts")
)
_sizes = {
    "debug": KimiLinearSizes(
        **DEBUG | DEBUG_EXPERTS | {"n_kv_heads": 8, "hidden_dim": 352, "head_dim": 16, "expert_hidden_dim": 96},
        n_shared_experts=1, weight_scale=2.5, kv_lora_rank=32, qk_nope_head_dim=24, v_head_dim=24,
        sparse_layers=(False, True, True, True), linear_num_heads=8, linear_head_dim=16, norm_eps=1e-3,
    ),
    "48b-a3b": KimiLinearSizes(
        dim=2304, n_layers=27, n_heads=32, n_kv_heads=32, head_dim=64, hidden_dim=9216, vocab_size=163840,
        n_experts=256, experts_per_token=8, expert_hidden_dim=1024, n_shared_experts=1, weight_scale=2.446,
        kv_lora_rank=512, qk_nope_head_dim=128, v_head_dim=128, linear_num_heads=32, linear_head_dim=128,
        sparse_layers=(False,) + (True,) * 26,
        layer_types=("linear", "linear", "linear", "full") * 6 + ("linear", "linear", "full"),
    ),
}  # fmt: skip
KIMI_LINEAR = ModelSpec(
    model=kimi_linear,
    by_size=_sizes,
    huggingface=HuggingFace(
        model_type="kimi_linear",
        architecture="KimiLinearForCausalLM",
        sizes_type=KimiLinearSizes,
        # Only the published code needs these, beside transformers' hidden_act.
        fixed={"hidden_act": "silu", "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}
        | {"use_grouped_topk": True, "mla_use_nope": True},
        defaults={
            "hidden_size": 2304,
            "num_attention_heads": 32,
            "intermediate_size": 9216,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "moe_intermediate_size": 1024,
            "num_shared_experts": 1,
            "num_expert_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.446,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "linear_num_heads": 32,
            "linear_head_dim": 128,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1048576,
        },
        read=_read,
        write=_write,
        size_keys={
            "experts_per_token": "num_experts_per_token",
            "normalize_weights": "moe_renormalize",
            "n_groups": "num_expert_group",
            "groups_per_token": "topk_group",
            "n_shared_experts": "num_shared_experts",
            "weight_scale": "routed_scaling_factor",
            "head_dim": "qk_rope_head_dim",
        },
        aliases={
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "num_experts_per_token",
            "norm_topk_prob": "moe_renormalize",
            "n_group": "num_expert_group",
            "n_shared_experts": "num_shared_experts",
            "model_max_length": "max_position_embeddings",
        },
        omitted=("sparse_layers", "rope_interleave", "prediction_layers"),
        names=_NAMES,
        stored_shapes={"kda.A_log": (1, 1, -1, 1)},
        other_names={".mlp.": f".{_MIXTURE}."},  # transformers 5.24 writes dense layers so
        module_names={f".{_MIXTURE}.": ".mlp."}
        | {f"self_attn.{name}_proj": f"self_attn.forget_gate.{name}_proj" for name in ("f_a", "f_b")},
    ),
    gguf=None,
)
