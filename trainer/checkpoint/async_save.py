"""Asynchronous saving: the state is copied to host memory and written in the background by a thread or a process."""

import mmap
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import SavePlan

from trainer.base.config import ConfigError
from trainer.base.system.children import children_ignore_signals
from trainer.base.system.process import detach_signals
from trainer.checkpoint import commit
from trainer.checkpoint.commit import SaveFailed, SaveRequest, Tensors
from trainer.checkpoint.storage import local_save_plan
from trainer.runtime.device import local_world_size
from trainer.runtime.distributed import is_peer_loss, run_on_rank_0
from trainer.runtime.dtensor import to_local
from trainer.runtime.host_memory import HostTransfer, pin

_ALIGNMENT = 64
_GROUP_TIMEOUT = timedelta(hours=4)
"""Timeout of the collectives among the writers of all ranks. It is long, because a rank may have a slow disk."""


class WriterDied(SaveFailed):
    """The writer process has ended, so no later save can succeed."""


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
        """Wait until the tensors are copied or written, so that the optimizer may change them. Raises WriterDied."""

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


@dataclass(frozen=True)
class HostCopy:
    """Host memory for a copy of this rank's tensors."""

    plan: SavePlan
    contents: dict[str, Tensor]
    """Name -> view of the memory."""
    transfer: HostTransfer

    @classmethod
    def in_buffer(cls, buffer: Tensor, device: torch.device, tensors: Tensors) -> "HostCopy":
        """Pin the buffer. Raises ConfigError if it cannot be pinned."""
        plan = local_save_plan(tensors)
        try:
            pin(buffer, device)
        except MemoryError as error:
            raise ConfigError("checkpoint.async_mode", f"{error}; use 'off', which needs no copy") from None
        return cls(plan, _views(buffer, plan), HostTransfer(device))


def _num_bytes(tensors: Tensors) -> int:
    """Return the size of the buffer of a HostCopy."""
    return sum(to_local(t).nbytes + _ALIGNMENT for t in tensors.values())


class StagedWriter(Writer):
    """Base class of the background writers. Each save copies this rank's tensors into a host buffer. A thread then writes the
    copy, or waits while the writer process writes it."""

    def __init__(self, copy: HostCopy):
        super().__init__()
        self.plan, self.contents, self.transfer = copy.plan, copy.contents, copy.transfer
        self.copied = self.transfer.copy([], [])
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def write(self, request: SaveRequest, staging_dir: Path) -> None:
        raise NotImplementedError

    def start(self, request: SaveRequest, staging_dir: Path, tensors: Tensors) -> "Future[float]":
        local = [to_local(tensors[name]) for name in self.contents]
        self.copied = self.transfer.copy(list(self.contents.values()), local)
        return self.executor.submit(self._write_copy, request, staging_dir, time.perf_counter())

    def _write_copy(self, request: SaveRequest, staging_dir: Path, start: float) -> float:
        self.copied.synchronize()
        self.write(request, staging_dir)
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


class ThreadWriter(StagedWriter):
    """Writer in a thread with its own process group, so that its collectives do not interleave with those of training."""

    def __init__(self, copy: HostCopy, group: dist.ProcessGroup | None):
        super().__init__(copy)
        self.group = group

    @classmethod
    def open(cls, device: torch.device, tensors: Tensors) -> "ThreadWriter":
        buffer = torch.empty(_num_bytes(tensors), dtype=torch.uint8)
        return cls(HostCopy.in_buffer(buffer, device, tensors), _writer_group())

    def write(self, request: SaveRequest, staging_dir: Path) -> None:
        commit.save(request, staging_dir, self.plan, self.contents, self.group)


class ProcessWriter(StagedWriter):
    """Writer in a separate process, which reads the host copy from shared memory and does not hold the trainer's GIL.

    torch's own writer process is not used, for three reasons. A short-lived thread starts it, so `die_with_parent` would kill it
    when this thread ends. The process completes a save even after the trainer is killed. A process that died is not replaced.
    """

    def __init__(self, copy: HostCopy, process: BaseProcess, connection: Connection, store: dist.Store | None):
        """store: the writers' store on rank 0, which exists as long as this writer."""
        super().__init__(copy)
        self.process, self.connection, self.store = process, connection, store

    @classmethod
    def open(cls, device: torch.device, tensors: Tensors) -> "ProcessWriter":
        """Start the process."""
        if not hasattr(os, "memfd_create"):
            message = f"{sys.platform} does not support memfd; use 'thread', which works on every platform"
            raise ConfigError("checkpoint.async_mode", message)
        descriptor = os.memfd_create("checkpoint")
        os.ftruncate(descriptor, _num_bytes(tensors))
        copy = HostCopy.in_buffer(_mapped(descriptor), device, tensors)
        store, address = _writer_store()
        context = multiprocessing.get_context("spawn")
        connection, child_connection = context.Pipe()
        peers = (dist.get_rank(), dist.get_world_size(), address)
        memory = f"/proc/{os.getpid()}/fd/{descriptor}"
        arguments = child_connection, os.getpid(), peers, memory, copy.plan
        process = context.Process(target=_serve, args=arguments, daemon=True)
        with children_ignore_signals():
            process.start()
        child_connection.close()
        return cls(copy, process, connection, store)

    def write(self, request: SaveRequest, staging_dir: Path) -> None:
        try:
            self.connection.send((request, staging_dir))
            failure = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(1)
            raise self._lost(f"step {request.step} could not be saved") from None
        if failure is not None:
            raise failure

    def _lost(self, consequence: str) -> WriterDied:
        code = self.process.exitcode
        end = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        return WriterDied(f"{consequence}: the checkpoint writer process {end}")

    def before_update(self) -> None:
        super().before_update()
        if self.process.exitcode is not None:
            raise self._lost("no further step can be saved")

    def close(self) -> None:
        super().close()
        self.process.kill()


def _writer_store() -> tuple[dist.Store | None, tuple[str, int] | None]:
    """Create a c10d store on rank 0 for the writers of all ranks. It is independent of training's rendezvous. Return the store
    and its address. The store is None on all other ranks. Both are None if the world size is 1."""
    if dist.get_world_size() == 1:
        return None, None
    single_node = local_world_size() == dist.get_world_size()
    host = "localhost" if single_node else os.environ["MASTER_ADDR"]  # training has reached rank 0 at this address
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    return store, (host, run_on_rank_0(lambda: store.port))


def _mapped(descriptor: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)


def _serve(connection: Connection, parent: int, peers: tuple, memory: str, plan: SavePlan) -> None:
    """Run the writer process.

    Args:
        connection: To the trainer's process.
        parent: Process id of the trainer.
        peers: Rank, world size, and address of the writers' store.
        memory: Path of the host copy's memfd.
    """
    detach_signals()
    rank, world_size, address = peers
    try:
        contents = _views(_mapped(os.open(memory, os.O_RDWR)), plan)
        group = None
        if world_size > 1:
            store = dist.TCPStore(*address, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_GROUP_TIMEOUT)
            group = dist.group.WORLD
        while os.getppid() == parent:
            request, staging_dir = connection.recv()
            connection.send(_attempt(request, staging_dir, plan, contents, group))
    except (EOFError, OSError, dist.DistNetworkError, dist.DistStoreError):
        pass  # this trainer process or another rank has ended
    except RuntimeError as error:
        if not is_peer_loss(error):
            raise
    os._exit(0)


def _attempt(
    request: SaveRequest, staging_dir: Path, plan: SavePlan, contents: Tensors, group: dist.ProcessGroup | None
) -> SaveFailed | None:
    try:
        commit.save(request, staging_dir, plan, contents, group)
    except SaveFailed as failure:
        return SaveFailed(str(failure))  # the cause is dropped: the trainer may be unable to unpickle it
    except RuntimeError as error:
        if not is_peer_loss(error):
            raise
        return WriterDied(
            f"step {request.step} could not be saved: the checkpoint writer process of another rank has ended"
        )
    return None


WRITERS: dict[str, Callable[[torch.device, Tensors], Writer]] = {
    "off": SyncWriter.open,
    "thread": ThreadWriter.open,
    "process": ProcessWriter.open,
}
"""Value of checkpoint.async_mode -> function (device, tensors) that starts a writer, collectively. tensors: all tensors that will
be saved. Background writers allocate host memory for a copy of them, and raise ConfigError if that is impossible."""
