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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import SavePlan

from trainer.checkpoint import commit
from trainer.checkpoint.commit import SaveFailed, SaveRequest, Tensors
from trainer.checkpoint.storage import local_save_plan, local_tensors
from trainer.config import CheckpointConfig, ConfigError
from trainer.runtime.distributed import broadcast, is_peer_loss
from trainer.runtime.host_memory import HostTransfer, pin
from trainer.system.process import detach_signals, in_child_of

_ALIGNMENT = 64
_GROUP_TIMEOUT = timedelta(hours=4)
"""Timeout of the collectives of the ranks' writers, which wait for the slowest disk."""


class WriterDied(SaveFailed):
    """The writer process has ended, so no later save can succeed."""


@dataclass(frozen=True)
class SaveResult:
    """Result of a finished save, successful or not."""

    path: Path
    blocked_s: float
    """Seconds that training waited."""
    background_s: float
    """Seconds of writing in the background."""
    failure: SaveFailed | None

    @property
    def step(self) -> int:
        return commit.step_of(self.path)


@dataclass(frozen=True)
class PendingSave:
    path: Path
    blocked_s: float
    started: float
    """Time at which the background write started, by perf_counter."""
    committed: "Future[float]"
    """Future with the time of the commit, by perf_counter, or with SaveFailed."""


class Writer:
    """Base of the writers. Every call is collective, and one save runs at a time."""

    def start(self, request: SaveRequest, tensors: Tensors) -> "Future[float]":
        """Start a save. Return a future with the time of the commit, by perf_counter, or with SaveFailed."""
        raise NotImplementedError

    def before_update(self) -> None:
        """Wait until the tensors may change, because they are copied or written. Raises WriterDied."""

    def close(self) -> None:
        """Stop the writer without waiting for a save in flight."""


class AsyncCheckpointer:
    """Checkpointer with at most one save in flight. `poll` or `wait` returns each result, success or failure, once."""

    def __init__(self, config: CheckpointConfig, folder: Path, device: torch.device, tensors: Tensors):
        """tensors: all tensors that will be saved. The host memory for copies of them is allocated here."""
        self.config = config
        self.folder = folder
        self.writer = WRITERS[config.async_mode](device, tensors)
        self.pending: PendingSave | None = None
        self.finished: list[SaveResult] = []
        self.waited_s = 0.0
        """Seconds that training has waited for the save in flight. They count as blocked time of the next save."""

    def save(
        self,
        step: int,
        tensors: Tensors,
        files: dict[str, bytes],
        metadata: dict[str, Any],
        keep_best: int = 0,
        keep_all: bool = False,
    ) -> None:
        """Wait for the previous save, then start to save a step, collectively.

        keep_best: step of a checkpoint that is never deleted. keep_all: whether to delete no checkpoints.
        """
        self._await_pending()
        start = time.perf_counter() - self.waited_s
        self.waited_s = 0.0
        try:
            request = SaveRequest(
                folder=self.folder,
                step=step,
                files=files,
                metadata=metadata,
                keep=0 if keep_all else self.config.keep,
                keep_interval_steps=self.config.keep_interval_steps,
                keep_best=keep_best,
                staging_dir=commit.make_staging_dir(self.folder, step),
            )
            committed = self.writer.start(request, tensors)
        except SaveFailed as failure:
            committed = Future()
            committed.set_exception(failure)
        now = time.perf_counter()
        self.pending = PendingSave(commit.path_of(self.folder, step), now - start, now, committed)

    def before_update(self) -> None:
        self.writer.before_update()

    def poll(self) -> list[SaveResult]:
        """Return the saves that have finished since the last call."""
        if self.pending is not None and self.pending.committed.done():
            self._await_pending()
        results, self.finished = self.finished, []
        return results

    def wait(self) -> list[SaveResult]:
        """Wait for the save in flight, then return the saves that have finished since the last call."""
        self._await_pending()
        return self.poll()

    def _await_pending(self) -> None:
        if self.pending is None:
            return
        save, self.pending = self.pending, None
        start = time.perf_counter()
        try:
            background_s, failure = max(0.0, save.committed.result() - save.started), None
        except SaveFailed as error:
            background_s, failure = 0.0, error
        self.waited_s += time.perf_counter() - start
        self.finished.append(SaveResult(save.path, save.blocked_s, background_s, failure))

    def close(self) -> None:
        self.writer.close()


# ---------------------------------------------------------------- the copy


BufferLayout = dict[str, tuple[int, torch.dtype, tuple[int, ...]]]
"""Tensor name -> offset in the buffer in bytes, dtype and shape of the tensor."""


class Staging:
    """A copy of this rank's tensors in a host buffer that every save reuses."""

    def __init__(self, tensors: Tensors, device: torch.device, allocate: Callable[[int], Tensor]):
        """allocate: returns a buffer of a number of bytes."""
        offsets, end = {}, 0
        for name, tensor in tensors.items():
            offsets[name] = end
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        self.layout: BufferLayout = {
            name: (start, tensors[name].dtype, tuple(tensors[name].shape)) for name, start in offsets.items()
        }
        self.buffer = allocate(max(end, 1))
        pin(self.buffer, device)
        self.contents = views(self.buffer, self.layout)
        self.transfer = HostTransfer(device)
        self.copied = self.transfer.copy([], [])

    def copy_from(self, tensors: Tensors) -> None:
        self.copied = self.transfer.copy([self.contents[name] for name in tensors], list(tensors.values()))


def views(buffer: Tensor, layout: BufferLayout) -> dict[str, Tensor]:
    """Return the tensors in a byte buffer as views of it, by name."""
    tensors = {}
    for name, (start, dtype, shape) in layout.items():
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        tensors[name] = buffer[start : start + num_bytes].view(dtype).view(shape)
    return tensors


# ---------------------------------------------------------------- writers


class SyncWriter(Writer):
    """Writer for async_mode = off: training waits until the checkpoint is written."""

    def __init__(self, device: torch.device, tensors: Tensors):
        self.group = dist.group.WORLD if dist.get_world_size() > 1 else None

    def start(self, request: SaveRequest, tensors: Tensors) -> "Future[float]":
        plan = local_save_plan(tensors, dist.get_rank() == 0)
        commit.save(request, plan, local_tensors(tensors), self.group)
        future: Future[float] = Future()
        future.set_result(time.perf_counter())
        return future


class StagedWriter(Writer):
    """Base of the background writers. It owns the host copy and a thread that writes or waits for the writer process."""

    def __init__(self, device: torch.device, tensors: Tensors, allocate: Callable[[int], Tensor]):
        """allocate: returns a buffer of a number of bytes. Raises ConfigError if memory does not suffice."""
        self.plan = local_save_plan(tensors, dist.get_rank() == 0)
        try:
            self.staging = Staging(local_tensors(tensors), device, allocate)
        except MemoryError as error:
            raise ConfigError("checkpoint.async_mode", f"{error}; 'off' does not need a copy") from None
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def write(self, request: SaveRequest) -> None:
        raise NotImplementedError

    def start(self, request: SaveRequest, tensors: Tensors) -> "Future[float]":
        self.staging.copy_from(local_tensors(tensors))
        return self.executor.submit(self._write_copy, request)

    def _write_copy(self, request: SaveRequest) -> float:
        self.staging.copied.synchronize()
        self.write(request)
        return time.perf_counter()

    def before_update(self) -> None:
        self.staging.copied.wait()

    def close(self) -> None:
        self.executor.shutdown(wait=False)


class ThreadWriter(StagedWriter):
    """Writer in a thread. It uses a separate process group, so that its collectives do not interleave with training's."""

    def __init__(self, device: torch.device, tensors: Tensors):
        super().__init__(device, tensors, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        self.group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT) if dist.get_world_size() > 1 else None

    def write(self, request: SaveRequest) -> None:
        commit.save(request, self.plan, self.staging.contents, self.group)


class ProcessWriter(StagedWriter):
    """Writer in a separate process, which shares the memory of the host copy and does not hold the trainer's GIL.

    torch's own writer process is not used, because it is forked by a thread that ends, because it outlives a killed trainer
    until its commit, and because it is never replaced.
    """

    def __init__(self, device: torch.device, tensors: Tensors):
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "checkpoint.async_mode", f"{sys.platform} does not support memfd; 'thread' works on every platform"
            )
        self.descriptor = os.memfd_create("checkpoint")
        super().__init__(device, tensors, self._allocate)
        self.store, address = _writer_store()
        context = multiprocessing.get_context("spawn")
        self.connection, child_connection = context.Pipe()
        peers = (dist.get_rank(), dist.get_world_size(), address)
        memory = (f"/proc/{os.getpid()}/fd/{self.descriptor}", self.staging.buffer.numel(), self.staging.layout)
        self.process = context.Process(
            target=_serve, args=(child_connection, os.getpid(), peers, memory, self.plan), daemon=True
        )
        self.process.start()
        child_connection.close()

    def _allocate(self, num_bytes: int) -> Tensor:
        os.ftruncate(self.descriptor, num_bytes)
        return _mapped(self.descriptor, num_bytes)

    def write(self, request: SaveRequest) -> None:
        try:
            self.connection.send(request)
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
    """Create a c10d store for the writers on rank 0, independent of training's rendezvous. Return the store (None on the other
    ranks) and its address."""
    if dist.get_world_size() == 1:
        return None, None
    store, port = None, None
    single_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == dist.get_world_size()
    host = "localhost" if single_node else os.environ["MASTER_ADDR"]  # training has reached rank 0 at this address
    if dist.get_rank() == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        port = store.port
    return store, (host, broadcast(port, source=0))


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def _serve(
    connection: Connection,
    parent: int,
    peers: tuple[int, int, tuple[str, int] | None],
    memory: tuple[str, int, BufferLayout],
    plan: SavePlan,
) -> None:
    """Run the writer process. peers: rank, world size, address of the writers' store. memory: file, size, layout of the copy."""
    detach_signals()
    rank, world_size, address = peers
    path, num_bytes, layout = memory
    try:
        contents = views(_mapped(os.open(path, os.O_RDWR), num_bytes), layout)
        group = None
        if world_size > 1:
            store = dist.TCPStore(*address, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_GROUP_TIMEOUT)
            group = dist.group.WORLD
        while in_child_of(parent):
            connection.send(_attempt(connection.recv(), plan, contents, group))
    except (EOFError, OSError, dist.DistNetworkError, dist.DistStoreError):
        pass  # this trainer process or another rank has ended
    except RuntimeError as error:
        if not is_peer_loss(error):
            raise
    os._exit(0)


def _attempt(
    request: SaveRequest, plan: SavePlan, contents: dict[str, Tensor], group: dist.ProcessGroup | None
) -> SaveFailed | None:
    try:
        commit.save(request, plan, contents, group)
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
    "off": SyncWriter,
    "thread": ThreadWriter,
    "process": ProcessWriter,
}
