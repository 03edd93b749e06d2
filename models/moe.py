"""Mixtures of experts (Shazeer et al. 2017, arXiv:1701.06538): a router sends each token to a few of many feed-forward layers.

No token is dropped, so a token's result does not depend on the other tokens of its batch.
"""

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.components import ExactBuffers, FeedForward, at_least_fp32
from models.context import Context
from models.mixture_sizes import GroupedMixtureSizes, MixtureSizes
from models.row_groups import grouped_product, permute


class Routing(NamedTuple):
    """Result of a router."""

    weights: Tensor
    """Weights of the results of a token's experts, by falling scores, (batch, seq, experts per token), fp32."""
    experts: Tensor
    """Indices of these experts, (batch, seq, experts per token), int64."""
    scores: Tensor
    """Scores of all experts, (batch, seq, experts), fp32. Those of a token sum to one."""
    logits: Tensor
    """Logits of all experts, (batch, seq, experts), fp32."""


class Router(nn.Module):
    """Chooses the experts of each token by the largest softmax scores."""

    WIDTH: ClassVar = "output"

    def __init__(self, sizes: MixtureSizes):
        super().__init__()
        self.experts_per_token = sizes.experts_per_token
        self.normalize = sizes.normalize_weights
        self.weight = nn.Parameter(torch.empty(sizes.n_experts, sizes.dim))
        self.multiply_adds_per_token = {"weight": sizes.n_experts * sizes.dim}

    def forward(self, x: Tensor) -> Routing:
        """Choose the experts of each token. Scores are computed in fp32: rounded scores of many experts are often equal.

        Args:
            x: (batch, seq, dim).
        """
        logits = self.logits(x)
        scores = logits.softmax(-1)
        experts = self.choose(scores)
        weights = scores.gather(-1, experts)
        return Routing(weights / weights.sum(-1, keepdim=True) if self.normalize else weights, experts, scores, logits)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of all experts, (batch, seq, experts), fp32. x: (batch, seq, dim)."""
        return F.linear(at_least_fp32(x), at_least_fp32(self.weight))

    def choose(self, scores: Tensor) -> Tensor:
        """Return the indices of the best experts, by falling scores, (batch, seq, experts per token), int64. Of equal scores, the
        one of the lower index comes first.

        Args:
            scores: (batch, seq, experts).
        """
        return scores.argsort(dim=-1, descending=True, stable=True)[..., : self.experts_per_token]


class CorrectedRouter(ExactBuffers, Router):
    """Chooses the experts of each token by sigmoid scores plus a correction of each expert, which balances the load without a
    loss (DeepSeek-AI 2024, "DeepSeek-V3", arXiv:2412.19437). The weights do not depend on the correction.

    Experts are chosen from the best groups. The two best experts of a group score it. The correction stays fp32: in bf16, its
    steps would vanish.
    """

    BUFFERS: ClassVar = {"correction": 0.0}

    def __init__(self, sizes: GroupedMixtureSizes):
        super().__init__(sizes)
        self.n_groups, self.groups_per_token = sizes.n_groups, sizes.groups_per_token
        self.scale = sizes.weight_scale
        self.register_buffer("correction", torch.zeros(sizes.n_experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> Routing:
        """See Router. x: (batch, seq, dim)."""
        logits = self.logits(x)
        scores = logits.sigmoid()
        experts = self.choose(self._among_best_groups(scores + self.correction))
        weights = scores.gather(-1, experts)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(weights * self.scale, experts, scores / scores.sum(-1, keepdim=True), logits)

    def _among_best_groups(self, scores: Tensor) -> Tensor:
        """Return the scores, with -inf in place of those outside the best groups. scores: (batch, seq, experts)."""
        grouped = scores.unflatten(-1, (self.n_groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).argsort(dim=-1, descending=True, stable=True)
        excluded = torch.ones_like(best, dtype=torch.bool).scatter(-1, best[..., : self.groups_per_token], False)
        return grouped.masked_fill(excluded[..., None], float("-inf")).flatten(-2)


class Experts(nn.Module):
    """Feed-forward layers with SwiGLU, whose parameters are stacked: all have one matrix, or one bias, for each expert."""

    INTO_RESIDUAL: ClassVar = ("w2",)
    MATRICES: ClassVar = ("w1", "w2", "w3")

    def __init__(self, n_experts: int, dim: int, hidden_dim: int, experts_per_token: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.multiply_adds_per_token = dict.fromkeys(self.MATRICES, experts_per_token * dim * hidden_dim)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the result of each row's expert, (rows, dim).

        Args:
            rows: Hidden states in the order of their experts, (rows, dim).
            counts: Number of rows of each expert, (experts,), int64.
        """
        gate, up = self.product("w1", rows, counts), self.product("w3", rows, counts)
        return self.product("w2", F.silu(gate) * up, counts)

    def product(self, name: str, rows: Tensor, counts: Tensor, biases: Tensor | None = None) -> Tensor:
        """Return the product of each row and its expert's matrix, as grouped_product does. Adapters replace this method. name: of
        the stacked matrices."""
        return grouped_product(rows, getattr(self, name), counts, biases)


def is_stack(model: nn.Module, name: str) -> bool:
    """Return whether a parameter is a stack, whose first dim is that of the experts: all parameters of Experts are, also biases
    and adapters. The number of dims does not tell.

    Args:
        model: Contains the parameter's module. It may be parallelized.
        name: Of the parameter.
    """
    return isinstance(model.get_submodule(name.rpartition(".")[0]), Experts)


class LocalExchange(nn.Module):
    """Sends rows to experts that are all in this process. The trainer replaces this module if other ranks have experts."""

    def forward(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the results of the experts. See Experts for the arguments."""
        return experts(rows, counts)


class Unbalanced(nn.Module):
    """Leaves the load of the experts to the loss of the model. The trainer replaces this module to balance the load."""

    def forward(self, routing: Routing, context: Context | None) -> Tensor:
        """Return the weights."""
        return routing.weights


class MixtureOfExperts(nn.Module):
    """A router and its experts. The result of a token is the sum of its experts' results, times their weights. Shared experts are
    a feed-forward layer whose result is added."""

    def __init__(
        self,
        sizes: MixtureSizes,
        router: Router | None = None,
        experts: Experts | None = None,
        shared: FeedForward | None = None,
    ):
        """Build the layer.

        Args:
            sizes: Of the model.
            router: None: built from the sizes.
            experts: None: built from the sizes.
            shared: Feed-forward layer of the shared experts. None: no shared experts.
        """
        super().__init__()
        self.router = router or Router(sizes)
        self.experts = experts or Experts(sizes.n_experts, sizes.dim, sizes.expert_dim, sizes.experts_per_token)
        self.exchange = LocalExchange()
        self.balance = Unbalanced()
        self.shared = shared
        self.n_experts = sizes.n_experts

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """x: (batch, seq, dim)."""
        routed = self.routed(x, context)
        return routed if self.shared is None else routed + self.shared(x)

    def routed(self, x: Tensor, context: Context | None) -> Tensor:
        """Return the results of the experts that the router chooses. x: (batch, seq, dim)."""
        routing = self.router(x)
        weights = self.balance(routing, context)  # (batch, seq, experts per token)
        slots = routing.experts.flatten()  # one slot for each token and each of its experts
        order = slots.argsort(stable=True)
        counts = slots.new_zeros(self.n_experts).scatter_add_(0, slots, torch.ones_like(slots))
        inverse = order.argsort()
        rows = permute(
            x.flatten(0, -2).repeat_interleave(weights.shape[-1], 0), order, inverse
        )  # (slots, dim), by expert
        results = permute(self.exchange(self.experts, rows, counts), inverse, order).view(*weights.shape, -1)
        # The sum runs in the order of the token's own experts and in fp32, so it does not depend on the layout.
        return (results * weights[..., None]).sum(-2).type_as(x)
