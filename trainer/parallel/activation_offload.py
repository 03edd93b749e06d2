"""What a block that is computed again keeps, its input, in host memory between forward and backward."""

import weakref
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.device import HostLink, local
from trainer.parallel.activation_checkpoint import Compute


class HostInputs:
    """Of the blocks of a rank. Buffers are made in the first step and used again."""

    def __init__(self, device: torch.device):
        self.link = HostLink(device)
        self.unused: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self.newest: Callable[[], _Kept | None] = lambda: None

    def keeping(self, compute: Compute, first: bool) -> Compute:
        """compute: of a block; it keeps its first argument for backward, and of the others what all blocks have in common.
        first: whether no block comes before it."""

        def compute_from_host(hidden: Tensor, *rest) -> Tensor:
            storage = local(hidden.detach()).untyped_storage()._cdata

            def pack(tensor: Tensor) -> Tensor | _Kept:
                if local(tensor.detach()).untyped_storage()._cdata != storage:
                    return tensor
                kept = _Kept(self, tensor.detach(), (lambda: None) if first else self.newest)
                self.newest = weakref.ref(kept)
                return kept

            with torch.autograd.graph.saved_tensors_hooks(pack, _restored):
                return compute(hidden, *rest)

        return compute_from_host


class _Kept:
    """An input, from the forward of its block until autograd lets go of it."""

    def __init__(self, inputs: HostInputs, tensor: Tensor, before: Callable[[], "_Kept | None"]):
        """before: what is wanted next in backward, the input of the block before."""
        source = local(tensor)
        unused = inputs.unused[source.shape, source.dtype]
        self.buffer = unused.pop() if unused else inputs.link.host_like(source, source.dtype)
        weakref.finalize(self, unused.append, self.buffer)
        self.link = inputs.link
        self.link.to_host(self.buffer, source)
        self.before = before
        self.device = source.device
        self.spec = tensor._spec if isinstance(tensor, DTensor) else None
        self.coming: tuple[Tensor, Callable[[], None]] | None = None

    def bring(self) -> None:
        """Begin to copy it to the device."""
        if self.coming is None:
            target = torch.empty(self.buffer.shape, dtype=self.buffer.dtype, device=self.device)
            self.coming = target, self.link.to_device(target, self.buffer)

    def restore(self) -> Tensor:
        self.bring()
        assert self.coming is not None
        (tensor, arrived), self.coming = self.coming, None
        if (before := self.before()) is not None:
            before.bring()
        arrived()
        return tensor if self.spec is None else DTensor(tensor, self.spec, requires_grad=False)


def _restored(kept: Tensor | _Kept) -> Tensor:
    return kept.restore() if isinstance(kept, _Kept) else kept
