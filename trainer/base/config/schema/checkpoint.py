"""Settings of checkpoints and of the initial weights."""

from dataclasses import dataclass
from typing import Annotated, Literal

from trainer.base.config.schema.condition import Either, When
from trainer.base.config.schema.constraint import Constraint, StepsOrZero

SAVING = Constraint(used_with=When("checkpoint.enabled"))
INITIALIZED = Constraint(only_with=(When("checkpoint.init_from"),))
MIRRORED = When("checkpoint.mirror")
EXPORTED = Either((When("checkpoint.export_huggingface"), When("checkpoint.export_gguf")))


GgufType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
"""Types of the matrices in a file for llama.cpp."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    enabled: bool = True
    """Whether to save checkpoints. false: a stopped run is lost, which suits measurements and trials."""
    interval_steps: Annotated[StepsOrZero, SAVING] = 500
    """Number of steps between checkpoints; 0: save only after the last step. The last step is always saved."""
    async_mode: Annotated[Literal["off", "thread"], SAVING] = "off"
    """Method of writing checkpoints. "off": training waits until a checkpoint is written. "thread": training waits only
    for a copy to host memory, which a thread then writes in the background."""
    keep: Annotated[int, Constraint(min=0, max=10**9, unit="checkpoints", used_with=When("checkpoint.enabled"))] = 0
    """Number of the latest complete checkpoints to keep. Each save deletes older checkpoints. 0: keep all checkpoints."""
    keep_interval_steps: Annotated[StepsOrZero, Constraint(used_with=When("checkpoint.keep"))] = 0
    """Checkpoints whose step is a multiple of this number are kept in addition to the `keep` latest ones. 0: keep no others."""
    on_failure: Annotated[Literal["continue", "stop"], SAVING] = "continue"
    """Action after a failed save (for example, on a full disk). "continue": log a warning and save again at the next interval;
    "stop": end the run. In both cases, the last save of a run must succeed."""
    load_step: Annotated[
        int | Literal["best"], Constraint(min=0, max=10**12, unit="steps", only_with=(When("checkpoint.enabled"),))
    ] = 0
    """Step to roll back to, or "best": that of the best checkpoint. The first start with this value moves the run's newer
    checkpoints to discarded-N/. 0: resume from the latest checkpoint."""
    init_from: str = ""
    """Path of a new run's initial weights: a run folder (its newest checkpoint; with @best at the end of the path, its best one),
    checkpoint or Hugging Face model folder. Empty: random weights."""
    init_averaged: Annotated[bool, INITIALIZED] = False
    """Whether to take the averaged weights of the checkpoint ([optimizer] ema_decay)."""
    resize_embeddings: Annotated[bool, INITIALIZED] = False
    """Whether to accept weights with a smaller vocabulary. New embedding and output rows become the mean of the loaded rows."""
    init_exclude: Annotated[tuple[str, ...], INITIALIZED] = ()
    """Names of parameters that are initialized randomly, not loaded from init_from. Examples: output.weight, layers.7.*."""
    mirror: Annotated[str, Constraint(only_with=(When("checkpoint.enabled"),))] = ""
    """URL of a place in an object store, such as s3://bucket/runs/my-run, to which committed checkpoints and the small files of
    the run folder are uploaded in the background. A run that starts on an empty disk continues from there. Empty: none."""
    mirror_keep: Annotated[int, Constraint(min=0, max=10**9, unit="checkpoints", only_with=(MIRRORED,))] = 0
    """Number of the latest checkpoints to keep in the store, beside the best one and those of keep_interval_steps. 0: all."""
    mirror_pending: Annotated[int, Constraint(min=1, max=10**6, unit="checkpoints", only_with=(MIRRORED,))] = 4
    """Number of checkpoints that may wait for their upload, during which they are not deleted from the disk. If there are more,
    the oldest one is not mirrored."""
    mirror_timeout_s: Annotated[float, Constraint(min=0, max=10**7, unit="seconds", only_with=(MIRRORED,))] = 600.0
    """Time to finish the uploads at the end of a run, or when it is stopped."""
    mirror_lease_s: Annotated[float, Constraint(min=1, max=10**5, unit="seconds", only_with=(MIRRORED,))] = 60.0
    """Time without a sign of life after which the place counts as abandoned. A run that was killed on another machine is
    continued only then, and a second run at the same place is refused."""
    mirror_mib_per_second: Annotated[float, Constraint(min=0, max=10**6, unit="MiB/s", only_with=(MIRRORED,))] = 0.0
    """Limit of the bandwidth of the uploads of each node. 0: none."""
    export_huggingface: Annotated[bool, Constraint(only_with=(When("checkpoint.enabled"),))] = False
    """Whether to also write the model to the run folder in Hugging Face format after the last step; with [lora] rank, only the
    adapter, in the format of the package peft."""
    export_gguf: Annotated[Literal["none", GgufType], Constraint(only_with=(When("checkpoint.enabled"),))] = "none"
    """Type of the matrices in a file for llama.cpp, RUN_FOLDER/model-TYPE.gguf, which is also written after the last step; with
    [lora] rank, the adapter is merged into its base model. "none": no such file. q4_0 keeps the output matrix in q8_0."""
    export_averaged: Annotated[bool, Constraint(only_with=(EXPORTED, When("optimizer.ema_decay")))] = False
    """Whether the exports have the averaged weights."""
    export_checkpoint: Annotated[Literal["auto", "last", "best"], Constraint(only_with=(EXPORTED,))] = "auto"
    """Checkpoint that is exported. "auto": the best one by [evaluation] keep_best_on, if there is one, otherwise
    that of the last step."""
