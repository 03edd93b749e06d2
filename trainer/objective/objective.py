"""What a run minimizes: the interface between an objective and the steps that compute it."""

from typing import Protocol

from torch import Tensor

from models.spec import Head
from trainer.base.system.spelling import counted
from trainer.batch import Batch


class Readout(Protocol):
    """Computation on the last hidden states, such as a loss."""

    shape: tuple[int, ...]
    """Shape of a head's result."""

    def head(self, labels: Tensor, documents: Tensor, reference: Tensor | None) -> Head:
        """Return the head of a microbatch. The arguments are fields of Batch after context parallelism has sharded the
        sequences."""


class Objective(Readout, Protocol):
    """Function that a run minimizes: the mean of a loss over the terms of a batch, such as target tokens. Its heads return the
    sum of the loss over the terms or, if it has metrics, a vector of this sum and the sums of the metrics. Only the loss has a
    gradient."""

    unit: str
    """Name of the number of terms in metrics."""
    metrics: tuple[str, ...]
    """Names of the metrics that are computed with the loss. They are means over the terms, too."""

    def count(self, batch: Batch) -> Tensor:
        """Return the number of terms as a scalar. batch: full sequences."""


def by_name(objective: Objective, values: Tensor) -> dict[str, Tensor]:
    """Return "loss" and the objective's metrics by name. values: result of the objective's heads, (1 + metrics,)."""
    names = ("loss", *objective.metrics)
    if len(values) != len(names):
        message = (
            f"its head returned {counted(len(values), 'value')}, expected {len(names)}: the sums of {', '.join(names)}"
        )
        raise TypeError(f"{type(objective).__name__}: {message}")
    return dict(zip(names, values.unbind(), strict=True))


def require_complete(objective: Objective) -> None:
    """Raise TypeError if the objective lacks an attribute of Objective, or if its shape contradicts its metrics."""
    name = type(objective).__name__
    missing = [key for key in ("unit", "metrics", "shape", "head", "count") if not hasattr(objective, key)]
    if missing:
        raise TypeError(f"the objective {name} lacks {', '.join(missing)}; see Objective in {__name__}")
    shapes = [(1 + len(objective.metrics),)] if objective.metrics else [(1,), ()]
    if tuple(objective.shape) not in shapes:
        message = (
            f"shape is {tuple(objective.shape)}, expected {shapes[0]}: the loss and {len(objective.metrics)} metrics"
        )
        raise TypeError(f"the objective {name}: {message}")
