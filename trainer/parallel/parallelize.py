"""The order in which parallelism is applied, stated once."""

from torch import nn

from models.spec import ParallelPlan
from trainer.config import ParallelConfig
from trainer.parallel.dims import Meshes
from trainer.parallel.fsdp import apply_fsdp
from trainer.parallel.tensor import apply_tensor


def parallelize(model: nn.Module, plan: ParallelPlan, meshes: Meshes, config: ParallelConfig, dtype: str) -> None:
    """Cut a model on the meta device as its plan says, in place. dtype: of the computation ("bf16", "fp32").

    FSDP comes last: it shards parameters as everything before it has left them.
    """
    if meshes.model["tp"].size() > 1:
        apply_tensor(model, plan, meshes.model["tp"], config.sequence_parallel, lambda number: True)
    apply_fsdp(model, plan, meshes.model, config, dtype)
