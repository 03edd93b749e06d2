"""Asynchronous saving: the state is copied to host memory, and a thread writes the copy in the background."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import SavePlan

from trainer.base.config import ConfigError
from trainer.checkpoint import commit
from trainer.checkpoint.commit import SaveFailed, SaveRequest, Tensors
from trainer.checkpoint.tensor_files import local_save_plan
from trainer.runtime.dtensor import to_local
from trainer.runtime.host_memory import HostTransfer, pin

_ALIGNMENT = 64
_GROUP_TIMEOUT = timedelta(hours=4)
"""Timeout of the collectives among the writers of all ranks. It is long, because a rank may have a slow disk."""


@dataclass(frozen=True)
class SaveResult:
    """Result of a finished save, successful or not."""

    step: int
    path: Path
    blocked_s: float
    """Seconds that training waited for the save."""
    background_s: float
    """Seconds of writing in the background."""
    failure: SaveFailed | None


class Writer:
    """Base class of the writers. At most one save is in flight, because callers call `wait` before `save`."""

    def __init__(self) -> None:
        self.pending: tuple[SaveRequest, float, Future[float]] | None = None
        """The save in flight, or None: its request, the seconds that training waited, and the future that `start` returned."""
        self.waited_s = 0.0
        """Seconds that training has waited in `wait`. They are added to blocked_s of the next save."""

    def start(self, request: SaveRequest, staging_dir: Path, tensors: Tensors) -> "Future[float]":
        """Start a save, collectively. Return a future that resolves to the duration of the background write in
        seconds, or raises SaveFailed."""
        raise NotImplementedError

    def before_update(self) -> None:
        """Wait until the tensors are copied or written, so that the optimizer may change them."""

    def close(self) -> None:
        """Stop the writer without waiting for a save in flight."""

    def save(self, request: SaveRequest, tensors: Tensors) -> None:
        """Start a save, collectively. A failure is not raised, but returned by `poll` or `wait`."""
        assert self.pending is None
        start = time.perf_counter() - self.waited_s
        self.waited_s = 0.0
        try:
            written = self.start(request, commit.make_staging_dir(request.final), tensors)
        except SaveFailed as failure:
            written = Future()
            written.set_exception(failure)
        self.pending = request, time.perf_counter() - start, written

    def poll(self) -> list[SaveResult]:
        """Return the result of the save in flight if it has finished, otherwise an empty list."""
        return self.wait() if self.pending and self.pending[2].done() else []

    def wait(self) -> list[SaveResult]:
        """Wait for the save in flight and return its result, or an empty list if no save is in flight."""
        if self.pending is None:
            return []
        (request, blocked_s, written), self.pending = self.pending, None
        start = time.perf_counter()
        try:
            result = SaveResult(request.step, request.final, blocked_s, written.result(), None)
        except SaveFailed as failure:
            result = SaveResult(request.step, request.final, blocked_s, 0.0, failure)
        self.waited_s = time.perf_counter() - start
        return [result]


class SyncWriter(Writer):
    """Writer for the mode "off". Training waits until the checkpoint is written."""

    def __init__(self, group: dist.ProcessGroup | None):
        super().__init__()
        self.group = group

    @classmethod
    def open(cls, device: torch.device, tensors: Tensors) -> "SyncWriter":
        return cls(_writer_group())

    def start(self, request: SaveRequest, staging_dir: Path, tensors: Tensors) -> "Future[float]":
        contents = {name: to_local(tensor) for name, tensor in tensors.items()}
        commit.save(request, staging_dir, local_save_plan(tensors), contents, self.group)
        written: Future[float] = Future()
        written.set_result(0.0)
        return written


def _writer_group() -> dist.ProcessGroup | None:
    """Return a process group of all ranks for saves, or None if there is only one rank."""
    return dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT) if dist.get_world_size() > 1 else None


class ThreadWriter(Writer):
    """Writer that copies this rank's tensors into a host buffer, which a thread writes. The thread has its own process group, so
    that its collectives do not interleave with those of training."""

    def __init__(self, plan: SavePlan, buffer: Tensor, device: torch.device, group: dist.ProcessGroup | None):
        """buffer: bytes of host memory for the tensors of the plan."""
        super().__init__()
        self.plan, self.group = plan, group
        self.contents = _views(buffer, plan)
        self.transfer = HostTransfer(device)
        self.copied = self.transfer.copy([], [])
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    @classmethod
    def open(cls, device: torch.device, tensors: Tensors) -> "ThreadWriter":
        buffer = torch.empty(sum(to_local(t).nbytes + _ALIGNMENT for t in tensors.values()), dtype=torch.uint8)
        try:
            pin(buffer, device)
        except MemoryError as error:
            raise ConfigError("checkpoint.async_mode", f"{error}; use 'off', which needs no copy") from None
        return cls(local_save_plan(tensors), buffer, device, _writer_group())

    def start(self, request: SaveRequest, staging_dir: Path, tensors: Tensors) -> "Future[float]":
        local = [to_local(tensors[name]) for name in self.contents]
        self.copied = self.transfer.copy(list(self.contents.values()), local)
        return self.executor.submit(self._write, request, staging_dir, time.perf_counter())

    def _write(self, request: SaveRequest, staging_dir: Path, start: float) -> float:
        self.copied.synchronize()
        commit.save(request, staging_dir, self.plan, self.contents, self.group)
        return time.perf_counter() - start

    def before_update(self) -> None:
        self.copied.wait()

    def close(self) -> None:
        self.executor.shutdown(wait=False)


def _views(buffer: Tensor, plan: SavePlan) -> dict[str, Tensor]:
    """Return name -> view of a byte buffer, for each tensor that the plan writes."""
    views, start = {}, 0
    for item in plan.items:
        shape, dtype = item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype
        stop = start + shape.numel() * dtype.itemsize
        views[item.index.fqn] = buffer[start:stop].view(dtype).view(shape)
        start = -(-stop // _ALIGNMENT) * _ALIGNMENT
    return views


WRITERS: dict[str, Callable[[torch.device, Tensors], Writer]] = {"off": SyncWriter.open, "thread": ThreadWriter.open}
"""Value of checkpoint.async_mode -> function (device, tensors) that starts a writer, collectively. tensors: all tensors that will
be saved. The thread's writer allocates host memory for a copy of them, and raises ConfigError if that is impossible."""
