"""Validation of the numbers of a parallel layout for a model and a sequence length."""

import os
import shutil
import sysconfig
from typing import Any, Literal

from models.spec import Structure
from trainer.base.config import ConfigError, ParallelConfig
from trainer.parallel.mesh import ParallelDims
from trainer.parallel.stages import SCHEDULES, stages_per_rank


def check_divisibility(
    dims: ParallelDims, structure: Structure, sizes: Any, model: str, config: ParallelConfig, seq_len: int
) -> None:
    """Raise ConfigError if the model cannot be sharded with these parallel degrees. model: name of the model."""
    for name in structure.tp_divisible:
        if getattr(sizes, name) % dims.tp:
            raise ConfigError("parallel.tp", f"must divide {name} {getattr(sizes, name)} of {model}")
    if structure.has_experts and sizes.n_experts % dims.ep:
        raise ConfigError("parallel.ep", f"must divide n_experts {sizes.n_experts} of {model}")
    rows = -(-sizes.vocab_size // dims.tp)
    if rows * (dims.tp - 1) >= sizes.vocab_size:
        message = f"the last rank would have no vocabulary row, because vocab_size of {model} is {sizes.vocab_size}"
        raise ConfigError("parallel.tp", message)
    if dims.cp > 1 and seq_len % (2 * dims.cp):
        raise ConfigError("parallel.cp", f"2 x cp = {2 * dims.cp} must divide seq_len {seq_len}")
    if (config.sequence_parallel or structure.has_experts) and seq_len // dims.cp % dims.tp:
        local = f"seq_len {seq_len}" + (f" / cp {dims.cp} = {seq_len // dims.cp}" if dims.cp > 1 else "")
        way_out = (
            ": the tp ranks route different tokens" if structure.has_experts else "; or set sequence_parallel = false"
        )
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
    return not splits_backward(parallel)


def splits_backward(parallel: ParallelConfig) -> bool:
    """Return whether the run is a pipeline that computes gradients of inputs and weights separately."""
    return parallel.pp > 1 and SCHEDULES[parallel.pipeline_schedule].splits_backward


def check_stages_per_rank(parallel: ParallelConfig) -> None:
    """Raise ConfigError if the pipeline schedule cannot run this number of stages per rank."""
    if parallel.pp == 1:
        return
    name, schedule = parallel.pipeline_schedule, SCHEDULES[parallel.pipeline_schedule]
    stages, default = stages_per_rank(parallel), schedule.stages_per_rank
    allows_more = default > 1 and not schedule.v_shape
    if stages < default or (stages > default and not allows_more):
        count = f"{default}{' or more' if allows_more else ''}"
        message = f"{name} needs {count} {'stages' if default > 1 else 'stage'} per rank"
        raise ConfigError("parallel.pipeline_stages_per_rank", message)
