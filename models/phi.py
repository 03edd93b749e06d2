"""Phi-3 (Abdin et al. 2024, arXiv:2404.14219), Phi-4 (arXiv:2412.08905) and Phi-4-mini (arXiv:2503.01743): Llamas whose files
join the matrices of queries, keys and values, and those of gate and up. Phi-4-mini rotates only a part of each head. Dimensions
are those of the config.json files that Microsoft published."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from models.blocks import PreNormBlock
from models.components import Attention, FeedForward
from models.decoder import Decoder
from models.huggingface import NAMES, HuggingFace, first, read_rope, rope_object, write_rope
from models.sizes import DEBUG, WindowedSizes
from models.spec import LayerKind, ModelSpec


@dataclass(frozen=True, kw_only=True)
class PhiSizes(WindowedSizes):
    rotary_fraction: float = 1.0
    """Fraction of each head's dims that is rotated."""

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_fraction)


def phi(sizes: PhiSizes) -> Decoder:
    norm = partial(nn.RMSNorm, eps=sizes.norm_eps)

    def block(kind: LayerKind) -> PreNormBlock:
        return PreNormBlock(sizes.dim, norm, Attention(sizes, kind), FeedForward(sizes))

    return Decoder(sizes, sizes.kinds(), sizes.all_layer_types, block, norm)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = rope_object(config, "full_attention").get("partial_rotary_factor")
    window = config.get("sliding_window")
    return {
        **read_rope(config, types=("default", "longrope")),
        "rotary_fraction": first(inner, config.get("partial_rotary_factor"), 1.0),
        "window": window,
        "layer_types": ("full" if window is None else "sliding",),
    }


def _write(sizes: PhiSizes) -> dict[str, Any]:
    return {
        **write_rope(sizes),
        "partial_rotary_factor": sizes.rotary_fraction,
        "original_max_position_embeddings": sizes.rope_original_seq_len,
        "sliding_window": sizes.window,
    }


_mini = partial(PhiSizes, dim=3072, n_layers=32, hidden_dim=8192)
_14b = partial(PhiSizes, dim=5120, n_layers=40, n_heads=40, n_kv_heads=10, head_dim=128, hidden_dim=17920)
PHI = ModelSpec(
    model=phi,
    sizes={
        "debug": PhiSizes(
            **DEBUG,
            rotary_fraction=0.5,
            rope_type="longrope",
            rope_factor=4.0,
            rope_original_seq_len=32,
            rope_short_factors=(1.0,) * 6,
            rope_long_factors=(1.0, 1.1, 1.3, 1.7, 2.5, 4.0),
        ),
        "3-mini-4k": _mini(
            n_heads=32, n_kv_heads=32, head_dim=96, vocab_size=32064, window=2047, layer_types=("sliding",)
        ),
        "3-medium-4k": _14b(vocab_size=32064, window=2047, layer_types=("sliding",)),
        "4-14b": _14b(vocab_size=100352, rope_theta=250_000.0),
    },
    huggingface=HuggingFace(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        sizes_type=PhiSizes,
        fixed={"hidden_act": "silu"},
        fields={"head_dim": "head_dim"},
        defaults={"norm_eps": 1e-5, "tied_embeddings": False},
        read=_read,
        write=_write,
        names=NAMES
        | dict.fromkeys(("attention.wq", "attention.wk", "attention.wv"), "self_attn.qkv_proj")
        | dict.fromkeys(("feed_forward.w1", "feed_forward.w3"), "mlp.gate_up_proj"),
    ),
)
