"""Orders of norms, attention and feed-forward layer in a block. h is the residual stream, (batch, seq, dim)."""

from typing import Any, ClassVar

from torch import Tensor, nn

from models.components import Activation, FeedForward, Norm
from models.sizes import Sizes


class PreNormBlock(nn.Module):
    """A norm before each layer: Llama, Qwen, Mistral, SmolLM3, Phi."""

    TENSOR: ClassVar = {"attention_norm": "norm", "ffn_norm": "norm"}

    def __init__(self, sizes: Sizes, norm: Norm, attention: nn.Module):
        super().__init__()
        self.attention_norm = norm(sizes.dim)
        self.attention = attention
        self.ffn_norm = norm(sizes.dim)
        self.feed_forward = FeedForward(sizes)

    def forward(self, h: Tensor, rope: Any, mask: Any) -> Tensor:
        h = h + self.attention(self.attention_norm(h), rope, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class PostNormBlock(nn.Module):
    """A norm after each layer, before its result is added to the residual stream: OLMo 2 and 3."""

    TENSOR: ClassVar = {"attention_norm": "norm", "ffn_norm": "norm"}

    def __init__(self, sizes: Sizes, norm: Norm, attention: nn.Module):
        super().__init__()
        self.attention = attention
        self.attention_norm = norm(sizes.dim)
        self.feed_forward = FeedForward(sizes)
        self.ffn_norm = norm(sizes.dim)

    def forward(self, h: Tensor, rope: Any, mask: Any) -> Tensor:
        h = h + self.attention_norm(self.attention(h, rope, mask))
        return h + self.ffn_norm(self.feed_forward(h))


class SandwichBlock(nn.Module):
    """Norms before and after each layer: Gemma 2 and 3."""

    TENSOR: ClassVar = dict.fromkeys(("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm"), "norm")

    def __init__(self, sizes: Sizes, norm: Norm, attention: nn.Module, activation: Activation):
        super().__init__()
        self.attention_norm = norm(sizes.dim)
        self.attention = attention
        self.attention_post_norm = norm(sizes.dim)
        self.ffn_norm = norm(sizes.dim)
        self.feed_forward = FeedForward(sizes, activation)
        self.ffn_post_norm = norm(sizes.dim)

    def forward(self, h: Tensor, rope: Any, mask: Any) -> Tensor:
        h = h + self.attention_post_norm(self.attention(self.attention_norm(h), rope, mask))
        return h + self.ffn_post_norm(self.feed_forward(self.ffn_norm(h)))
