"""Kimi Delta Attention (Kimi Team 2025, "Kimi Linear", arXiv:2510.26692): the gated delta rule in which each channel of a key
has a decay of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.components import Gate, at_least_fp32
from models.context import Context
from models.delta_net import Carry, DeltaRule, RecurrentKind, RecurrentMixer


@dataclass(frozen=True, kw_only=True)
class KimiDeltaKind(RecurrentKind):
    """A kind of layer whose mixer is Kimi Delta Attention."""

    MIXER: ClassVar = "kda"
    HEADS: ClassVar = ("linear_num_heads",)
    KERNEL: ClassVar = "kimi_delta_rule"

    def kernel(self, carry: Carry) -> "ChannelDeltaRule":
        return ChannelDeltaRule(carry)


class ChannelDeltaRule(DeltaRule):
    """The kernel of the delta rule with a decay of each channel, the diagonal matrix D_t:

    S_t = (1 - b_t k_t k_t^T) D_t S_t-1 + b_t k_t v_t^T
    """

    def products(self, factors: Sequence[Tensor], k: Tensor, g: Tensor, visible: Tensor) -> list[Tensor]:
        products = self._products(torch.stack(list(factors)), k[None], g[None])
        return [product.masked_fill(~visible, 0.0) for product in products]

    def _products(self, x: Tensor, k: Tensor, g: Tensor) -> Tensor:
        """Return the sums over channels of x_i k_j exp(g_i - g_j) for tokens i >= j, (..., size, size), and zero for others.

        The decay from a token of the first half to one of the second passes the end of the first half. So it is a product of two
        factors that are at most one, and the pairs between halves are a product of matrices. Within the halves, likewise.

        Args:
            x: (..., size, key_dim).
            k: Likewise.
            g: Sums of the logarithms of the decay since the beginning of the chunk, or of a later boundary, likewise.
        """
        size = x.shape[-2]
        if size == 1:
            return (x * k).sum(-1, keepdim=True)
        halves = [y.unflatten(-2, (2, size // 2)) for y in (x, k, g)]
        within = self._products(*halves)  # (..., 2, size / 2, size / 2)
        (_, x_second), (k_first, _), (g_first, g_second) = (half.unbind(-3) for half in halves)
        end = g_first[..., -1:, :]
        # Behind a boundary, sums begin anew and exceed the end's. These pairs are not visible.
        between = x_second * (g_second - end).clamp(max=0).exp() @ (k_first * (end - g_first).clamp(max=0).exp()).mT
        first, second = within.unbind(-3)
        above = torch.cat((first, torch.zeros_like(between)), -1)
        return torch.cat((above, torch.cat((between, second), -1)), -2)


class KimiDeltaAttention(RecurrentMixer):
    """Kimi Delta Attention. The decay of a channel is exp(-A softplus(f + dt_bias)), where f and the gate of the result are
    projections of narrow vectors. Names of the matrices are those of the published code."""

    TENSOR: ClassVar = {
        "": "gather_latents",
        **dict.fromkeys(("f_a", "g_a"), "token"),
        **dict.fromkeys(("wq", "wk", "wv", "f_b", "g_b", "wb"), "local_column"),
        "norm": "head_norm",
        "wo": "row",
    }

    def __init__(self, dim: int, kind: KimiDeltaKind, norm_eps: float):
        """Build the layer. See RecurrentMixer."""
        width, values = kind.widths[0], kind.value_heads * kind.widths[1]
        super().__init__(dim, kind, norm_eps, decays=values)
        self.wq, self.wk, self.wv = (nn.Linear(dim, values, bias=False) for _ in range(3))
        self.f_a, self.g_a = (nn.Linear(dim, width, bias=False) for _ in range(2))
        self.f_b, self.g_b = (nn.Linear(width, values, bias=False) for _ in range(2))
        self.f_a.WIDTH = self.g_a.WIDTH = "output"  # the narrow vectors have the width of a head
        self.f_b.WIDTH = self.g_b.WIDTH = "widening"
        self.wb = Gate(dim, kind.value_heads)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x: (batch, seq, dim)."""
        # One tensor, so that tensor parallelism gathers it once. Under it, a rank has computed only some tokens of it.
        return self.attend(torch.cat((x, self.f_a(x), self.g_a(x)), -1), context)

    def attend(self, latents: Tensor, context: Context) -> Tensor:
        """Return the result, (batch, seq, dim). latents: the hidden state, and the narrow vectors of decay and gate, (batch, seq,
        dim + 2 width)."""
        width = self.kind.widths[0]
        x, f, g = latents.split((latents.shape[-1] - 2 * width, width, width), -1)
        # -1, not the number of heads: under tensor parallelism a rank holds only its own heads.
        q, k, v = (
            w(x).unflatten(-1, (-1, width)) for w in (self.wq, self.wk, self.wv)
        )  # (batch, seq, local heads, width)
        step = F.softplus(at_least_fp32(self.f_b(f)) + self.dt_bias).unflatten(-1, (-1, width))
        log_decay = -at_least_fp32(self.A_log).exp()[:, None] * step
        out = self.recur((q, k, v), log_decay, at_least_fp32(self.wb(x)).sigmoid(), context)
        gate = at_least_fp32(self.g_b(g)).sigmoid().unflatten(-1, (-1, width))
        return self.wo((out * gate).type_as(x).flatten(-2))
