"""Tensor and sequence parallelism: matrices are sharded over the tp axis, and the residual stream is split along the sequence.

The matrices are sharded as in Shoeybi et al. 2019 (arXiv:1909.08053). Between the matrices, the sequence is split as in
Korthikanti et al. 2022 (arXiv:2205.05198). Parameters are DTensors of the full shape, so a checkpoint does not depend on the
degree of tensor parallelism.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from models.spec import Head, Structure, tensor_styles
from trainer.parallel.saved_tensors import call_with_gathered
from trainer.parallel.stages import TiedTable


def _copying_output(module: nn.Module) -> nn.Module:
    """Make a module return copies: the output of a unit of FSDP is a view, on which an in-place operation would detach FSDP's
    hook."""
    module.register_forward_hook(lambda module, args, output: output.clone())
    return module


class _Embedding(RowwiseParallel):
    """Style of an embedding table sharded along the vocabulary. Each rank looks up its own rows, and the results are summed."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, mesh)
        # It is also an unfinished asynchronous result, which a compiled block cannot take.
        return _copying_output(module)


class _Norm(SequenceParallel):
    """Style of a norm whose weight is replicated. If ranks normalize different values, their gradients are added."""

    def __init__(self, placement: Placement, is_last: bool = False):
        """Create the style.

        Args:
            placement: Of input and output, which are local tensors. Shard(1) for a sequence that is split, Replicate for a full
                sequence, Shard(2) for heads (batch, seq, heads, head_dim).
            is_last: Whether the result is that of the block.
        """
        super().__init__(use_local_output=True)
        self.sequence_sharding, self.is_last = (placement,), is_last

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, mesh)
        return _copying_output(module) if self.is_last else module


class _AllHeadsNorm(ParallelStyle):
    """Style of a norm over the dims of all heads. Each rank has its own heads; the ranks add their sums of squares."""

    def _apply(self, module: nn.RMSNorm, mesh: DeviceMesh) -> nn.Module:
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None))

        def forward(x: Tensor) -> Tensor:
            local = DTensor.from_local(x.flatten(-2).float(), mesh, [Shard(2)], run_check=False)
            mean_square = _replicate(local.square().sum(-1, keepdim=True)) / module.weight.numel()
            return (local * (mean_square + module.eps).rsqrt() * module.weight).to_local().type_as(x).view_as(x)

        module.forward = forward
        return module


@dataclass
class _Gather(ParallelStyle):
    """Style of a module whose input, that of its forward or of another of its methods, is gathered once for all submodules. Its
    own parameters have one value for each head, and each rank computes with those of its heads."""

    placement: Placement
    """Placement of the input, a local tensor."""
    recompute: bool
    """Whether autograd saves only this rank's shard of the input, and backward repeats the gather."""
    method: str = "forward"
    gather: Callable[[DTensor], Tensor] = lambda x: _replicate(x)
    """Function that returns the input of the method."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if list(module.parameters(recurse=False)):
            Local(Shard(0), Shard(0))._apply(module, mesh)
        original = getattr(module, self.method)

        # A function, not a partial, which would give every compiled block its own graph.
        def gathering(x: Tensor, *args: Any) -> Tensor:
            x = DTensor.from_local(x, mesh, [self.placement], run_check=False)
            return call_with_gathered(original, self.gather, x, *args, recompute=self.recompute)

        setattr(module, self.method, gathering)
        return module


def _replicate_partly_used(x: DTensor) -> Tensor:
    """Gather a tensor. Return it as a local tensor, of whose uses each rank computes a part, so that gradients are summed."""
    return _replicate(x).to_local(grad_placements=[Partial()])


@dataclass
class Local(ParallelStyle):
    """Style of a module whose forward computes with this rank's values of the parameters."""

    placement: Placement
    """Placement of the parameters."""
    gradient: Placement
    """Placement of the gradients that backward computes from this rank's values."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, parameter in module.named_parameters(recurse=False):
            sharded = distribute_tensor(parameter, mesh, [self.placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(sharded, parameter.requires_grad))
        module.gradient_placement = self.gradient  # adapters compute with local values too
        original = module.forward

        # See _Gather.
        def forward(*args: Any) -> Any:
            distributed = dict(module._parameters)
            present = {name: p for name, p in distributed.items() if p is not None}
            module._parameters.update({n: p.to_local(grad_placements=[self.gradient]) for n, p in present.items()})
            try:
                return original(*args)
            finally:
                module._parameters.update(distributed)

        module.forward = forward
        return module


@dataclass
class _Output(ParallelStyle):
    """Style of the output projection, which is sharded along the vocabulary. If the caller passes a head, the head receives the
    full sequence and the weight, both as DTensors. Otherwise every rank returns the full logits."""

    placement: Placement
    """Placement of the hidden state, a local tensor."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None))
        original_forward = module.forward

        def forward(hidden: Tensor, head: Head | None = None) -> Tensor:
            hidden = DTensor.from_local(hidden, mesh, [self.placement], run_check=False)
            result = original_forward(_replicate(hidden), head)
            return _replicate(result).to_local() if isinstance(result, DTensor) else result

        module.forward = forward
        return module


def _replicate(x: DTensor) -> DTensor:
    return x.redistribute(placements=[Replicate()])


def styles(sequence_parallel: bool, recompute_all_gather: bool) -> dict[str, ParallelStyle]:
    """Return a dict: name -> parallel style. Structure.tensor and the modules of the blocks (TENSOR) use these names."""
    residual = Shard(1) if sequence_parallel else Replicate()  # placement of a hidden state (batch, seq, dim)
    recompute = recompute_all_gather and sequence_parallel
    return {
        "embedding": _Embedding(input_layouts=Replicate(), output_layouts=residual),
        "norm": _Norm(residual),
        "last_norm": _Norm(residual, is_last=True),
        "head_norm": _Norm(Shard(2)),
        "all_heads_norm": _AllHeadsNorm(),
        "gather": _Gather(residual, recompute),
        "gather_latents": _Gather(residual, recompute, "attend", _replicate_partly_used),
        "token": Local(Replicate(), Partial() if sequence_parallel else Replicate()),
        "column": ColwiseParallel(),
        "local_column": Local(Shard(0), Shard(0)),
        "row": RowwiseParallel(output_layouts=residual),
        "output": _Output(residual),
    }


def shard_shape(shape: Sequence[int], style: str, tp: int) -> tuple[int, int]:
    """Return the rows and columns of a matrix that a rank has under tensor parallelism.

    Args:
        shape: Rows and columns of the matrix.
        style: Key of styles() of its module, or "".
        tp: Degree, which divides what the style splits.
    """
    rows, columns = shape
    return rows // tp if style in ("column", "local_column") else rows, columns // tp if style == "row" else columns


def apply_tensor(
    model: nn.Module,
    structure: Structure,
    mesh: DeviceMesh,
    sequence_parallel: bool,
    recompute_gathers: Collection[str],
) -> None:
    """Shard the modules that the structure names, in place.

    Args:
        mesh: The tp axis.
        sequence_parallel: Whether activations between the sharded modules are sharded along the sequence.
        recompute_gathers: Names of the blocks in which backward repeats the gathers of activations.
    """
    keeping, recomputing = (styles(sequence_parallel, recompute_all_gather=choice) for choice in (False, True))
    with kept_ties(model):
        for name, style in structure.tensor.items():
            module = model.get_submodule(name)
            style = "local_column" if isinstance(module, TiedTable) else style  # sharded like the embedding
            if list(module.parameters()):  # a pipeline stage does not have all modules of the structure
                parallelize_module(module, mesh, keeping[style], src_data_rank=None)
    for block_name, block in model.get_submodule(structure.blocks_path).named_children():
        inside = recomputing if block_name in recompute_gathers else keeping
        for name, style in tensor_styles(block).items():
            parallelize_module(block.get_submodule(name), mesh, inside[style], src_data_rank=None)


@contextmanager
def kept_ties(model: nn.Module) -> Iterator[None]:
    """Context manager whose body may replace the model's parameters. Afterwards, it ties the parameters that were tied before."""
    first_names: dict[nn.Parameter, str] = {}
    names = [(name, first_names.setdefault(p, name)) for name, p in model.named_parameters(remove_duplicate=False)]
    yield
    for name, first in names:
        if name != first:
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner).register_parameter(attribute, model.get_parameter(first))
