"""Granite 3 (Granite Team 2024, https://github.com/ibm-granite/granite-3.0-language-models): a Llama whose embeddings, residual
branches, scores and logits are multiplied by constants. Dimensions: config.json of the published models."""

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from models.attention import Attention, AttentionKind
from models.blocks import PreNormBlock
from models.components import FeedForward, Norm, Output, ScaledEmbedding
from models.context import Context
from models.decoder import Decoder
from models.gguf import Gguf
from models.huggingface import HuggingFace
from models.sizes import DEBUG_DERIVED, DecoderSizes
from models.spec import Head, ModelSpec


@dataclass(frozen=True, kw_only=True)
class GraniteSizes(DecoderSizes):
    embedding_multiplier: float = 1.0
    """Factor of the embeddings."""
    residual_multiplier: float = 1.0
    """Factor of each residual branch."""
    attention_multiplier: float = 1.0
    """Factor of the scores, instead of 1 / sqrt(head_dim)."""
    logits_scaling: float = 1.0
    """Divisor of the logits."""
    attention_bias: bool = False

    def kinds(self) -> dict[str, AttentionKind]:
        return {"full": replace(self.attention_kind(), scale=self.attention_multiplier)}


class GraniteBlock(PreNormBlock):
    """A pre-norm block whose residual branches are multiplied by a constant."""

    def __init__(self, sizes: GraniteSizes, norm: Norm, mixer: nn.Module, feed_forward: nn.Module):
        super().__init__(sizes, norm, mixer, feed_forward)
        self.multiplier = sizes.residual_multiplier

    def forward(self, h: Tensor, context: Context) -> Tensor:
        h = h + self.mixer(self.attention_norm(h), context) * self.multiplier
        return h + self.feed_forward(self.ffn_norm(h), context) * self.multiplier


class ScaledOutput(Output):
    """An output projection whose logits are divided by a constant."""

    def __init__(self, dim: int, vocab_size: int, divisor: float):
        super().__init__(dim, vocab_size)
        self.divisor = divisor

    def forward(self, h: Tensor, head: Head | None = None) -> Tensor:
        return super().forward(h / self.divisor, head)


def granite(sizes: GraniteSizes) -> Decoder:
    norm, bias = partial(nn.RMSNorm, eps=sizes.norm_eps), sizes.attention_bias

    def block(index: int, kind: AttentionKind) -> GraniteBlock:
        attention = Attention(sizes.dim, kind, qkv_bias=bias, out_bias=bias)
        return GraniteBlock(sizes, norm, attention, FeedForward(sizes.dim, sizes.hidden_dim))

    embedding = ScaledEmbedding(sizes.vocab_size, sizes.dim, sizes.embedding_multiplier)
    return Decoder(sizes, norm, block, embedding, ScaledOutput(sizes.dim, sizes.vocab_size, sizes.logits_scaling))


_granite = partial(GraniteSizes, tied_embeddings=True, embedding_multiplier=12.0, residual_multiplier=0.22)
_2B = {
    **{"dim": 2048, "n_layers": 40, "n_heads": 32, "n_kv_heads": 8, "head_dim": 64, "hidden_dim": 8192},
    **{"vocab_size": 49155, "attention_multiplier": 1 / 64, "logits_scaling": 8.0},
}
_8B = {
    **{"dim": 4096, "n_layers": 40, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 12800},
    **{"vocab_size": 49155, "attention_multiplier": 1 / 128, "logits_scaling": 16.0},
}
GRANITE3 = ModelSpec(
    model=granite,
    by_size={
        "debug": _granite(**DEBUG_DERIVED, attention_multiplier=1 / 16, logits_scaling=4.0),
        "3.0-2b": _granite(**_2B),
        "3.0-8b": _granite(**_8B),
        "3.1-2b": _granite(**_2B, rope_theta=5e6),
        "3.1-8b": _granite(**_8B, rope_theta=1e7),
    },
    huggingface=HuggingFace(
        model_type="granite",
        architecture="GraniteForCausalLM",
        sizes_type=GraniteSizes,
        fixed={"hidden_act": "silu", "mlp_bias": False},
    ),
    gguf=Gguf(
        architecture="granite",
        rotates_pairs=True,
        keys=lambda sizes: {
            "attention.scale": sizes.attention_multiplier,
            "embedding_scale": sizes.embedding_multiplier,
            "residual_scale": sizes.residual_multiplier,
            "logit_scale": sizes.logits_scaling,
        },
    ),
)
