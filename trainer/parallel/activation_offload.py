"""Offloading of block inputs to host memory. Full activation checkpointing saves these inputs for backward."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.parallel.activation_checkpoint import Forward
from trainer.parallel.saved_tensors import Restore, replace_saved
from trainer.runtime.host_memory import Event, HostTransfer


class InputOffloader:
    """Offloader of the block inputs of one rank. The first step allocates the host buffers, and later steps reuse them."""

    def __init__(self, device: torch.device):
        self.transfer = HostTransfer(device)
        self.free_buffers: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self.newest: Callable[[], _OffloadedInput | None] = lambda: None

    def apply(self, blocks: Sequence[nn.Module]) -> None:
        """Offload the inputs of these blocks of one stage, in place. blocks: in the order of forward."""
        for i, block in enumerate(blocks):
            block.forward = self.wrap(block.forward, is_first=i == 0)

    def wrap(self, forward: Forward, is_first: bool) -> Forward:
        """Return a forward that offloads the block's first argument. The other arguments are not offloaded, because all blocks
        share them. is_first: whether the block is the first offloaded block of its stage."""

        def offloading_forward(hidden: Tensor, *args) -> Tensor:
            assert not isinstance(hidden, DTensor)  # blocks pass plain tensors to each other

            def offload(saved: Tensor) -> Restore:
                offloaded = _OffloadedInput(self, saved.detach(), (lambda: None) if is_first else self.newest)
                self.newest = weakref.ref(offloaded)
                return offloaded.restore

            with replace_saved(hidden, offload):
                return forward(hidden, *args)

        return offloading_forward


class _OffloadedInput:
    """An offloaded block input. It exists from the block's forward until autograd releases it."""

    def __init__(self, offloader: InputOffloader, tensor: Tensor, previous: Callable[[], "_OffloadedInput | None"]):
        """previous: function that returns the offloaded input of the previous block. Backward needs that input next."""
        free = offloader.free_buffers[tensor.shape, tensor.dtype]
        self.buffer = free.pop() if free else offloader.transfer.host_like(tensor, tensor.dtype)
        weakref.finalize(self, free.append, self.buffer)
        self.transfer = offloader.transfer
        self.transfer.copy([self.buffer], [tensor])
        self.previous = previous
        self.prefetched: tuple[Tensor, Event] | None = None
        self.consumed = False

    def prefetch(self) -> tuple[Tensor, Event]:
        """Start the copy to the device, unless it has already started. Return the device tensor and the completion event."""
        if self.prefetched is None:
            target = torch.empty(self.buffer.shape, dtype=self.buffer.dtype, device=self.transfer.device)
            self.prefetched = target, self.transfer.copy([target], [self.buffer])
        return self.prefetched

    def restore(self) -> Tensor:
        tensor, event = self.prefetch()
        self.prefetched, self.consumed = None, True
        # A zero-bubble schedule traverses backward twice, the second time in another order.
        if (previous := self.previous()) is not None and not previous.consumed:
            previous.prefetch()
        event.wait()
        return tensor
