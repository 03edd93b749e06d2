"""Tensor and sequence parallelism: matrices cut over the ranks of the tp axis, the residual stream along the sequence.

Shoeybi et al. 2019 (arXiv:1909.08053) cut the matrices, Korthikanti et al. 2022 (arXiv:2205.05198) the sequence between
them. Parameters are DTensors of their whole shape, so a checkpoint does not know the degree.
"""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from models.spec import ParallelPlan
from trainer.parallel.recompute import recompute_in_backward

SEQUENCE = Shard(1)
"""Placement of a hidden state (batch, seq, dim) that is cut along the sequence."""


class _Embedding(RowwiseParallel):
    """A table cut along the vocabulary; ranks add up what they find."""

    def __init__(self, residual: Placement):
        super().__init__(input_layouts=Replicate(), output_layouts=residual)

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, mesh)
        # A tensor of its own: the output is still on its way (a compiled block could not take it), and a view (an operation
        # in place would cut FSDP's hook off).
        module.register_forward_hook(lambda module, args, output: output.clone())
        return module


class _ReplicatedNorm(ParallelStyle):
    """The same weights on all ranks, each of which normalises the whole sequence."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def whole(module: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> DTensor:
            return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

        return distribute_module(module, mesh, input_fn=whole)


class _Gather(ParallelStyle):
    """A module without parameters of its own whose input, a DTensor, is gathered once for all that read it inside."""

    def __init__(self, recompute: bool):
        """recompute: keep this rank's part for backward, and gather it again there."""
        self.recompute = recompute

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        compute = module.forward

        def gathered(x: DTensor, *rest: Tensor) -> Tensor:
            return compute(_replicate(x), *rest)

        def gathered_again_in_backward(x: DTensor, *rest: Tensor) -> Tensor:
            whole, part = _replicate(x), x.detach()
            with recompute_in_backward((whole, lambda: _replicate(part).to_local())):
                return compute(whole, *rest)

        module.forward = gathered_again_in_backward if self.recompute else gathered
        return module


class _Output(ParallelStyle):
    """The projection to the vocabulary, cut along it; its input comes from a norm. A head gets the whole sequence and the
    weight as DTensors; without one, the logits come back whole."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None))
        compute = module.forward

        def forward(hidden: DTensor, head: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
            result = compute(_replicate(hidden), head)
            return _replicate(result).to_local() if isinstance(result, DTensor) else result

        module.forward = forward
        return module


def _replicate(x: DTensor) -> DTensor:
    return x.redistribute(placements=[Replicate()])


def styles(sequence_parallel: bool, recompute_all_gather: bool) -> dict[str, ParallelStyle]:
    """The words of a plan -> what they do to a module."""
    residual = SEQUENCE if sequence_parallel else Replicate()
    return {
        "embedding": _Embedding(residual),
        "norm": SequenceParallel() if sequence_parallel else _ReplicatedNorm(),
        "gather": _Gather(recompute_all_gather and sequence_parallel),
        "column": ColwiseParallel(),
        "row": RowwiseParallel(output_layouts=residual),
        "output": _Output(),
    }


def apply_tensor(
    model: nn.Module,
    plan: ParallelPlan,
    mesh: DeviceMesh,
    sequence_parallel: bool,
    recompute_gathers: Callable[[str], bool],
) -> None:
    """Cut the modules that the plan names, in place. mesh: the tp axis.

    recompute_gathers: name of a block -> whether it shall gather the inputs of its column-wise matrices again in backward.
    """
    tied = tied_names(model)
    outside = styles(sequence_parallel, recompute_all_gather=False)
    for name, word in plan.tensor.items():
        module = model.get_submodule(name)
        if any(True for _ in module.parameters()):  # a pipeline stage has not all of them
            parallelize_module(module, mesh, outside[word], src_data_rank=None)
    retie(model, tied)
    for block_name, block in model.get_submodule(plan.blocks).named_children():
        inside = styles(sequence_parallel, recompute_gathers(block_name))
        for name, word in plan.tensor_block.items():
            parallelize_module(block.get_submodule(name), mesh, inside[word], src_data_rank=None)


def retie(model: nn.Module, tied: Mapping[str, str]) -> None:
    """One parameter under both names again, where what was done to the model has parted them. tied: by tied_names, before."""
    for name, first in tied.items():
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner).register_parameter(attribute, model.get_parameter(first))


def tied_names(model: nn.Module) -> dict[str, str]:
    """Second name of a parameter -> the name it is known by."""
    known: dict[nn.Parameter, str] = {}
    names = ((name, known.setdefault(p, name)) for name, p in model.named_parameters(remove_duplicate=False))
    return {name: first for name, first in names if name != first}
