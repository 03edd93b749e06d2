"""Where the records of a run go: the console, metrics.jsonl, TensorBoard, and services."""

from collections.abc import Callable, Collection
from functools import partial

from trainer.run.sinks.delivery import Delivery
from trainer.run.sinks.local import Console, JsonLines
from trainer.run.sinks.services import MLflow, Trackio, Wandb
from trainer.run.sinks.sink import LoggedRun, Sink
from trainer.run.sinks.tensorboard import TensorBoard

SINKS: dict[str, Callable[[LoggedRun], Sink]] = {
    "console": Console,
    "jsonl": JsonLines,  # before the sinks that read what it has written
    "tensorboard": partial(Delivery, TensorBoard),
    "wandb": partial(Delivery, Wandb),
    "mlflow": partial(Delivery, MLflow),
    "trackio": partial(Delivery, Trackio),
}
"""Value of metrics.sinks -> sink. The order is that in which a record is written."""


def build_sinks(names: Collection[str], run: LoggedRun, is_writer: bool) -> list[Sink]:
    """Return the sinks of this rank. A rank that is not the writer has only the console, which LOG_RANK filters."""
    return [sink(run) for name, sink in SINKS.items() if name in names and (is_writer or name == "console")]
