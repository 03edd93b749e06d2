"""Training without FSDP, on a rank that shares its parameters with no other data-parallel rank."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.spec import Structure
from trainer.parallel.activation_checkpoint import Forward


def cast_parameters(model: nn.Module, structure: Structure, dtype: torch.dtype) -> None:
    """Make the forward of each block, and of each module in structure.fsdp_units, compute with parameters of this dtype, in
    place. Parts of quantized weights stay as they are.

    Each forward casts the module's parameters. The results replace the parameters in the module until its next forward, because
    recomputation in backward uses them too. Gradients flow to the original parameters, in the original dtype. The two largest
    tables are usually not copied: the head casts the output weight, and an embedding that only selects rows casts its result."""
    if all(p.dtype == dtype for p in model.parameters() if p.is_floating_point()):
        return
    outside_blocks = [model.get_submodule(name) for names in structure.fsdp_units for name in names]
    modules = [*model.get_submodule(structure.blocks_path).children(), *outside_blocks]
    assert {p for m in modules for p in m.parameters()} == set(model.parameters()), "structure.fsdp_units is incomplete"
    output = model.get_submodule(structure.post_blocks[-1])
    for module in modules:
        # Subclasses also compute with the rows, and tensor parallelism communicates them.
        if type(module) is nn.Embedding and not isinstance(module.weight, DTensor):
            module.register_forward_hook(lambda module, args, result: result.to(dtype))
        elif module is not output:
            module.forward = _cast_forward(module, dtype)


def _cast_forward(module: nn.Module, dtype: torch.dtype) -> Forward:
    forward = module.forward
    originals: list[tuple[dict, str, nn.Parameter]] = []

    def casting_forward(*args: Any, **kwargs: Any) -> Tensor:
        if not originals:  # not earlier, because the parameters are allocated after this function is created
            originals.extend(
                (m._parameters, name, p)
                for m in module.modules()
                for name, p in m._parameters.items()
                if p is not None and p.is_floating_point()
            )
        for parameters, name, p in originals:
            parameters[name] = p.to(dtype)
        return forward(*args, **kwargs)

    return casting_forward


class GradientAccumulator:
    """Accumulator of the gradients of several microbatches in fp32, as FSDP does it by default. Autograd alone would add them in
    the parameter's dtype, and would run the optimizer's hooks after every microbatch."""

    def __init__(self, parameters: Iterable[Tensor], frees_gradients: bool):
        """frees_gradients: whether hooks of the optimizer use and free each gradient during backward. Create the accumulator
        before the optimizer, whose hooks must run after those of the accumulator."""
        self.is_last = True
        self.sums: dict[Tensor, Tensor] = {}
        """Parameter -> sum of its gradients of the microbatches so far. A sum of several gradients is fp32."""
        for p in parameters:
            if p.requires_grad and (frees_gradients or p.dtype != torch.float32 or isinstance(p, DTensor)):
                p.register_post_accumulate_grad_hook(self._accumulate)

    def start_microbatch(self, is_last: bool) -> None:
        """Prepare the backward of a microbatch. is_last: whether it is the last microbatch of the step."""
        self.is_last = is_last

    @torch.no_grad()
    def _accumulate(self, p: Tensor) -> None:
        gradient, p.grad = p.grad, None
        if p in self.sums:
            total = self.sums.pop(p)
            # The sum of two gradients needs no fp32 copy: addition rounds only its result.
            gradient = (total if self.is_last else total.float()).add_(gradient)
        if not self.is_last:
            self.sums[p] = gradient
            return
        if isinstance(p, DTensor):  # the gradient of a replicated norm is a sum over the ranks of the tp axis
            gradient = gradient.redistribute(placements=p.placements)
        p.grad = gradient.to(p.dtype)
