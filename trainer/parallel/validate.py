"""Validation of the numbers of a parallel layout for a model and a sequence length."""

from typing import Any

from models.spec import Structure
from trainer.base.config import ConfigError, ParallelConfig
from trainer.parallel.mesh import ParallelDims


def check_divisibility(
    dims: ParallelDims, structure: Structure, sizes: Any, model: str, config: ParallelConfig, seq_len: int
) -> None:
    """Raise ConfigError if the model cannot be sharded with these parallel degrees. model: name of the model."""
    for name in structure.tp_divisible:
        if (getattr(sizes, name) or 0) % dims.tp:  # None: another size is used
            raise ConfigError("parallel.tp", f"must divide {name} {getattr(sizes, name)} of {model}")
    if structure.has_experts and sizes.n_experts % dims.ep:
        raise ConfigError("parallel.ep", f"must divide n_experts {sizes.n_experts} of {model}")
    rows = -(-sizes.vocab_size // dims.tp)
    if rows * (dims.tp - 1) >= sizes.vocab_size:
        message = f"the last rank would have no vocabulary row, because vocab_size of {model} is {sizes.vocab_size}"
        raise ConfigError("parallel.tp", message)
    if dims.cp > 1 and seq_len % (2 * dims.cp):
        raise ConfigError("parallel.cp", f"2 x cp = {2 * dims.cp} must divide seq_len {seq_len}")
    for kind in structure.kinds.values():
        part = seq_len // (2 * dims.cp)
        if dims.cp > 1 and part < kind.reads_before:
            message = f"seq_len {seq_len} / (2 x cp) = {part} must be at least {kind.reads_before}"
            what = "the number of tokens before a part of a sequence that its convolutions read"
            raise ConfigError("parallel.cp", f"{message}, {what}")
    if (config.sequence_parallel or structure.has_experts) and seq_len // dims.cp % dims.tp:
        local = f"seq_len {seq_len}" + (f" / cp {dims.cp} = {seq_len // dims.cp}" if dims.cp > 1 else "")
        way_out = (
            ": the tp ranks route different tokens" if structure.has_experts else "; or set sequence_parallel = false"
        )
        raise ConfigError("parallel.tp", f"must divide {local}{way_out}")
