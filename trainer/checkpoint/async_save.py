"""Saving while training goes on: a copy of the state is taken, and written in a thread or a process of its own."""

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
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import SavePlan

from trainer.checkpoint import commit
from trainer.checkpoint.commit import SaveFailed, SaveRequest, Tensors
from trainer.checkpoint.storage import local_save_plan, local_tensors
from trainer.config import CheckpointConfig, ConfigError
from trainer.runtime import host_memory
from trainer.runtime.distributed import broadcast, is_peer_loss
from trainer.system.process import detach_signals, in_child_of

_ALIGNMENT = 64
_GROUP_TIMEOUT = timedelta(hours=4)
"""Of the ranks' writers among each other: the slowest disk decides."""


class WriterDied(SaveFailed):
    """The process that writes ended: no later save would succeed either."""


@dataclass(frozen=True)
class SaveResult:
    """A save that has come to its end, good or bad."""

    path: Path
    blocked_s: float
    """Training stood still."""
    background_s: float
    """Writing went on beside training."""
    failure: SaveFailed | None

    @property
    def step(self) -> int:
        return commit.step_of(self.path)


@dataclass(frozen=True)
class PendingSave:
    path: Path
    blocked_s: float
    since: float
    end: "Future[float]"
    """When it was committed (perf_counter); or the SaveFailed that ended it."""


class Writer(Protocol):
    """How a checkpoint gets from memory to disk; each call is made on all ranks, one at a time."""

    def start(self, request: SaveRequest, tensors: Tensors) -> "Future[float]":
        """Begins to save; the result is the time (perf_counter) when it was committed, or SaveFailed."""

    def before_update(self) -> None:
        """Returns when the tensors may change. Raises WriterDied."""

    def close(self) -> None: ...


class AsyncCheckpointer:
    """At most one save at a time. What becomes of each is told once, by `ended` or `wait`, and never swallowed."""

    def __init__(self, config: CheckpointConfig, folder: Path, device: torch.device, tensors: Tensors):
        """tensors: everything that will be saved; their layout counts, and the memory of their copy is taken now."""
        self.config = config
        self.folder = folder
        self.writer = WRITERS[config.async_mode](device, tensors)
        self.pending: PendingSave | None = None
        self.finished: list[SaveResult] = []
        self.waited_s = 0.0
        """For the save before, since the last one began; training stood still for it too."""

    def save(
        self,
        step: int,
        tensors: Tensors,
        files: dict[str, bytes],
        metadata: dict[str, Any],
        keep_best: int = 0,
        keep_all: bool = False,
    ) -> None:
        """Begin to save the state of a step, on all ranks together, when the save before has ended. keep_best: a step whose
        checkpoint stays, whatever the configuration keeps; keep_all: all of them do."""
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
            end = self.writer.start(request, tensors)
        except SaveFailed as failure:
            end = Future()
            end.set_exception(failure)
        now = time.perf_counter()
        self.pending = PendingSave(commit.path_of(self.folder, step), now - start, now, end)

    def before_update(self) -> None:
        self.writer.before_update()

    def poll(self) -> list[SaveResult]:
        """The saves that have ended since the last call."""
        if self.pending is not None and self.pending.end.done():
            self._await_pending()
        told, self.finished = self.finished, []
        return told

    def wait(self) -> list[SaveResult]:
        """The same, when nothing is being written any more."""
        self._await_pending()
        return self.poll()

    def _await_pending(self) -> None:
        if self.pending is None:
            return
        run, self.pending = self.pending, None
        start = time.perf_counter()
        try:
            background_s, failure = max(0.0, run.end.result() - run.since), None
        except SaveFailed as error:
            background_s, failure = 0.0, error
        self.waited_s += time.perf_counter() - start
        self.finished.append(SaveResult(run.path, run.blocked_s, background_s, failure))

    def close(self) -> None:
        self.writer.close()


# ---------------------------------------------------------------- the copy


BufferLayout = dict[str, tuple[int, torch.dtype, tuple[int, ...]]]
"""Name -> offset in bytes, dtype, shape."""


class Staging:
    """A copy in host memory of what this rank holds, in buffers that every save uses again."""

    def __init__(self, tensors: Tensors, device: torch.device, allocate: Callable[[int], Tensor]):
        """allocate: bytes -> a buffer of that many."""
        places, end = {}, 0
        for name, tensor in tensors.items():
            places[name] = end
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        self.layout: BufferLayout = {
            name: (start, tensors[name].dtype, tuple(tensors[name].shape)) for name, start in places.items()
        }
        self.buffer = allocate(max(end, 1))
        host_memory.pin(self.buffer, device)
        self.contents = views(self.buffer, self.layout)
        self.copying = host_memory.StagingCopy(device)

    def copy_from(self, tensors: Tensors) -> None:
        self.copying.start([self.contents[name] for name in tensors], list(tensors.values()))


def views(buffer: Tensor, layout: BufferLayout) -> dict[str, Tensor]:
    """The tensors that lie in a buffer of bytes."""
    result = {}
    for name, (start, dtype, shape) in layout.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        result[name] = buffer[start : start + size].view(dtype).view(shape)
    return result


# ---------------------------------------------------------------- three ways to write


class SyncWriter:
    """Training waits."""

    def __init__(self, device: torch.device, tensors: Tensors):
        self.group = dist.group.WORLD if dist.get_world_size() > 1 else None

    def start(self, request: SaveRequest, tensors: Tensors) -> "Future[float]":
        plan = local_save_plan(tensors, dist.get_rank() == 0)
        commit.save(request, plan, local_tensors(tensors), self.group)
        future: Future[float] = Future()
        future.set_result(time.perf_counter())
        return future

    def before_update(self) -> None:
        pass

    def close(self) -> None:
        pass


class StagedWriter:
    """What a thread and a process have in common: the copy, and a thread that waits for the end."""

    def __init__(self, device: torch.device, tensors: Tensors, allocate: Callable[[int], Tensor]):
        """allocate: bytes -> a buffer of that many."""
        self.plan = local_save_plan(tensors, dist.get_rank() == 0)
        try:
            self.staging = Staging(local_tensors(tensors), device, allocate)
        except MemoryError as error:
            raise ConfigError("checkpoint.async_mode", f"{error}; off needs no copy") from None
        self.waiting = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def write(self, request: SaveRequest) -> None:
        raise NotImplementedError

    def start(self, request: SaveRequest, tensors: Tensors) -> "Future[float]":
        self.staging.copy_from(local_tensors(tensors))
        return self.waiting.submit(self._write_copy, request)

    def _write_copy(self, request: SaveRequest) -> float:
        self.staging.copying.wait()
        self.write(request)
        return time.perf_counter()

    def before_update(self) -> None:
        self.staging.copying.before_update()

    def close(self) -> None:
        self.waiting.shutdown(wait=False)


class ThreadWriter(StagedWriter):
    """Written by a thread, with a process group of its own: its collectives must not mix with training's."""

    def __init__(self, device: torch.device, tensors: Tensors):
        super().__init__(device, tensors, lambda size: torch.empty(size, dtype=torch.uint8))
        self.group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT) if dist.get_world_size() > 1 else None

    def write(self, request: SaveRequest) -> None:
        commit.save(request, self.plan, self.staging.contents, self.group)


class ProcessWriter(StagedWriter):
    """Written by a process of its own, which shares the copy's memory: writing takes no time of training's interpreter.

    Not torch's own such process: that one is forked by a thread that ends, outlives a killed trainer until it has committed
    what it writes, and is never replaced.
    """

    def __init__(self, device: torch.device, tensors: Tensors):
        if not hasattr(os, "memfd_create"):
            raise ConfigError("checkpoint.async_mode", f"{sys.platform} has no memory files; thread works everywhere")
        self.descriptor = os.memfd_create("checkpoint")
        super().__init__(device, tensors, self._allocate)
        self.store, address = _writer_store()
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        place = (dist.get_rank(), dist.get_world_size(), address)
        memory = (f"/proc/{os.getpid()}/fd/{self.descriptor}", self.staging.buffer.numel(), self.staging.layout)
        self.process = context.Process(target=_serve, args=(there, os.getpid(), place, memory, self.plan), daemon=True)
        self.process.start()
        there.close()

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

    def _lost(self, what: str) -> WriterDied:
        end = self.process.exitcode
        how = f"ended by {signal.Signals(-end).name}" if end is not None and end < 0 else f"ended with {end}"
        return WriterDied(f"{what}: the process that writes checkpoints was {how}")

    def before_update(self) -> None:
        super().before_update()
        if self.process.exitcode is not None:
            raise self._lost("no step can be saved any more")

    def close(self) -> None:
        super().close()
        self.process.kill()


def _writer_store() -> tuple[dist.Store | None, tuple[str, int] | None]:
    """Another store than that of training, for the writers: it is there however the ranks found each other. Only rank 0 has
    it; all have its address."""
    if dist.get_world_size() == 1:
        return None, None
    store, port = None, None
    alone = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == dist.get_world_size()
    host = "localhost" if alone else os.environ["MASTER_ADDR"]  # where rank 0 has been reached before
    if dist.get_rank() == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        port = store.port
    return store, (host, broadcast(port, source=0))


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def _serve(
    connection: Connection,
    parent: int,
    place: tuple[int, int, tuple[str, int] | None],
    memory: tuple[str, int, BufferLayout],
    plan: SavePlan,
) -> None:
    """The writing process. place: rank, ranks, and where the ranks' writers meet; memory: file of the copy, bytes, layout."""
    detach_signals()
    rank, ranks, address = place
    path, num_bytes, layout = memory
    try:
        contents = views(_mapped(os.open(path, os.O_RDWR), num_bytes), layout)
        group = None
        if ranks > 1:
            store = dist.TCPStore(*address, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_GROUP_TIMEOUT)
            group = dist.group.WORLD
        while in_child_of(parent):
            connection.send(_attempt(connection.recv(), plan, contents, group))
    except (EOFError, OSError, dist.DistNetworkError, dist.DistStoreError):
        pass  # the trainer has ended, or another one of the run
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
        return SaveFailed(str(failure))  # without its cause, which other processes may not be able to read
    except RuntimeError as error:
        if not is_peer_loss(error):
            raise
        what = "the process that writes checkpoints on another rank has ended"
        return WriterDied(f"step {request.step} could not be saved: {what}")
    return None


WRITERS: dict[str, Callable[[torch.device, Tensors], Writer]] = {
    "off": SyncWriter,
    "thread": ThreadWriter,
    "process": ProcessWriter,
}
