"""What a block that is computed again keeps, its input, in host memory between forward and backward."""

import weakref
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.parallel.activation_checkpoint import Forward
from trainer.parallel.recompute import storage_id
from trainer.runtime.host_memory import Event, HostTransfer


class InputOffloader:
    """Of the blocks of a rank. Buffers are made in the first step and used again."""

    def __init__(self, device: torch.device):
        self.transfer = HostTransfer(device)
        self.free_buffers: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self.newest: Callable[[], _OffloadedInput | None] = lambda: None

    def wrap(self, compute: Forward, first: bool) -> Forward:
        """compute: of a block; it keeps its first argument for backward, and of the others what all blocks have in common.
        first: of the blocks of its stage that are kept so."""

        def compute_from_host(hidden: Tensor, *rest) -> Tensor:
            assert not isinstance(hidden, DTensor)  # blocks pass each other plain tensors
            storage = storage_id(hidden)  # pack, which the graph keeps, must not keep hidden

            def pack(tensor: Tensor) -> Tensor | _OffloadedInput:
                if storage_id(tensor) != storage:
                    return tensor
                kept = _OffloadedInput(self, tensor.detach(), (lambda: None) if first else self.newest)
                self.newest = weakref.ref(kept)
                return kept

            with torch.autograd.graph.saved_tensors_hooks(pack, _restored):
                return compute(hidden, *rest)

        return compute_from_host


class _OffloadedInput:
    """An input, from the forward of its block until autograd lets go of it."""

    def __init__(self, inputs: InputOffloader, tensor: Tensor, before: Callable[[], "_OffloadedInput | None"]):
        """before: what is wanted next in backward, the input of the block before."""
        free_buffers = inputs.free_buffers[tensor.shape, tensor.dtype]
        self.buffer = free_buffers.pop() if free_buffers else inputs.transfer.host_like(tensor, tensor.dtype)
        weakref.finalize(self, free_buffers.append, self.buffer)
        self.transfer = inputs.transfer
        self.transfer.copy([self.buffer], [tensor])
        self.before = before
        self.device = tensor.device
        self.coming: tuple[Tensor, Event] | None = None
        self.consumed = False

    def prefetch(self) -> None:
        """Begin to copy it to the device."""
        if self.coming is None:
            target = torch.empty(self.buffer.shape, dtype=self.buffer.dtype, device=self.device)
            self.coming = target, self.transfer.copy([target], [self.buffer])

    def restore(self) -> Tensor:
        self.prefetch()
        assert self.coming is not None
        (tensor, arrived), self.coming, self.consumed = self.coming, None, True
        # A zero-bubble schedule goes through backward twice, the second time in another order.
        if (before := self.before()) is not None and not before.consumed:
            before.prefetch()
        arrived.wait()
        return tensor


def _restored(kept: Tensor | _OffloadedInput) -> Tensor:
    return kept.restore() if isinstance(kept, _OffloadedInput) else kept
