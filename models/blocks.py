"""Orders of norms, attention and feed-forward layer in a block. h is the residual stream, (batch, seq, dim)."""

from collections.abc import Callable
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from models.components import FeedForward, Norm
from models.context import Context
from models.sizes import Sizes

Activation = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """The modules that all blocks have. Subclasses define their order."""

    TENSOR: ClassVar = {"attention_norm": "norm", "ffn_norm": "norm"}

    def __init__(self, sizes: Sizes, norm: Norm, attention: nn.Module, activation: Activation = F.silu):
        super().__init__()
        self.attention_norm = norm(sizes.dim)
        self.attention = attention
        self.ffn_norm = norm(sizes.dim)
        self.feed_forward = FeedForward(sizes, activation)


class PreNormBlock(Block):
    """A norm before each layer: Llama, Qwen, Mistral, SmolLM3, Granite, Phi."""

    def forward(self, h: Tensor, context: Context) -> Tensor:
        h = h + self.attention(self.attention_norm(h), context)
        return h + self.feed_forward(self.ffn_norm(h))


class PostNormBlock(Block):
    """A norm after each layer, before its result is added to the residual stream: OLMo 2 and 3."""

    def forward(self, h: Tensor, context: Context) -> Tensor:
        h = h + self.attention_norm(self.attention(h, context))
        return h + self.ffn_norm(self.feed_forward(h))


class SandwichBlock(Block):
    """Norms before and after each layer: Gemma 2 and 3."""

    TENSOR: ClassVar = Block.TENSOR | {"attention_post_norm": "norm", "ffn_post_norm": "norm"}

    def __init__(self, sizes: Sizes, norm: Norm, attention: nn.Module, activation: Activation):
        super().__init__(sizes, norm, attention, activation)
        self.attention_post_norm = norm(sizes.dim)
        self.ffn_post_norm = norm(sizes.dim)

    def forward(self, h: Tensor, context: Context) -> Tensor:
        h = h + self.attention_post_norm(self.attention(self.attention_norm(h), context))
        return h + self.ffn_post_norm(self.feed_forward(self.ffn_norm(h)))
