"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): a Mistral whose feed-forward layers are mixtures of experts. Dimensions:
config.json of the published models."""

from dataclasses import dataclass
from functools import partial

from models.decoder import Decoder, pre_norm_decoder
from models.gguf import Gguf
from models.huggingface import NAMES, HuggingFace
from models.mixture_sizes import DEBUG_EXPERTS, MixtureSizes
from models.moe import MixtureOfExperts
from models.sizes import DEBUG, WindowedSizes
from models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class MixtralSizes(WindowedSizes, MixtureSizes):
    normalize_weights: bool = True


def mixtral(sizes: MixtralSizes) -> Decoder:
    return pre_norm_decoder(sizes, feed_forward=lambda index: MixtureOfExperts(sizes))


_mixtral = partial(
    MixtralSizes, n_heads=32, n_kv_heads=8, head_dim=128, rope_theta=1e6, n_experts=8, experts_per_token=2
)
MIXTRAL = ModelSpec(
    model=mixtral,
    by_size={
        "debug": MixtralSizes(**DEBUG | DEBUG_EXPERTS),
        "8x7b": _mixtral(dim=4096, n_layers=32, hidden_dim=14336, vocab_size=32000),
        "8x22b": _mixtral(dim=6144, n_layers=56, n_heads=48, hidden_dim=16384, vocab_size=32768),
    },
    huggingface=HuggingFace(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        sizes_type=MixtralSizes,
        fixed={"hidden_act": "silu", "router_jitter_noise": 0.0},
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "sliding_window": None, "rope_theta": 1e6}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 131072},
        size_keys={"n_experts": "num_local_experts"},
        aliases={"num_experts": "num_local_experts"},
        omitted=("normalize_weights",),
        names=NAMES
        | {
            "feed_forward.router": "block_sparse_moe.gate",
            "feed_forward.experts.w1": "block_sparse_moe.experts.{}.w1",
            "feed_forward.experts.w2": "block_sparse_moe.experts.{}.w2",
            "feed_forward.experts.w3": "block_sparse_moe.experts.{}.w3",
        },
        module_names={".block_sparse_moe.gate.": ".mlp.gate."},
    ),
    gguf=Gguf(
        architecture="llama",
        rotates_pairs=True,
        rope_types=("default", "linear", "yarn", "llama3"),
        fixed=lambda sizes: {"normalize_weights": True},
    ),
)
