"""Mistral (Jiang et al. 2023, arXiv:2310.06825), whose layers may all attend to a window, and Ministral 3 (Mistral AI 2025),
which extends its context window with YaRN and multiplies the queries at late positions. Dimensions: config.json of the published
models."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from models.attention import Attention, AttentionKind
from models.config_json import Config, first, rope_object, write_rope
from models.decoder import Decoder, pre_norm_decoder
from models.gguf import Gguf, Keys
from models.huggingface import HuggingFace
from models.rope import Rope, YarnRope
from models.sizes import DEBUG, DecoderSizes, WindowedSizes
from models.spec import ModelSpec

_7B = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 14336}
_12B = {"dim": 5120, "n_layers": 40, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 14336}
_22B = {"dim": 6144, "n_layers": 56, "n_heads": 48, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 16384}
_24B = {"dim": 5120, "n_layers": 40, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 32768}
MISTRAL = ModelSpec(
    model=pre_norm_decoder,
    by_size={
        "debug": WindowedSizes(**DEBUG, window=40),
        "7b-v0.1": WindowedSizes(**_7B, vocab_size=32000, window=4096),
        "7b-v0.2": WindowedSizes(**_7B, vocab_size=32000, rope_theta=1e6),
        "7b-v0.3": WindowedSizes(**_7B, vocab_size=32768, rope_theta=1e6),
        "nemo-12b": WindowedSizes(**_12B, vocab_size=131072, rope_theta=1e6),
        "small-22b": WindowedSizes(**_22B, vocab_size=32768, rope_theta=1e6),
        "small-24b": WindowedSizes(**_24B, vocab_size=131072, rope_theta=1e8),
    },
    huggingface=HuggingFace(
        model_type="mistral",
        architecture="MistralForCausalLM",
        sizes_type=WindowedSizes,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    ),
    gguf=Gguf(architecture="llama", rotates_pairs=True, rope_types=("default", "linear", "yarn", "llama3")),
)


@dataclass(frozen=True, kw_only=True)
class QueryScale:
    """A positional encoding with a factor for the queries of each position (Nakanishi 2025, arXiv:2501.19399)."""

    rope: Rope
    beta: float
    seq_len: int

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoding and the factor, (batch, seq, 1, 1)."""
        scale = 1 + self.beta * torch.log1p(positions.div(self.seq_len, rounding_mode="floor").float())
        return self.rope(positions), scale[:, :, None, None]


@dataclass(frozen=True, kw_only=True)
class Ministral3Sizes(DecoderSizes):
    ROPE_TYPES: ClassVar = ("default", "yarn")
    ALWAYS_USED: ClassVar = ("rope_original_seq_len",)
    llama_4_scaling_beta: float = 0.1
    """Queries at position p are multiplied by 1 + llama_4_scaling_beta * ln(1 + floor(p / rope_original_seq_len))."""

    def kinds(self) -> dict[str, AttentionKind]:
        scale = QueryScale(rope=self.rope(), beta=self.llama_4_scaling_beta, seq_len=self.rope_original_seq_len)
        return {"full": replace(self.attention_kind(), rope=scale)}


class ScaledQueryAttention(Attention):
    """Attention with the positional encoding QueryScale."""

    def encode_positions(self, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        table, scale = rope
        q, k = super().encode_positions(q, k, table)
        return q * scale.type_as(q), k


def ministral3(sizes: Ministral3Sizes) -> Decoder:
    return pre_norm_decoder(sizes, lambda kind: ScaledQueryAttention(sizes.dim, kind))


def _read(config: Config) -> Config:
    rope = rope_object(config)
    if rope.get("llama_4_scaling_beta") is None:
        raise ValueError("llama_4_scaling_beta is missing")
    return {**config, "llama_4_scaling_beta": rope["llama_4_scaling_beta"]}


def _write(sizes: Ministral3Sizes) -> Config:
    rope = first(write_rope(sizes)["rope_scaling"], {"rope_type": "default"})
    beta, length = sizes.llama_4_scaling_beta, sizes.rope_original_seq_len
    more = {"llama_4_scaling_beta": beta, "original_max_position_embeddings": length}
    return {"rope_parameters": {"rope_theta": sizes.rope_theta, **rope, **more}, "rope_scaling": None}


def _gguf_keys(sizes: Ministral3Sizes) -> Keys:
    rope = sizes.rope()
    keys = {
        "attention.temperature_scale": sizes.llama_4_scaling_beta,
        "rope.scaling.original_context_length": sizes.rope_original_seq_len,
    }
    if not isinstance(rope, YarnRope):
        return keys
    keys |= {"rope.scaling.yarn_beta_fast": rope.beta_fast, "rope.scaling.yarn_beta_slow": rope.beta_slow}
    if not rope.mscale_all_dim:
        return keys
    # llama.cpp divides cosine and sine by amplitude_of(mscale_all_dim), and supposes that mscale is 1.
    factor = rope.amplitude * rope.amplitude_of(rope.mscale_all_dim) / rope.amplitude_of(1.0)
    return keys | {"rope.scaling.yarn_log_multiplier": rope.mscale_all_dim, "rope.scaling.attn_factor": factor}


_YARN = dict(rope_type="yarn", rope_factor=16.0, rope_original_seq_len=16384, rope_mscale=1.0, rope_mscale_all_dim=1.0)
_ministral3 = partial(Ministral3Sizes, head_dim=128, vocab_size=131072, **_YARN)
MINISTRAL3 = ModelSpec(
    model=ministral3,
    by_size={
        "debug": Ministral3Sizes(**DEBUG, **_YARN | {"rope_factor": 4.0, "rope_original_seq_len": 32}),
        "3b": _ministral3(
            **{"dim": 3072, "n_layers": 26, "n_heads": 32, "n_kv_heads": 8, "hidden_dim": 9216},
            **{"rope_theta": 1e6, "tied_embeddings": True},
        ),
        "8b": _ministral3(dim=4096, n_layers=34, n_heads=32, n_kv_heads=8, hidden_dim=14336, rope_theta=1e6),
        "14b": _ministral3(dim=5120, n_layers=40, n_heads=32, n_kv_heads=8, hidden_dim=16384, rope_theta=1e9),
    },
    huggingface=HuggingFace(
        model_type="ministral3",
        architecture="Ministral3ForCausalLM",
        sizes_type=Ministral3Sizes,
        fixed={"hidden_act": "silu", "sliding_window": None},
        defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8, "rope_theta": 1e6}
        | {"max_position_embeddings": 262144},
        read=_read,
        write=_write,
    ),
    gguf=Gguf(
        architecture="mistral3",
        rotates_pairs=True,
        rope_settings=("rope_beta_fast", "rope_beta_slow"),
        keys=_gguf_keys,
    ),
)
