"""Host memory: pages that the process keeps, pinned buffers, and asynchronous copies to and from them."""

import ctypes
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.base.system.units import GIB

_PAGE_BYTES = mmap.PAGESIZE

Event = torch.cuda.Event | torch.cpu.Event


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt."""


_LIBC = ctypes.CDLL(None)


def keep_freed_memory() -> None:
    """Let the process keep freed memory for later allocations. By default, glibc returns the memory of large tensors to the
    kernel, and each step waits until the kernel has provided and cleared the same pages again. Do nothing without glibc."""
    if mallopt := getattr(_LIBC, "mallopt", None):
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def pin(buffer: Tensor, device: torch.device) -> None:
    """Register host memory for asynchronous copies by the device. Raises MemoryError if that fails.

    torch's own pinned memory is not used, because it rounds sizes up to powers of two and so takes up to twice the memory.
    """
    if device.type == "cuda":
        code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
        if code != 0:
            raise MemoryError(f"cannot pin {buffer.nbytes / GIB:.1f} GiB of host memory (CUDA error {code})")
        exclude_from_forks(buffer)


def exclude_from_forks(buffer: Tensor) -> None:
    """Make forked processes inherit no page that lies completely inside the buffer. When the process forks, such as the
    compiler for its workers, Linux copies its pinned pages immediately."""
    if sys.platform == "linux":
        start = -(-buffer.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
        stop = (buffer.data_ptr() + buffer.nbytes) // _PAGE_BYTES * _PAGE_BYTES
        if stop > start:
            _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTFORK)


class HostTransfer:
    """Transfer of tensors between a device and host memory on a separate stream. On a CPU, a copy completes immediately."""

    def __init__(self, device: torch.device):
        self.device = device
        self.module = torch.get_device_module(device)
        self.stream = self.module.Stream()

    def host_like(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a buffer in host memory with the tensor's shape. For a GPU, the buffer is pinned. A buffer of at least one page
        stays pinned until the process ends."""
        num_bytes = tensor.numel() * dtype.itemsize
        if self.device.type == "cpu" or num_bytes < _PAGE_BYTES:
            return torch.empty(tensor.shape, dtype=dtype, pin_memory=self.device.type != "cpu")
        # A page can be registered only once, so the buffer shares no page with others.
        storage = torch.empty(num_bytes + 2 * _PAGE_BYTES, dtype=torch.uint8)
        start = -storage.data_ptr() % _PAGE_BYTES
        pin(storage[start : start + -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES], self.device)
        return storage[start : start + num_bytes].view(dtype).view(tensor.shape)

    @torch.no_grad()
    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Event:
        """Queue a copy of each source to its target. The copies run after all device work queued so far. Device tensors may be
        freed before the copies are complete. Return an event: its `wait()` makes later device work wait for the copies, and its
        `synchronize()` blocks the host until the copies are complete.
        """
        self.stream.wait_stream(self.module.current_stream())
        with self.module.stream(self.stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
                for tensor in (target, source):
                    if tensor.device.type != "cpu":
                        tensor.record_stream(self.stream)
            event = self.module.Event()
            event.record(self.stream)
        return event
