"""Which layouts fit a model and its sequences, and which of them torch can run."""

from typing import Any

import torch

from models.spec import ParallelPlan
from trainer.config import ActivationCheckpointConfig, CompileConfig, ConfigError, ParallelConfig, TrainingConfig
from trainer.parallel.mesh import ParallelDims
from trainer.parallel.pipeline import SCHEDULES


def check_divisibility(
    dims: ParallelDims, plan: ParallelPlan, sizes: Any, model: str, config: ParallelConfig, seq_len: int
) -> None:
    """Raises ConfigError for degrees that the model cannot be cut by. model: its name."""
    if dims.pp > 1 and plan.tied:
        raise ConfigError("parallel.pp", "tied embeddings cannot be cut: first and last stage would share a parameter")
    for name in plan.tp_divisible:
        if getattr(sizes, name) % dims.tp:
            raise ConfigError("parallel.tp", f"must divide {name} {getattr(sizes, name)} of {model}")
    rows = -(-sizes.vocab_size // dims.tp)
    if rows * (dims.tp - 1) >= sizes.vocab_size:
        raise ConfigError("parallel.tp", f"leaves a rank without a row of vocab_size {sizes.vocab_size} of {model}")
    if dims.cp > 1 and seq_len % (2 * dims.cp):
        raise ConfigError("parallel.cp", f"2 x cp = {2 * dims.cp} must divide seq_len {seq_len}")
    if config.sequence_parallel and seq_len // dims.cp % dims.tp:
        part = f"seq_len {seq_len}" + f" / cp {dims.cp} = {seq_len // dims.cp}" * (dims.cp > 1)
        raise ConfigError("parallel.tp", f"must divide {part}; or set sequence_parallel = false")


def check_supported(
    parallel: ParallelConfig,
    checkpointing: ActivationCheckpointConfig,
    compilation: CompileConfig,
    training: TrainingConfig,
    on_gpu: bool,
) -> None:
    """Raises ConfigError for settings that do not go together. Details of what is switched off are left alone."""
    if checkpointing.mode == "budget" and not compilation.enabled:
        raise ConfigError("activation_checkpoint.mode", "needs [compile] enabled = true: the compiler chooses")
    if parallel.tp > 1 and parallel.async_tensor_parallel:
        needed = {
            "[compile] enabled = true": compilation.enabled,
            "sequence_parallel = true": parallel.sequence_parallel,
            "GPUs": on_gpu,
        }
        missing = [name for name, there in needed.items() if not there]
        if missing:
            raise ConfigError("parallel.async_tensor_parallel", f"needs {' and '.join(missing)}")
    if parallel.pp == 1:
        return
    name, schedule = parallel.pipeline_schedule, SCHEDULES[parallel.pipeline_schedule]
    given = parallel.pipeline_stages_per_rank
    if given and (
        given < schedule.stages_per_rank or (given > schedule.stages_per_rank and not schedule.allows_more_stages)
    ):
        rule = f"{name} takes {schedule.stages_per_rank}" + " or more" * schedule.allows_more_stages
        raise ConfigError("parallel.pipeline_stages_per_rank", rule)
    if schedule.splits_backward and torch.__version__ < (2, 13):
        # 2.11 cannot take a backward apart that has functions written in Python in it, as ours and DTensor's are.
        raise ConfigError("parallel.pipeline_schedule", f"needs torch 2.13 or newer, this is {torch.__version__}")
    if schedule.splits_backward and compilation.enabled:
        rule = "computes gradients of inputs and weights apart, which torch.compile cannot"
        raise ConfigError("parallel.pipeline_schedule", rule)
    if schedule.splits_backward and checkpointing.mode == "selective":
        raise ConfigError("activation_checkpoint.mode", f"not with {name}, which goes through backward twice")
    if schedule.splits_backward and parallel.reshard_after_forward not in ("default", "never"):
        # torch looks the weights up when they are sharded again, and loses their gradients without a word.
        raise ConfigError("parallel.reshard_after_forward", f"only default or never with {name}")
    if training.reduce_every_microbatch:
        raise ConfigError("training.reduce_every_microbatch", "not with pp > 1: a pipeline reduces once a step")


def hidden_shape(
    dims: ParallelDims, sizes: Any, config: ParallelConfig, training: TrainingConfig
) -> tuple[int, int, int]:
    """What passes between blocks on each rank: (batch, seq, dim)."""
    cut = dims.cp * (dims.tp if config.sequence_parallel else 1)
    return training.local_batch_size, training.seq_len // cut, sizes.dim
