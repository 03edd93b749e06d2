"""Decisions of routers, recorded in one run and replayed in others.

A rounding error can exchange two experts with almost equal scores, and then the gradients of both differ by whole tokens. So runs
that are compared use the same decisions, and those that a run would have made differently are counted.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from models.context import Context
from models.moe import MixtureOfExperts, Router
from trainer.parallel.balance import Balance

_POSITION_BITS, _DOCUMENT_BITS = 24, 16


@dataclass(frozen=True)
class Decisions:
    """The experts of tokens in one layer."""

    tokens: Tensor
    """Identities of the tokens, increasing, (tokens,), int64."""
    experts: Tensor
    """(tokens, experts per token), int64."""

    @classmethod
    def join(cls, parts: Iterable["Decisions"]) -> "Decisions":
        """Return the decisions of all parts, each token's once: a recomputed forward repeats them."""
        parts = list(parts)
        tokens, experts = torch.cat([p.tokens for p in parts]), torch.cat([p.experts for p in parts])
        tokens, order = tokens.sort(stable=True)
        is_first = tokens.diff(prepend=tokens[:1] - 1) != 0
        return cls(tokens[is_first], experts[order][is_first])

    def of(self, tokens: Tensor) -> Tensor:
        """Return the experts of tokens, (number of tokens, experts per token). tokens: identities, (number of tokens,)."""
        index = torch.searchsorted(self.tokens, tokens).clamp(max=len(self.tokens) - 1)
        assert torch.equal(self.tokens[index], tokens), "the run has tokens that the reference run has not"
        return self.experts[index]


@dataclass
class RouterLog:
    """Decisions of the routers on one rank. They are recorded, or replayed from another run."""

    replayed: Mapping[int, Decisions]
    """Layer -> decisions that its router must repeat. Empty: routers decide, and are recorded."""
    recorded: dict[int, list[Decisions]] = field(default_factory=dict)
    num_decisions: int = 0
    """Number of tokens in all layers for which decisions were replayed."""
    num_different: int = 0
    """Number of those for which the router would have chosen other experts."""

    def watch(self, layers: Mapping[int, MixtureOfExperts]) -> None:
        """Record or replay the decisions of this rank's layers. layers: index -> its mixture of experts."""
        for layer, mixture in layers.items():
            contexts: list[Context] = []
            mixture.forward = partial(_note_context, mixture.forward, contexts)
            mixture.router.choose = partial(self._choose, mixture.router.choose, layer, mixture.balance, contexts)

    @torch.compiler.disable
    def _choose(
        self, choose: Callable[[Tensor], Tensor], layer: int, balance: Balance, contexts: list[Context], scores: Tensor
    ) -> Tensor:
        experts = choose(scores)
        if not torch.is_grad_enabled():
            return experts
        identities = _identities(contexts[-1]).chunk(balance.tp_ranks, 1)[balance.tp_rank]  # (batch, seq)
        valid = identities >= 0
        if not self.replayed:
            self.recorded.setdefault(layer, []).append(Decisions(identities[valid], experts[valid]))
            return experts
        given = self.replayed[layer].of(identities[valid])
        self.num_decisions += len(given)
        self.num_different += int((given.sort(-1).values != experts[valid].sort(-1).values).any(-1).sum())
        return experts.masked_scatter(valid[..., None], given)

    def decisions(self) -> dict[int, Decisions]:
        """Return the recorded decisions of each layer."""
        return {layer: Decisions.join(parts) for layer, parts in self.recorded.items()}


def even_routes() -> AbstractContextManager:
    """Return a context manager in which routers send tokens to all experts in turn, so that experts get equally many rows. The
    routers allocate the memory of their own choice."""
    choose = Router.choose

    def choose_in_turn(router: Router, scores: Tensor) -> Tensor:
        experts = choose(router, scores)
        turns = torch.arange(experts.numel(), device=experts.device) % scores.shape[-1]
        return experts.copy_(turns.view_as(experts))

    return patch.object(Router, "choose", choose_in_turn)


def _note_context(forward: Callable[..., Tensor], contexts: list[Context], x: Tensor, context: Context) -> Tensor:
    contexts[:] = [context]
    return forward(x, context)


def _identities(context: Context) -> Tensor:
    """Return a number for each token that no other token of a run has, -1 outside all documents, (batch, seq), int64."""
    sample = context.samples[:, None] << _DOCUMENT_BITS | context.documents
    return torch.where(context.documents >= 0, sample << _POSITION_BITS | context.positions, -1)
