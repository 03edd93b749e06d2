"""Saving while training goes on: a copy of the state is taken, and written in a thread or a process of its own."""

import mmap
import multiprocessing
import os
import signal
import socket
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

from trainer import checkpoint
from trainer import device as devices
from trainer.checkpoint import Request, SaveFailed, Tensors
from trainer.config import CheckpointConfig, ConfigError
from trainer.distributed import broadcast
from trainer.shards import local_tensors, plan_of
from trainer.system import die_with_parent, in_child_of, leave_signals_to_parent

_ALIGNMENT = 64
_GROUP_TIMEOUT = timedelta(hours=4)
"""Of the ranks' writers among each other: the slowest disk decides."""


class LostWriter(SaveFailed):
    """The process that writes ended: no later save would succeed either."""


@dataclass(frozen=True)
class Finished:
    """A save that has come to its end."""

    path: Path
    blocked_s: float
    """Training stood still."""
    background_s: float
    """Writing went on beside training."""


class Writer(Protocol):
    """How a checkpoint gets from memory to disk; each call is made on all ranks, one at a time."""

    def start(self, request: Request, tensors: Tensors) -> "Future[None]":
        """Begins to save; the result is there when it is committed, or raises SaveFailed."""

    def before_update(self) -> None:
        """Returns when the tensors may change."""

    def close(self) -> None: ...


class Saver:
    """At most one save at a time; a failed one is reported, never swallowed."""

    def __init__(self, config: CheckpointConfig, folder: Path, device: torch.device):
        self.config = config
        self.folder = folder
        self.writer = WRITERS[config.async_mode](device)
        self.running: tuple[Path, float, float, Future[None]] | None = None

    def save(self, step: int, tensors: Tensors, files: dict[str, bytes], about: dict[str, Any]) -> list[Finished]:
        """Begin to save the state of a step, on all ranks together. Returns the saves that ended meanwhile. Raises
        SaveFailed, for the save before too."""
        start = time.perf_counter()
        finished = self.wait()
        request = Request(
            folder=self.folder,
            step=step,
            files=files,
            about=about,
            keep=self.config.keep,
            keep_every=self.config.keep_every,
            aside=checkpoint.prepare(self.folder, step),
        )
        future = self.writer.start(request, tensors)
        now = time.perf_counter()
        self.running = (request.final, now - start, now, future)
        return finished + self.finished()

    def before_update(self) -> None:
        self.writer.before_update()

    def finished(self) -> list[Finished]:
        """The save that has ended since the last call. Raises SaveFailed if it failed."""
        if self.running is None or not self.running[3].done():
            return []
        path, blocked, start, future = self.running
        self.running = None
        future.result()
        return [Finished(path, blocked, getattr(future, "ended", start) - start)]

    def wait(self) -> list[Finished]:
        """Until nothing is being written."""
        if self.running is not None:
            self.running[3].exception()
        return self.finished()

    def close(self) -> None:
        self.writer.close()


def _note_end(future: Future) -> None:
    future.ended = time.perf_counter()


# ---------------------------------------------------------------- the copy


class Staging:
    """A copy in host memory of what this rank holds, in buffers that every save uses again."""

    def __init__(self, tensors: Tensors, device: torch.device, allocate: Callable[[int], Tensor]):
        """allocate: bytes -> a buffer of that many."""
        places, end = {}, 0
        for name, tensor in tensors.items():
            places[name] = end
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        self.layout = {name: (start, tensors[name].dtype, tuple(tensors[name].shape)) for name, start in places.items()}
        self.buffer = allocate(max(end, 1))
        self.contents = views(self.buffer, self.layout)
        self.copying = devices.HostCopy(device)

    def take(self, tensors: Tensors) -> None:
        self.copying.start([self.contents[name] for name in tensors], list(tensors.values()))


def views(buffer: Tensor, layout: dict[str, tuple[int, torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """The tensors that lie in a buffer of bytes."""
    result = {}
    for name, (start, dtype, shape) in layout.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        result[name] = buffer[start : start + size].view(dtype).view(shape)
    return result


# ---------------------------------------------------------------- three ways to write


class Here:
    """Training waits."""

    def __init__(self, device: torch.device):
        self.group = dist.group.WORLD if dist.get_world_size() > 1 else None

    def start(self, request: Request, tensors: Tensors) -> "Future[None]":
        future: Future[None] = Future()
        plan = plan_of(tensors, dist.get_rank() == 0)
        checkpoint.write(request, plan, local_tensors(tensors), self.group)
        future.set_result(None)
        return future

    def before_update(self) -> None:
        pass

    def close(self) -> None:
        pass


class Copying:
    """What a thread and a process have in common: the copy, and a thread that waits for the end."""

    def __init__(self, device: torch.device):
        self.device = device
        self.staging: Staging | None = None
        self.plan: SavePlan | None = None
        self.waiting = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def allocate(self, num_bytes: int) -> Tensor:
        return devices.host_buffer(num_bytes, self.device)

    def write(self, request: Request) -> None:
        raise NotImplementedError

    def start(self, request: Request, tensors: Tensors) -> "Future[None]":
        local = local_tensors(tensors)
        if self.staging is None:
            self.plan = plan_of(tensors, dist.get_rank() == 0)
            self.staging = Staging(local, self.device, self.allocate)
        self.staging.take(local)
        future = self.waiting.submit(self._write_copy, request)
        future.add_done_callback(_note_end)
        return future

    def _write_copy(self, request: Request) -> None:
        self.staging.copying.wait()
        self.write(request)

    def before_update(self) -> None:
        if self.staging is not None:
            self.staging.copying.before_update()

    def close(self) -> None:
        self.waiting.shutdown(wait=False)


class InThread(Copying):
    """Written by a thread, with a process group of its own: its collectives must not mix with training's."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT) if dist.get_world_size() > 1 else None

    def write(self, request: Request) -> None:
        checkpoint.write(request, self.plan, self.staging.contents, self.group)


class InProcess(Copying):
    """Written by a process of its own, which shares the copy's memory: writing takes no time of training's interpreter.

    Not torch's own such process: that one is forked by a thread that ends, outlives a killed trainer until it has committed
    what it writes, and is never replaced.
    """

    def __init__(self, device: torch.device):
        super().__init__(device)
        if not hasattr(os, "memfd_create"):
            raise ConfigError("checkpoint.async_mode", f"{sys.platform} has no memory files; thread works everywhere")
        self.descriptor = os.memfd_create("checkpoint")
        # Another store than that of training: it is there however the ranks found each other.
        alone = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == dist.get_world_size()
        here = "localhost" if alone else socket.gethostname()
        self.store = None
        address = None
        if dist.get_world_size() > 1:
            if dist.get_rank() == 0:
                self.store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
                address = (here, self.store.port)
            address = broadcast(address, source=0)
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        place = (dist.get_rank(), dist.get_world_size(), address)
        memory = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        self.process = context.Process(target=_serve, args=(there, memory, os.getpid(), place), daemon=True)
        self.process.start()
        there.close()
        self.told = False

    def allocate(self, num_bytes: int) -> Tensor:
        os.ftruncate(self.descriptor, num_bytes)
        buffer = _mapped(self.descriptor, num_bytes)
        devices.pin(buffer, self.device)
        return buffer

    def write(self, request: Request) -> None:
        try:
            if not self.told:
                self.connection.send((self.staging.layout, self.staging.buffer.numel(), self.plan))
                self.told = True
            self.connection.send(request)
            failure = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(1)
            end = self.process.exitcode
            how = f"ended by {signal.Signals(-end).name}" if end is not None and end < 0 else f"ended with {end}"
            line = f"step {request.step} could not be saved: the process that writes checkpoints was {how}"
            raise LostWriter(line) from None
        if failure is not None:
            raise failure

    def close(self) -> None:
        super().close()
        self.process.kill()


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def _serve(connection: Connection, memory: str, parent: int, place: tuple[int, int, tuple[str, int] | None]) -> None:
    """The writing process. place: rank, ranks, and where the ranks' writers meet."""
    leave_signals_to_parent()
    die_with_parent()
    rank, ranks, address = place
    descriptor = os.open(memory, os.O_RDWR)
    group = None
    if ranks > 1:
        store = dist.TCPStore(*address, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_GROUP_TIMEOUT)
        group = dist.group.WORLD
    try:
        layout, num_bytes, plan = connection.recv()
        contents = views(_mapped(descriptor, num_bytes), layout)
        while in_child_of(parent):
            request = connection.recv()
            try:
                checkpoint.write(request, plan, contents, group)
                connection.send(None)
            except SaveFailed as failure:
                connection.send(SaveFailed(str(failure)))
    except (EOFError, OSError):
        pass  # the trainer has ended
    os._exit(0)


WRITERS: dict[str, Callable[[torch.device], Writer]] = {"off": Here, "thread": InThread, "process": InProcess}
