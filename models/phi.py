"""Phi-3 (Abdin et al. 2024, arXiv:2404.14219), Phi-4 (arXiv:2412.08905) and Phi-4-mini (arXiv:2503.01743): Llamas whose files
join the matrices of queries, keys and values, and those of gate and up. Phi-4-mini rotates only a part of each head. Dimensions:
config.json of the published models."""

from dataclasses import dataclass
from typing import ClassVar

from models.config_json import Config, first, rope_object, rotary_factor
from models.decoder import pre_norm_decoder
from models.gguf import NAMES as GGUF_NAMES
from models.gguf import Gguf
from models.huggingface import NAMES, HuggingFace
from models.sizes import DEBUG_DERIVED, PartlyRotatedSizes, WindowedSizes
from models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class PhiSizes(PartlyRotatedSizes, WindowedSizes):
    ROPE_TYPES: ClassVar = ("default", "longrope")


def _read(config: Config) -> Config:
    rope = rope_object(config)
    if first(rope.get("rope_type"), rope.get("type"), "") in ("su", "yarn"):  # names of longrope in early files
        config = {**config, "rope_scaling": {**rope, "rope_type": "longrope"}}
    return {**config, "partial_rotary_factor": rotary_factor(config)}


def _write(sizes: PhiSizes) -> Config:
    original = {"original_max_position_embeddings": sizes.rope_original_seq_len}
    if sizes.rope_type == "default":
        return original
    # transformers 4 accepts exactly these keys, and computes the factors from the two lengths.
    factors = {"short_factor": list(sizes.rope_short_factors), "long_factor": list(sizes.rope_long_factors)}
    if sizes.context_window / sizes.rope_original_seq_len != sizes.rope_factor:
        factors["factor"] = sizes.rope_factor
    if sizes.rope_attention_factor is not None:
        factors["attention_factor"] = sizes.rope_attention_factor
    lengths = original | {"max_position_embeddings": sizes.context_window}
    return lengths | {"rope_scaling": {"type": "longrope", **factors}}


_MINI = {"dim": 3072, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "head_dim": 96, "hidden_dim": 8192}
_14B = {"dim": 5120, "n_layers": 40, "n_heads": 40, "n_kv_heads": 10, "head_dim": 128, "hidden_dim": 17920}
PHI = ModelSpec(
    model=pre_norm_decoder,
    by_size={
        "debug": PhiSizes(
            **{"partial_rotary_factor": 0.5, "rope_type": "longrope", "rope_factor": 4.0, "rope_original_seq_len": 32},
            **{"rope_short_factors": (1.0,) * 4, "rope_long_factors": (1.0, 1.2, 1.7, 3.0)} | DEBUG_DERIVED,
        ),
        "3-mini-4k": PhiSizes(**_MINI, vocab_size=32064, window=2047),
        "3-medium-4k": PhiSizes(**_14B, vocab_size=32064, window=2047),
        "4-14b": PhiSizes(**_14B, vocab_size=100352, rope_theta=250_000.0),
    },
    huggingface=HuggingFace(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        sizes_type=PhiSizes,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        read=_read,
        write=_write,
        byte_level_class="GPT2Tokenizer",  # llama.cpp reads tokenizer.model otherwise
        names=NAMES
        | dict.fromkeys(("attention.wq", "attention.wk", "attention.wv"), "self_attn.qkv_proj")
        | dict.fromkeys(("feed_forward.w1", "feed_forward.w3"), "mlp.gate_up_proj"),
    ),
    gguf=Gguf(
        architecture="phi3",
        names=GGUF_NAMES
        | dict.fromkeys(("attention.wq", "attention.wk", "attention.wv"), "attn_qkv")
        | dict.fromkeys(("feed_forward.w1", "feed_forward.w3"), "ffn_up"),
        rope_types=("default", "longrope"),
        fixed=lambda sizes: {"head_dim": sizes.dim // sizes.n_heads},
        keys=lambda sizes: {
            "rope.scaling.original_context_length": sizes.rope_original_seq_len,
            "attention.sliding_window": first(sizes.window, 0),
        },
    ),
)
