"""Settings of what a run measures and records: evaluations, samples, metrics, traces."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from trainer.base.config.schema.condition import Evaluates, When
from trainer.base.config.schema.constraint import PER_NODE, Constraint, Steps, StepsOrZero
from trainer.base.config.schema.facts import GPU
from trainer.base.config.schema.tasks import FALLING, Criterion, TaskConfig

PROFILED = Constraint(only_with=(When("profiling.first_step"),))
SENT = Constraint(only_with=(When("metrics.sinks", ("wandb", "mlflow", "trackio")),))
AVERAGED = Constraint(only_with=(When("optimizer.ema_decay"),))
PROMPTED = Constraint(only_with=(When("samples.prompts"),))


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    interval_steps: StepsOrZero = 0
    """Number of steps between evaluations on held-out documents. An evaluation also follows the last step. 0: never evaluate,
    except with tasks that have an interval of their own."""
    max_samples: Annotated[int, Constraint(min=0, max=10**9, unit="samples")] = 0
    """Maximum number of samples per dataset in one evaluation; 0: all samples."""
    datasets: Annotated[Mapping[str, str], PER_NODE] = field(default_factory=dict)
    """Datasets used for evaluation only, in addition to held-out documents: datasets = { wiki = "jsonl:/data/wiki.jsonl" }."""
    tasks: Mapping[str, TaskConfig] = field(default_factory=dict)
    """Tasks that judge the model, such as multiple-choice questions (docs/tasks.md). Each is a table [[evaluation.tasks]] with a
    name, or [evaluation.tasks.NAME]."""
    averaged: Annotated[bool, AVERAGED] = False
    """Whether evaluations, tasks and samples use the averaged weights."""
    keep_best_on: Annotated[str, Constraint(only_with=(When("checkpoint.enabled"),), used_with=Evaluates())] = ""
    """Name of an evaluation dataset, or TASK/METRIC (the name alone: its first metric). The checkpoint with the lowest loss on
    this dataset, or with the best score, is always kept. It is the run's best checkpoint, which commands and settings find as
    RUN_FOLDER@best."""
    early_stopping_patience: Annotated[
        int,
        Constraint(
            min=0,
            max=10**6,
            unit="evaluations",
            only_with=(
                When("evaluation.keep_best_on"),
                Evaluates(),
            ),
        ),
    ] = 0
    """Number of evaluations in a row in which the loss on keep_best_on, or the score, does not improve, after which the run ends,
    with a checkpoint and as after its last step. 0: never."""
    early_stopping_min_delta: Annotated[
        float, Constraint(min=0, max=1000, only_with=(When("evaluation.early_stopping_patience"),))
    ] = 0.0
    """A loss or a score counts as improved only if it is better than the best one so far by more than this."""

    def interval_of(self, task: str) -> int:
        """Return the number of steps between two uses of a task. 0: it is never used."""
        return self.tasks[task].interval_steps or self.interval_steps

    @property
    def evaluates(self) -> bool:
        """Whether the run computes a loss on evaluation data, or a score."""
        return bool(self.interval_steps or any(map(self.interval_of, self.tasks)))

    @property
    def criterion(self) -> Criterion:
        """What keep_best_on names. A name with "/" is that of a task with a metric, because no dataset has one."""
        name, _, metric = self.keep_best_on.partition("/")
        if name not in self.tasks:
            return Criterion(self.keep_best_on, "loss", True)
        metric = metric or self.tasks[name].measured[0]
        return Criterion(name, metric, metric in FALLING)


@dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    prompts: Annotated[tuple[str, ...], Constraint(multiline=True)] = ()
    """Texts that the model continues during training, to show what it has learned: ["def ", "import "]. If the run trains on
    conversations, each is a user's message. Each new token costs one forward over a microbatch. Empty: no samples."""
    interval_steps: Annotated[StepsOrZero, PROMPTED] = 0
    """Number of steps between samples. Samples also follow the last step. 0: only these."""
    max_new_tokens: Annotated[int, PROMPTED, Constraint(min=1, max=10**6, unit="tokens")] = 64
    """Maximum number of tokens of a text. Prompt and text have at most [training] seq_len tokens together."""
    temperature: Annotated[float, PROMPTED, Constraint(min=0, max=1000)] = 0.8
    """Divisor of the logits. 0: always the most likely token."""
    top_k: Annotated[int, PROMPTED, Constraint(min=0, max=10**9)] = 0
    """Number of most likely tokens from which the next one is sampled; 0: all."""
    top_p: Annotated[float, PROMPTED, Constraint(exclusive_min=0, max=1)] = 1.0
    """Total probability of the most likely tokens from which the next one is sampled."""
    seed: Annotated[int, PROMPTED, Constraint(min=0, max=2**63 - 1)] = 0
    """Seed of the sampling, the same for each prompt and each time."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    interval_steps: Steps = 10
    """Number of steps between metrics records. The first and the last step are always recorded."""
    sinks: tuple[Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio"], ...] = (
        "console",
        "jsonl",
        "tensorboard",
    )
    """Where the records go: lines of the console, metrics.jsonl and TensorBoard's files in the run folder, and the services
    Weights & Biases, MLflow and Trackio. All but "console" require "jsonl", because they deliver its records."""
    project: Annotated[str, SENT] = "meshwright"
    """Name of the project in W&B and Trackio, and of the experiment in MLflow."""
    run_name: Annotated[str, SENT] = ""
    """Name of the run in a service. Empty: [run] name."""
    tags: Annotated[tuple[str, ...], SENT] = ()
    """Tags of the run in a service."""
    notes: Annotated[str, SENT] = ""
    """Text that describes the run in a service."""
    entity: Annotated[str, Constraint(only_with=(When("metrics.sinks", ("wandb",)),))] = ""
    """User or team of W&B. Empty: the default of the account."""
    mlflow_tracking_uri: Annotated[str, Constraint(only_with=(When("metrics.sinks", ("mlflow",)),))] = ""
    """Address of the MLflow server, or of a database: sqlite:///mlflow.db. Empty: MLFLOW_TRACKING_URI, or MLflow's default."""


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    first_step: StepsOrZero = 0
    """First step to trace with torch's profiler; 0: trace no step. The traces are written to profiles/ in the run folder."""
    num_steps: Annotated[int, Constraint(min=1, max=100, unit="steps"), PROFILED] = 1
    """Number of consecutive steps in a trace. A trace of a large model has about 10 MB per step."""
    rank: Annotated[Literal["all"] | int, Constraint(min=0, only_with=(When("profiling.first_step"),))] = 0
    """Rank to trace, or "all"."""
    memory_snapshot: Annotated[bool, Constraint(only_with=(When("profiling.first_step"), GPU))] = False
    """Whether to also record all allocations of GPU memory in these steps, with their stacks."""
