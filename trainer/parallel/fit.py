"""Which degrees fit a model and its sequences."""

from typing import Any

from models.spec import ParallelPlan
from trainer.config import ConfigError, ParallelConfig, TrainingConfig
from trainer.parallel.dims import ParallelDims


def require_fit(dims: ParallelDims, plan: ParallelPlan, sizes: Any, config: ParallelConfig, seq_len: int) -> None:
    """Raises ConfigError for degrees that the model cannot be cut by."""
    if dims.pp > 1 and plan.tied:
        raise ConfigError("parallel.pp", "tied embeddings cannot be cut: first and last stage would share a parameter")
    for name in plan.tensor_sizes:
        if getattr(sizes, name) % dims.tp:
            raise ConfigError("parallel.tp", f"must divide {name} {getattr(sizes, name)} of the model")
    rows = -(-sizes.vocab_size // dims.tp)
    if rows * (dims.tp - 1) >= sizes.vocab_size:
        raise ConfigError("parallel.tp", f"leaves a rank without a row of vocab_size {sizes.vocab_size}")
    if dims.cp > 1 and seq_len % (2 * dims.cp):
        raise ConfigError("parallel.cp", f"2 x cp = {2 * dims.cp} must divide seq_len {seq_len}")
    if config.sequence_parallel and seq_len // dims.cp % dims.tp:
        part = f"seq_len {seq_len}" + f" / cp {dims.cp} = {seq_len // dims.cp}" * (dims.cp > 1)
        raise ConfigError("parallel.tp", f"must divide {part}; or set sequence_parallel = false")


def hidden_shape(
    dims: ParallelDims, sizes: Any, config: ParallelConfig, training: TrainingConfig
) -> tuple[int, int, int]:
    """What passes between blocks on each rank: (batch, seq, dim)."""
    cut = dims.cp * (dims.tp if config.sequence_parallel else 1)
    return training.local_batch_size, training.seq_len // cut, sizes.dim
