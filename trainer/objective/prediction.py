"""Multi-token prediction: what the layers of Structure.num_predictions read and predict."""

import torch
from torch import Tensor

from trainer.batch import IGNORE_INDEX, Batch


def with_future(batch: Batch, depth: int) -> Batch:
    """Return a batch with the tokens and labels after the next ones. They stop at the end of a document: later tokens are -1, and
    later labels IGNORE_INDEX.

    Args:
        batch: Full sequences.
        depth: Number of prediction layers. 0: the batch stays as it is.
    """
    if not depth:
        return batch

    def shifted(values: Tensor, distance: int, filler: int) -> Tensor:
        """Return the values of the tokens at a distance after each token, (batch, seq)."""
        result = torch.full_like(values, filler)
        is_inside = batch.documents[:, distance:] == batch.documents[:, :-distance]
        result[:, :-distance] = values[:, distance:].where(is_inside, filler)
        return result

    distances = range(1, depth + 1)
    labels = torch.stack([batch.labels, *(shifted(batch.labels, d, IGNORE_INDEX) for d in distances)], -1)
    return batch._replace(labels=labels, future=torch.stack([shifted(batch.tokens, d, -1) for d in distances], -1))
