"""Components of a decoder besides its mixers: norms, feed-forward layers, embedding and output.

A module states facts about itself in class variables: TENSOR, BUFFERS and BIASES, which models/spec.py explains, WIDTH
(models/width.py), INTO_RESIDUAL, the names of its matrices whose products are added to the residual stream, and INITIAL, a dict:
name of a parameter -> function (rows, generator) that draws its initial values.
"""

from collections.abc import Callable
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.context import Context
from models.spec import Head

Norm = Callable[[int], nn.Module]
"""Function (width) -> norm."""
Activation = Callable[[Tensor], Tensor]


def at_least_fp32(x: Tensor) -> Tensor:
    """Return a tensor in fp32, or in its own dtype if that is more exact."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ExactBuffers(nn.Module):
    """A module whose buffers keep their dtype when the model is converted to another."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply a function such as a conversion to the parameters and buffers."""
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            if self._buffers[name].dtype != buffer.dtype:
                self._buffers[name] = buffer.to(self._buffers[name].device)
        return self


# ---------------------------------------------------------------- norms


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in fp32. The weight starts at zero."""

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + at_least_fp32(self.weight)
        return F.rms_norm(at_least_fp32(x), self.normalized_shape, weight, self.eps).type_as(x)


class AllHeadsRMSNorm(nn.RMSNorm):
    """RMSNorm over the dims of all heads together."""

    TENSOR: ClassVar = {"": "all_heads_norm"}

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq, heads, head_dim)."""
        return super().forward(x.flatten(-2)).view_as(x)


# ---------------------------------------------------------------- feed-forward layers


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class FeedForward(nn.Module):
    """SwiGLU, or GeGLU with the activation gelu_tanh (Shazeer 2020, arXiv:2002.05202)."""

    TENSOR: ClassVar = {"": "gather", "w1": "column", "w3": "column", "w2": "row"}
    INTO_RESIDUAL: ClassVar = ("w2",)

    def __init__(self, dim: int, hidden_dim: int, activation: Activation = F.silu):
        super().__init__()
        self.activation = activation
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """x: (batch, seq, dim). The context has no effect; blocks pass it to every kind of layer."""
        return self.w2(self.activation(self.w1(x)) * self.w3(x))


# ---------------------------------------------------------------- gates, embedding and output


class Gate(nn.Linear):
    """A linear layer with one or a few outputs for each head or token, which control others: gates, decays, rates. Its product
    is never in float8, its weight never in 4 bits."""

    def __init__(self, dim: int, outputs: int):
        super().__init__(dim, outputs, bias=False)


class ScaledEmbedding(nn.Embedding):
    """An embedding whose result is multiplied by a constant."""

    def __init__(self, vocab_size: int, dim: int, scale: float):
        super().__init__(vocab_size, dim)
        self.scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale


class Output(nn.Linear):
    """Projection to the vocabulary. The head runs inside this module, because FSDP gathers the weight only for this module. The
    weight may have a higher precision than the hidden states."""

    WIDTH: ClassVar = "output"

    def __init__(self, dim: int, vocab_size: int, softcap: float | None = None):
        """softcap: limit of the logits: softcap * tanh(logit / softcap) replaces a logit."""
        super().__init__(dim, vocab_size, bias=False)
        self.softcap = softcap

    def forward(self, h: Tensor, head: Head | None = None) -> Tensor:
        if head is not None:
            return head(h, self.weight, self.softcap)
        logits = F.linear(h, self.weight.to(h.dtype))
        if self.softcap is None:
            return logits
        return (logits / self.softcap).tanh() * self.softcap
