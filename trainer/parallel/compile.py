"""torch.compile, block by block: all blocks share one compiled graph."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

from trainer.config import ActivationCheckpointConfig


def configure(activation_checkpoint: ActivationCheckpointConfig, overlapped: ProcessGroup | None) -> None:
    """Set the compiler options of this run, which are global to the process.

    overlapped: group of ranks whose gathers and reductions overlap with adjacent matrix products.
    """
    functorch, inductor = torch._functorch.config, torch._inductor.config
    by_budget = activation_checkpoint.mode == "budget"
    functorch.activation_memory_budget = activation_checkpoint.memory_budget if by_budget else 1.0
    if hasattr(functorch, "unsafe_treat_script_objects_as_zero_size"):
        # Since torch 2.12 the mesh of a DTensor is an input of the graph, without a size that the budget could count.
        functorch.unsafe_treat_script_objects_as_zero_size = by_budget
    functorch.unsafe_allow_optimization_of_collectives = by_budget and activation_checkpoint.recompute_all_gather
    inductor._micro_pipeline_tp = overlapped is not None
    if overlapped is not None:
        enable_symm_mem_for_group(overlapped.group_name)


def compile_block(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(forward, fullgraph=True)
