"""Qwen2.5 (Qwen Team 2024, arXiv:2412.15115), with biases on queries, keys and values, and Qwen3 (Qwen Team 2025,
arXiv:2505.09388), with norms of each head's queries and keys, dense and with mixtures of experts. Dimensions: config.json of the
published models."""

from dataclasses import dataclass
from functools import partial

from torch import nn

from models.attention import Attention, AttentionKind
from models.components import FeedForward
from models.config_json import Config, first, with_layer_types, write_layer_types
from models.decoder import Decoder, pre_norm_decoder
from models.gguf import Gguf
from models.huggingface import MIXTURE_NAMES, HuggingFace
from models.mixture_sizes import DEBUG_EXPERTS, PartlySparseSizes
from models.moe import MixtureOfExperts
from models.sizes import DEBUG, DEBUG_DERIVED, MixedSizes, WindowedSizes, require, text_of
from models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class QwenSizes(MixedSizes):
    norm_eps: float = 1e-6
    rope_theta: float = 1e6


@dataclass(frozen=True, kw_only=True)
class Qwen3Sizes(QwenSizes):
    attention_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeSizes(WindowedSizes, PartlySparseSizes):
    norm_eps: float = 1e-6
    attention_bias: bool = False


def qwen2(sizes: QwenSizes) -> Decoder:
    return pre_norm_decoder(sizes, lambda kind: Attention(sizes.dim, kind, qkv_bias=True))


def qwen3(sizes: Qwen3Sizes) -> Decoder:
    return pre_norm_decoder(sizes, partial(_attention, sizes))


def qwen3_moe(sizes: Qwen3MoeSizes) -> Decoder:
    def feed_forward(index: int) -> nn.Module:
        return MixtureOfExperts(sizes) if sizes.is_sparse(index) else FeedForward(sizes.dim, sizes.hidden_dim)

    return pre_norm_decoder(sizes, partial(_attention, sizes), feed_forward)


def _attention(sizes: Qwen3Sizes | Qwen3MoeSizes, kind: AttentionKind) -> Attention:
    norm, bias = partial(nn.RMSNorm, sizes.head_dim, eps=sizes.norm_eps), sizes.attention_bias
    return Attention(sizes.dim, kind, qkv_bias=bias, out_bias=bias, q_norm=norm(), k_norm=norm())


def _read(config: Config) -> Config:
    if not config.get("use_sliding_window"):
        return {**config, "sliding_window": None}
    full = first(config.get("max_window_layers"), 28)
    if type(full) is not int:
        raise ValueError(f"max_window_layers {text_of(full)} must be an integer")
    return with_layer_types(config, lambda i: i >= full)


def _write(sizes: QwenSizes) -> Config:
    types = sizes.all_layer_types
    first_sliding = types.index("sliding") if "sliding" in types else sizes.n_layers
    windows = {"use_sliding_window": sizes.window is not None, "max_window_layers": first_sliding}
    return write_layer_types(sizes) | windows


_huggingface = partial(HuggingFace, read=_read, write=_write)
_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32768}

_tied = partial(QwenSizes, vocab_size=151936, tied_embeddings=True)
_untied = partial(QwenSizes, vocab_size=152064, head_dim=128)
QWEN2_5 = ModelSpec(
    model=qwen2,
    by_size={
        "debug": QwenSizes(**DEBUG_DERIVED),
        "0.5b": _tied(dim=896, n_layers=24, n_heads=14, n_kv_heads=2, head_dim=64, hidden_dim=4864),
        "1.5b": _tied(dim=1536, n_layers=28, n_heads=12, n_kv_heads=2, head_dim=128, hidden_dim=8960),
        "3b": _tied(dim=2048, n_layers=36, n_heads=16, n_kv_heads=2, head_dim=128, hidden_dim=11008),
        "7b": _untied(dim=3584, n_layers=28, n_heads=28, n_kv_heads=4, hidden_dim=18944),
        "14b": _untied(dim=5120, n_layers=48, n_heads=40, n_kv_heads=8, hidden_dim=13824, norm_eps=1e-5),
        "32b": _untied(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, hidden_dim=27648, norm_eps=1e-5),
        "72b": _untied(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=29568, norm_eps=1e-5),
    },
    huggingface=_huggingface(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        sizes_type=QwenSizes,
        defaults=_DEFAULTS,
        forced_class="Qwen2Tokenizer",
    ),
    gguf=Gguf(architecture="qwen2", fixed=lambda sizes: {"head_dim": sizes.dim // sizes.n_heads}),
)

_qwen3 = partial(Qwen3Sizes, n_kv_heads=8, head_dim=128, vocab_size=151936)
QWEN3 = ModelSpec(
    model=qwen3,
    by_size={
        "debug": Qwen3Sizes(**DEBUG),
        "0.6b": _qwen3(dim=1024, n_layers=28, n_heads=16, hidden_dim=3072, tied_embeddings=True),
        "1.7b": _qwen3(dim=2048, n_layers=28, n_heads=16, hidden_dim=6144, tied_embeddings=True),
        "4b": _qwen3(dim=2560, n_layers=36, n_heads=32, hidden_dim=9728, tied_embeddings=True),
        "8b": _qwen3(dim=4096, n_layers=36, n_heads=32, hidden_dim=12288),
        "14b": _qwen3(dim=5120, n_layers=40, n_heads=40, hidden_dim=17408),
        "32b": _qwen3(dim=5120, n_layers=64, n_heads=64, hidden_dim=25600),
    },
    huggingface=_huggingface(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        sizes_type=Qwen3Sizes,
        defaults=_DEFAULTS | {"head_dim": 128},
    ),
    gguf=Gguf(architecture="qwen3", fixed=lambda sizes: {"attention_bias": False}),
)


def read_sparse_layers(config: Config) -> Config:
    """Return the configuration with the dense layers as sparse_layers."""
    step, dense = first(config.get("decoder_sparse_step"), 1), first(config.get("mlp_only_layers"), [])
    require("decoder_sparse_step", step, int)
    if not isinstance(dense, list) or not all(type(i) is int and i >= 0 for i in dense):
        raise ValueError(f"mlp_only_layers {text_of(dense)}: must be a list of indices of layers")
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(config["num_hidden_layers"])]
    if not any(sparse):
        values = f"mlp_only_layers {text_of(dense)} and decoder_sparse_step {step}"
        raise ValueError(f"{values} must leave a layer with experts: without experts it is a dense model")
    return {**config, "sparse_layers": sparse}


def write_sparse_layers(sizes: PartlySparseSizes) -> Config:
    """Inverse of read_sparse_layers."""
    dense = [i for i, is_sparse in enumerate(sizes.all_sparse_layers) if not is_sparse]
    return {"mlp_only_layers": dense, "decoder_sparse_step": 1}


def _read_moe(config: Config) -> Config:
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return {**read_sparse_layers(config), "sliding_window": window}


def _write_moe(sizes: Qwen3MoeSizes) -> Config:
    return {"use_sliding_window": sizes.window is not None} | write_sparse_layers(sizes)


_qwen3_moe = partial(
    Qwen3MoeSizes, head_dim=128, vocab_size=151936, n_experts=128, experts_per_token=8, normalize_weights=True
)
QWEN3_MOE = ModelSpec(
    model=qwen3_moe,
    by_size={
        "debug": Qwen3MoeSizes(
            **DEBUG | DEBUG_EXPERTS | {"hidden_dim": 352}, expert_hidden_dim=96, normalize_weights=True
        ),
        "30b-a3b": _qwen3_moe(
            **{
                "dim": 2048,
                "n_layers": 48,
                "n_heads": 32,
                "n_kv_heads": 4,
                "hidden_dim": 6144,
                "expert_hidden_dim": 768,
            }
        ),
        "235b-a22b": _qwen3_moe(
            **{
                "dim": 4096,
                "n_layers": 94,
                "n_heads": 64,
                "n_kv_heads": 4,
                "hidden_dim": 12288,
                "expert_hidden_dim": 1536,
            }
        ),
    },
    huggingface=HuggingFace(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        sizes_type=Qwen3MoeSizes,
        defaults=_DEFAULTS
        | {"num_key_value_heads": 4, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
        | {"num_experts_per_tok": 8, "num_experts": 128},
        read=_read_moe,
        write=_write_moe,
        aliases={"num_local_experts": "num_experts"},  # the key that transformers 5.24 writes
        omitted=("sparse_layers",),
        names=MIXTURE_NAMES,
    ),
    gguf=Gguf(
        architecture="qwen3moe",
        fixed=lambda sizes: {"normalize_weights": True, "sparse_layers": (True,), "attention_bias": False},
        keys=lambda sizes: {"expert_feed_forward_length": sizes.expert_dim},
    ),
)
