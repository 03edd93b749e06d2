"""Preference optimization: losses on pairs of a chosen and a rejected answer to the same prompt.

A sample contains complete pairs. Its document 2i is a chosen answer with its prompt, document 2i + 1 the rejected answer with the
same prompt. A loss is a function of the two answers' log-probabilities under the model and, for some losses, under the reference
model. The mean is taken over pairs, not over tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from models.spec import Head
from trainer.base.config import PreferenceConfig
from trainer.batch import IGNORE_INDEX, Batch
from trainer.objective.cross_entropy import token_losses
from trainer.objective.document_scores import sum_by_document


def _dpo(sums: Tensor, means: Tensor, config: PreferenceConfig) -> Tensor:
    """Rafailov et al. 2023, "Direct Preference Optimization" (arXiv:2305.18290), equation 7."""
    return -F.logsigmoid(config.beta * _margin(sums))


def _ipo(sums: Tensor, means: Tensor, config: PreferenceConfig) -> Tensor:
    """Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human Preferences" (arXiv:2310.12036),
    equation 17. Log-probabilities are means over tokens, as in TRL, because sums would make the loss depend on the length."""
    return (_margin(means) - 1 / (2 * config.beta)) ** 2


def _simpo(sums: Tensor, means: Tensor, config: PreferenceConfig) -> Tensor:
    """Meng et al. 2024, "SimPO: Simple Preference Optimization with a Reference-Free Reward" (arXiv:2405.14734), equation 6."""
    return -F.logsigmoid(config.beta * _margin(means) - config.margin)


def _orpo(sums: Tensor, means: Tensor, config: PreferenceConfig) -> Tensor:
    """Hong et al. 2024, "ORPO: Monolithic Preference Optimization without Reference Model" (arXiv:2403.07691), equations 6 and 7.
    The first term is the mean cross-entropy of the chosen answer's tokens."""
    below_one = means.clamp(max=-1e-6)  # the odds of an answer with probability 1 are infinite
    log_odds = below_one - torch.log(-torch.expm1(below_one))
    return -means[:, 0] - config.beta * F.logsigmoid(_margin(log_odds))


def _margin(values: Tensor) -> Tensor:
    return values[:, 0] - values[:, 1]


LOSSES = {"dpo": _dpo, "ipo": _ipo, "simpo": _simpo, "orpo": _orpo}
"""[preference] loss -> function (sums, means, config) that returns the loss of each pair, (pairs,). sums, means: sum and mean
over the tokens of each answer, (pairs, 2), chosen, then rejected. A token's value is its log-probability under the model, minus
that under the reference model if the loss has one."""
_PER_TOKEN = ("simpo", "orpo")
"""Losses whose implicit reward of an answer is a mean over its tokens instead of a sum."""


@dataclass(frozen=True)
class Preference:
    """Objective of preference optimization. Its terms are the pairs."""

    config: PreferenceConfig
    seq_len: int
    """Number of tokens of a full sequence, which is also the maximum number of its documents."""
    cp_group: ProcessGroup
    """Group of the ranks over which each sequence is split."""
    chunk_tokens: int
    compiled: bool
    unit: ClassVar[str] = "num_pairs"
    metrics: ClassVar[tuple[str, ...]] = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")
    shape: ClassVar[tuple[int, ...]] = (5,)

    def head(self, labels: Tensor, documents: Tensor, reference: Tensor | None) -> Head:
        def head(hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
            log_ratios = -token_losses(labels, hidden, weight, softcap, self.chunk_tokens, self.compiled)
            if reference is not None:
                log_ratios = log_ratios - reference
            pairs = self._by_pair(log_ratios, documents), self._by_pair(_is_target(labels), documents)
            return self._sums(*pairs)

        return head

    def count(self, batch: Batch) -> Tensor:
        lengths = sum_by_document(_is_target(batch.labels), batch.documents, self.seq_len)
        return (lengths[:, ::2] > 0).sum()

    def _by_pair(self, values: Tensor, documents: Tensor) -> Tensor:
        """Return the sum of the values of each answer over all tokens, (pairs, 2). The gradient is that of this rank's tokens,
        times the number of cp ranks, because the result of each rank is divided by it.

        Args:
            values: (batch, seq / cp).
            documents: (batch, seq / cp).
        """
        return _sum_over(sum_by_document(values, documents, self.seq_len // 2 * 2).reshape(-1, 2), self.cp_group)

    def _sums(self, log_ratios: Tensor, lengths: Tensor) -> Tensor:
        """Return the sums of the loss and of the metrics over all pairs, divided by the number of cp ranks, which all have
        them."""
        is_pair = lengths[:, 0] > 0
        # Without a pair, any log-probability that has finite gradients.
        log_ratios = log_ratios.where(is_pair[:, None], -1.0)
        means = log_ratios / lengths.clamp(min=1)
        loss = self.config.loss
        rewards = self.config.beta * (means if loss in _PER_TOKEN else log_ratios).detach()
        margin = _margin(rewards)
        columns = (LOSSES[loss](log_ratios, means, self.config), *rewards.unbind(1), margin, (margin > 0).float())
        return (torch.stack(columns) * is_pair).sum(1) / self.cp_group.size()


def _sum_over(own: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over the ranks of a group. Its gradient is that of this rank's term, times the number of ranks."""
    if group.size() == 1:
        return own
    total = own.detach().clone()
    dist.all_reduce(total, group=group)
    return total + group.size() * (own - own.detach())


def _is_target(labels: Tensor) -> Tensor:
    return (labels != IGNORE_INDEX).float()
