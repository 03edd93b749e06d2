"""Log-probabilities of continuations."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.batch import IGNORE_INDEX
from trainer.inference.next_logits import logits_of

Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens of a context, at least one, and of its continuation."""

_POSITIONS_AT_ONCE = 1024
"""Number of positions whose logits are computed together. It bounds the memory of the logits."""


@torch.no_grad()
def score_continuations(
    model: nn.Module, pairs: Sequence[Pair], max_rows: int, max_seq_len: int, device: torch.device
) -> list[tuple[float, bool]]:
    """Return, for each pair, the log-probability of the continuation, and whether it consists of the most likely tokens.

    Args:
        model: Without a cache.
        pairs: Continuations have at most max_seq_len tokens.
        max_rows: Number of pairs in a batch.
        max_seq_len: Number of tokens that the model sees. Of longer pairs, it sees the last ones.
        device: Of the model.
    """
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]), reverse=True)
    scores = {}
    for first in range(0, len(order), max_rows):
        batch = order[first : first + max_rows]
        scores |= dict(zip(batch, _scores(model, [pairs[i] for i in batch], max_seq_len, device), strict=True))
    return [scores[i] for i in range(len(pairs))]


def _scores(
    model: nn.Module, pairs: Sequence[Pair], max_seq_len: int, device: torch.device
) -> list[tuple[float, bool]]:
    texts = [[*context, *continuation][-max_seq_len - 1 :] for context, continuation in pairs]
    tokens = torch.zeros(len(pairs), max(map(len, texts)) - 1, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORE_INDEX)
    for row, (text, (_, continuation)) in enumerate(zip(texts, pairs, strict=True)):
        end, count = len(text) - 1, len(continuation)
        tokens[row, :end] = torch.tensor(text[:-1])
        labels[row, end - count : end] = torch.tensor(continuation)
    labels = labels.to(device)
    rows, positions = (labels != IGNORE_INDEX).nonzero(as_tuple=True)
    targets = labels[rows, positions]

    def head(hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
        """Return the log-probability of each target and whether it is the most likely token, (2, targets), fp32."""
        hidden = hidden.to_local() if isinstance(hidden, DTensor) else hidden
        chosen, results = hidden[rows, positions], [hidden.new_zeros(2, 0, dtype=torch.float32)]
        for h, target in zip(chosen.split(_POSITIONS_AT_ONCE), targets.split(_POSITIONS_AT_ONCE), strict=True):
            logits = logits_of(h, weight, softcap)
            is_best = logits.argmax(-1) == target
            results.append(torch.stack((-F.cross_entropy(logits, target, reduction="none"), is_best.float())))
        return torch.cat(results, 1)

    log_probs, is_best = model(tokens.to(device), head=head)
    counts = [len(continuation) for _, continuation in pairs]
    columns = zip(log_probs.split(counts), is_best.split(counts), strict=True)
    return [(of_pair.sum().item(), bool(best.all())) for of_pair, best in columns]
