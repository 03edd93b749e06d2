"""Orders of norms, mixer and feed-forward layer in a block. h is the residual stream, (batch, seq, dim)."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from models.components import Norm
from models.context import Context
from models.sizes import Sizes


class Block(nn.Module):
    """The modules that all blocks have. Subclasses define their order. Whatever the mixer, its norm has Meta's name."""

    NORMS: ClassVar = ("attention_norm", "ffn_norm")
    TENSOR: ClassVar = dict.fromkeys(NORMS, "norm")

    def __init__(self, sizes: Sizes, norm: Norm, mixer: nn.Module, feed_forward: nn.Module):
        """Build the norms.

        Args:
            mixer: Its forward is (hidden state, context) -> hidden state. Its `kind` has its name (LayerKind).
            feed_forward: Its forward is (hidden state, context) -> hidden state.
        """
        super().__init__()
        first, second = self.NORMS
        self.add_module(first, norm(sizes.dim))
        self.mixer_name = mixer.kind.MIXER
        self.add_module(self.mixer_name, mixer)
        self.add_module(second, norm(sizes.dim))
        self.feed_forward = feed_forward

    @property
    def mixer(self) -> nn.Module:
        return getattr(self, self.mixer_name)


class PreNormBlock(Block):
    """A norm before each layer: Llama, Qwen, Mistral, DeepSeek and most others."""

    def forward(self, h: Tensor, context: Context) -> Tensor:
        h = h + self.mixer(self.attention_norm(h), context)
        return h + self.feed_forward(self.ffn_norm(h), context)


class PredictionBlock(PreNormBlock):
    """A block after the others for multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437, 2.2): from the hidden state of a
    token and the embedding of the next one, it computes the hidden state that predicts the token after that."""

    NAMES: ClassVar = {
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "projection": "eh_proj",
        "prediction_norm": "shared_head.norm",
    }
    """Name of a module that other blocks do not have -> its name in DeepSeek's files."""
    TENSOR: ClassVar = (
        PreNormBlock.TENSOR
        | dict.fromkeys(("embedding_norm", "hidden_norm"), "norm")
        | {"projection": "token", "prediction_norm": "last_norm"}
    )

    def __init__(self, sizes: Sizes, norm: Norm, mixer: nn.Module, feed_forward: nn.Module):
        super().__init__(sizes, norm, mixer, feed_forward)
        self.embedding_norm = norm(sizes.dim)
        self.hidden_norm = norm(sizes.dim)
        self.projection = nn.Linear(2 * sizes.dim, sizes.dim, bias=False)
        self.prediction_norm = norm(sizes.dim)

    def forward(self, h: Tensor, context: Context) -> Tensor:
        """h: embedding of a later token, and hidden state that predicts it, after its norm, (batch, seq, 2 dim)."""
        embedding, hidden = h.chunk(2, -1)
        h = self.projection(torch.cat((self.embedding_norm(embedding), self.hidden_norm(hidden)), -1))
        return self.prediction_norm(super().forward(h, context))


class PostNormBlock(Block):
    """A norm after each layer, before its result is added to the residual stream: OLMo 2 and 3."""

    def forward(self, h: Tensor, context: Context) -> Tensor:
        mixer_norm, feed_forward_norm = (getattr(self, name) for name in self.NORMS)
        h = h + mixer_norm(self.mixer(h, context))
        return h + feed_forward_norm(self.feed_forward(h, context))


class LaterNormBlock(PostNormBlock):
    """PostNormBlock in a model that has pre-norm blocks too. Its norms have other names, as in the files: OLMo Hybrid."""

    NORMS: ClassVar = ("attention_post_norm", "ffn_post_norm")
    TENSOR: ClassVar = dict.fromkeys(NORMS, "norm")


class SandwichBlock(Block):
    """Norms before and after each layer: Gemma 2 and 3."""

    TENSOR: ClassVar = Block.TENSOR | {"attention_post_norm": "norm", "ffn_post_norm": "norm"}

    def __init__(self, sizes: Sizes, norm: Norm, mixer: nn.Module, feed_forward: nn.Module):
        super().__init__(sizes, norm, mixer, feed_forward)
        self.attention_post_norm = norm(sizes.dim)
        self.ffn_post_norm = norm(sizes.dim)

    def forward(self, h: Tensor, context: Context) -> Tensor:
        h = h + self.attention_post_norm(self.mixer(self.attention_norm(h), context))
        return h + self.ffn_post_norm(self.feed_forward(self.ffn_norm(h), context))
