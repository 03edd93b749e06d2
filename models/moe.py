"""Mixtures of experts (Shazeer et al. 2017, arXiv:1701.06538): a router sends each token to a few of many feed-forward layers.

No token is dropped, so a token's result does not depend on the other tokens of its batch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.grouped import grouped_product
from models.sizes import MixtureSizes


class Router(nn.Module):
    """Chooses the experts of each token by the largest softmax scores."""

    def __init__(self, sizes: MixtureSizes):
        super().__init__()
        self.experts_per_token = sizes.experts_per_token
        self.normalize = sizes.normalize_weights
        self.weight = nn.Parameter(torch.empty(sizes.n_experts, sizes.dim))
        self.multiply_adds_per_token = {"weight": sizes.n_experts * sizes.dim}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of the chosen experts, fp32, and their indices, both (tokens, experts per token), by falling scores.
        Of equal scores, that of the lower index comes first.

        Scores are computed in fp32: rounded scores of many experts are often equal.

        Args:
            x: (tokens, dim).
        """
        scores = F.linear(x.float(), self.weight.float()).softmax(-1)  # (tokens, experts)
        scores, experts = scores.sort(dim=-1, descending=True, stable=True)
        weights, experts = scores[:, : self.experts_per_token], experts[:, : self.experts_per_token]
        return weights / weights.sum(-1, keepdim=True) if self.normalize else weights, experts


class Experts(nn.Module):
    """Feed-forward layers with SwiGLU, whose matrices are stacked."""

    INTO_RESIDUAL = ("w2",)

    def __init__(self, n_experts: int, dim: int, hidden_dim: int, experts_per_token: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.multiply_adds_per_token = dict.fromkeys(("w1", "w2", "w3"), experts_per_token * dim * hidden_dim)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the result of each row's expert, (rows, dim).

        Args:
            rows: Hidden states in the order of their experts, (rows, dim).
            counts: Number of rows of each expert, (experts,), int64.
        """
        gate, up = grouped_product(rows, self.w1, counts), grouped_product(rows, self.w3, counts)
        return grouped_product(F.silu(gate) * up, self.w2, counts)


class LocalExchange(nn.Module):
    """Sends rows to experts that are all in this process. The trainer replaces this module if other ranks have experts."""

    def forward(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the results of the experts. See Experts for the arguments."""
        return experts(rows, counts)


class MixtureOfExperts(nn.Module):
    """A router and its experts. The result of a token is the sum of its experts' results, times their weights."""

    def __init__(self, sizes: MixtureSizes):
        super().__init__()
        self.router = Router(sizes)
        self.experts = Experts(sizes.n_experts, sizes.dim, sizes.expert_dim, sizes.experts_per_token)
        self.exchange = LocalExchange()

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq, dim)."""
        tokens = x.flatten(0, -2)  # (tokens, dim)
        weights, experts = self.router(tokens)  # (tokens, experts per token)
        slots = experts.flatten()  # one slot for each token and each of its experts
        order = slots.argsort(stable=True)
        counts = slots.new_zeros(len(self.router.weight)).scatter_add_(0, slots, torch.ones_like(slots))
        rows = tokens.repeat_interleave(experts.shape[1], 0)[order]
        results = self.exchange(self.experts, rows, counts)[order.argsort()].view(*experts.shape, -1)
        # The sum runs in the order of the token's own experts and in fp32, so it does not depend on the layout.
        return (results * weights[..., None]).sum(1).type_as(x).view_as(x)
