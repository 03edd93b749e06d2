"""Pinned buffers in host memory, and asynchronous copies to and from them."""

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.system.units import GIB

_PAGE = 4096


def pin(buffer: Tensor, device: torch.device) -> None:
    """Let the device copy into host memory by itself. Not torch's own pinned memory: its sizes are powers of two, up to twice
    what is needed. Raises MemoryError."""
    if device.type == "cuda":
        code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
        if code != 0:
            raise MemoryError(f"{buffer.nbytes / GIB:.1f} GiB of host memory cannot be pinned (CUDA error {code})")


def pinned(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A buffer that the device can reach by itself, in pages of its own: a page is pinned once."""
    size = shape.numel() * dtype.itemsize
    if size < _PAGE:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    whole = torch.empty(size + 2 * _PAGE, dtype=torch.uint8)
    start = -whole.data_ptr() % _PAGE
    pin(whole[start : start + -(-size // _PAGE) * _PAGE], device)
    return whole[start : start + size].view(dtype).view(shape)


class HostTransfer:
    """Copies between a device and buffers in host memory, in a stream of their own."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def host_like(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A buffer, for as long as the process lives."""
        if self.stream is None:
            return torch.empty(tensor.shape, dtype=dtype)
        return pinned(tensor.shape, dtype, self.device)

    def to_host(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Begin to copy; what is returned waits for it. The source may be let go of at once."""
        if self.stream is None:
            target.copy_(source)
            return lambda: None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            source.record_stream(self.stream)
            done = torch.cuda.Event()
            done.record(self.stream)
        return done.synchronize

    def to_device(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Begin to copy, when the device has done what it was told so far. What it is told after a call of what is returned
        comes after the copy."""
        if self.stream is None:
            target.copy_(source)
            return lambda: None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            target.record_stream(self.stream)  # it may be let go of without having been waited for
            done = torch.cuda.Event()
            done.record(self.stream)
        return lambda: torch.cuda.current_stream().wait_event(done)


class StagingCopy:
    """Copies from the device to host memory, beside what the device works on."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.done: torch.cuda.Event | None = None

    @torch.no_grad()
    def start(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """On a CPU the copy is made when this returns."""
        sources = [source.detach() for source in sources]
        if self.stream is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            self.done = torch.cuda.Event()
            self.done.record(self.stream)

    def before_update(self) -> None:
        """What the device is told after this comes after the copy."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)

    def wait(self) -> None:
        """Until the copy is made."""
        if self.done is not None:
            self.done.synchronize()
