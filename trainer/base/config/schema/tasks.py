"""Settings of the tasks that judge a model while it trains, and the metrics of each kind of task."""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from trainer.base.config.schema.constraint import Constraint, StepsOrZero

Metric = Literal["acc", "acc_norm", "acc_bytes", "acc_mutual_info", "right_probability", "bits_per_byte", "exact_match"]
METRICS: dict[str, tuple[Metric, ...]] = {
    "choices": ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "right_probability", "bits_per_byte"),
    "continuation": ("acc", "bits_per_byte"),
    "exact": ("exact_match",),
}
"""Kind of task -> metrics it has. The first one stands for the task where only its name is given."""
FALLING: tuple[Metric, ...] = ("bits_per_byte",)
"""Metrics that fall while a model improves. All others rise."""

DEFAULT_STOP = ("\n\n",)
PYTHON_IDIOMS = "python_idioms"
"""Path of the questions that are part of the trainer."""
_GENERATED = ("stop", "max_new_tokens", "ignore_case", "ignore_punctuation", "answer_pattern")
_SCORED = ("count_leading_space",)
UNUSED = {"choices": _GENERATED, "continuation": (*_GENERATED, *_SCORED), "exact": ("delimiter", *_SCORED)}
"""Kind of task -> options without an effect on it."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    path: str = ""
    """File of questions, as JSON lines, which may be compressed (docs/tasks.md). "python_idioms": a small set that is part of the
    trainer."""
    kind: Literal["choices", "continuation", "exact"] = "choices"
    """choices: which of several continuations is the most likely. continuation: how likely the given one is. exact: whether the
    text that the model generates is one of the answers."""
    metrics: tuple[Metric, ...] = ()
    """Metrics to compute; the first one stands for the task. Empty: all of this kind."""
    interval_steps: StepsOrZero = 0
    """Number of steps between two uses of the task, which also follows the last step. 0: [evaluation] interval_steps."""
    limit: Annotated[int, Constraint(min=0, max=10**9, unit="questions")] = 0
    """Number of questions, the first ones; 0: all."""
    time_limit_s: Annotated[float, Constraint(min=0, max=10**7, unit="seconds")] = 0.0
    """Time after which no further batch of questions is begun. The metrics are then those of the questions that are complete. 0:
    no limit. Not for the task of keep_best_on."""
    max_seq_len: Annotated[int, Constraint(min=0, max=10**9, unit="tokens")] = 0
    """Number of tokens of a request, at most [training] seq_len; a longer one loses its first tokens. 0: [training] seq_len."""
    save_requests: bool = False
    """Whether the log-probability of each request, or each generated text, is written to tasks/NAME/step-N.jsonl in the run
    folder."""
    chat: bool = False
    """Whether each context is the message of a user in a chat, whose template also precedes the answer."""
    delimiter: str = " "
    """Text between a context and a continuation that are given as fields of a question. Requests that are given complete, as in
    OLMo's files, have none."""
    count_leading_space: bool = True
    """Whether white space at the start of a choice counts as characters and bytes in acc_norm and acc_bytes, as in
    lm-evaluation-harness. It always counts in bits_per_byte, and the delimiter never does."""
    stop: Annotated[tuple[str, ...], Constraint(multiline=True)] = ()
    """Texts that end what the model generates. Empty: those of the question in OLMo's files, otherwise an empty line."""
    max_new_tokens: Annotated[int, Constraint(min=1, max=10**6, unit="tokens")] = 256
    """Maximum number of tokens of a generated text."""
    ignore_case: bool = False
    """Whether generated text and answers are compared in lower case."""
    ignore_punctuation: bool = False
    """Whether punctuation (ASCII) is removed before they are compared."""
    answer_pattern: str = ""
    r"""Regular expression that finds the answer in the generated text, and in right answers that match: its first group, if it
    has one, as in "#### (-?[0-9.,]+)". The last match counts. Empty: the whole text."""

    @property
    def measured(self) -> tuple[Metric, ...]:
        return self.metrics or METRICS[self.kind]


class Criterion(NamedTuple):
    """What the best checkpoint is chosen by, and what early stopping observes."""

    name: str
    """Name of an evaluation dataset, whose loss counts, or of a task."""
    metric: str
    falls: bool
    """Whether lower values are better."""

    def is_better(self, value: float, other: float, by_more_than: float = 0.0) -> bool:
        """Return whether a value is better than another one. NaN is not."""
        return value < other - by_more_than if self.falls else value > other + by_more_than

    def __str__(self) -> str:
        return f"{'the ' if self.metric == 'loss' else ''}{self.metric} on {self.name}"

    @property
    def worst(self) -> float:
        return float("inf") if self.falls else float("-inf")
