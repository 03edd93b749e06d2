"""Validation of parallel layouts for a model, a sequence length and the installed version of torch."""

import os
import shutil
import sysconfig
from typing import Any, Literal

import torch

from models.spec import ParallelPlan
from trainer.base.config import ActivationCheckpointConfig, ConfigError, ParallelConfig, TrainingConfig
from trainer.parallel.mesh import ParallelDims
from trainer.parallel.pipeline import SCHEDULES, stages_per_rank


def check_divisibility(
    dims: ParallelDims, plan: ParallelPlan, sizes: Any, model: str, config: ParallelConfig, seq_len: int
) -> None:
    """Raise ConfigError if the model cannot be sharded with these parallel degrees. model: name of the model."""
    if dims.pp > 1 and plan.tied:
        raise ConfigError("parallel.pp", "must be 1 with tied embeddings, because two stages would share them")
    for name in plan.tp_divisible:
        if getattr(sizes, name) % dims.tp:
            raise ConfigError("parallel.tp", f"must divide {name} {getattr(sizes, name)} of {model}")
    if plan.has_experts and sizes.n_experts % dims.ep:
        raise ConfigError("parallel.ep", f"must divide n_experts {sizes.n_experts} of {model}")
    rows = -(-sizes.vocab_size // dims.tp)
    if rows * (dims.tp - 1) >= sizes.vocab_size:
        message = f"the last rank would have no vocabulary row, because vocab_size of {model} is {sizes.vocab_size}"
        raise ConfigError("parallel.tp", message)
    if dims.cp > 1 and seq_len % (2 * dims.cp):
        raise ConfigError("parallel.cp", f"2 x cp = {2 * dims.cp} must divide seq_len {seq_len}")
    if (config.sequence_parallel or plan.has_experts) and seq_len // dims.cp % dims.tp:
        local = f"seq_len {seq_len}" + f" / cp {dims.cp} = {seq_len // dims.cp}" * (dims.cp > 1)
        way_out = ": the tp ranks route different tokens" if plan.has_experts else "; or set sequence_parallel = false"
        raise ConfigError("parallel.tp", f"must divide {local}{way_out}")


def resolve_compilation(choice: Literal["auto"] | bool, parallel: ParallelConfig, on_gpu: bool) -> bool:
    """Return whether blocks are compiled. choice: value of the setting."""
    if choice != "auto":
        return choice
    has_compiler = any(map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))))
    has_headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))  # Triton compiles with them
    return on_gpu and has_compiler and has_headers and can_compile(parallel)


def can_compile(parallel: ParallelConfig) -> bool:
    """Return whether blocks can be compiled in this layout."""
    return parallel.pp == 1 or not SCHEDULES[parallel.pipeline_schedule].splits_backward


def check_supported(
    parallel: ParallelConfig,
    checkpointing: ActivationCheckpointConfig,
    training: TrainingConfig,
    on_gpu: bool,
    compiled: bool,
) -> None:
    """Raise ConfigError for incompatible settings. Settings of features that are off are not checked. compiled: whether blocks
    are compiled."""
    if checkpointing.mode == "budget" and not compiled:
        raise ConfigError("activation_checkpoint.mode", "needs [compile] enabled = true to apply the budget")
    if parallel.tp > 1 and parallel.async_tensor_parallel:
        requirements = {
            "[compile] enabled = true": compiled,
            "sequence_parallel = true": parallel.sequence_parallel,
            "GPUs": on_gpu,
        }
        missing = [name for name, satisfied in requirements.items() if not satisfied]
        if missing:
            raise ConfigError("parallel.async_tensor_parallel", f"needs {' and '.join(missing)}")
    if parallel.pp == 1:
        return
    name, schedule = parallel.pipeline_schedule, SCHEDULES[parallel.pipeline_schedule]
    stages, default = stages_per_rank(parallel), schedule.stages_per_rank
    allows_more = default > 1 and not schedule.v_shape
    if stages < default or (stages > default and not allows_more):
        message = f"{name} needs {default}{' or more' * allows_more} stage{'s' * (default > 1)} per rank"
        raise ConfigError("parallel.pipeline_stages_per_rank", message)
    if schedule.splits_backward and torch.__version__ < (2, 13):
        # 2.11 cannot split a backward that contains Python autograd functions, such as those of DTensor and the loss.
        raise ConfigError("parallel.pipeline_schedule", f"needs torch >= 2.13, but {torch.__version__} is installed")
    if schedule.splits_backward and compiled:
        message = "computes gradients of inputs and weights separately, which torch.compile does not support"
        raise ConfigError("parallel.pipeline_schedule", message)
    if schedule.splits_backward and checkpointing.mode == "selective":
        raise ConfigError(
            "activation_checkpoint.mode", f"cannot be combined with {name}, which traverses the backward graph twice"
        )
    if schedule.splits_backward and parallel.reshard_after_forward not in ("default", "never"):
        # torch looks up the weights after they have been resharded, and silently loses their gradients.
        raise ConfigError("parallel.reshard_after_forward", f"must be 'default' or 'never' when {name} is used")
    if training.reduce_every_microbatch:
        raise ConfigError(
            "training.reduce_every_microbatch",
            "cannot be combined with pp > 1, because a pipeline reduces gradients once per step",
        )
