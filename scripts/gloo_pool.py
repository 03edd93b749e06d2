"""Ranks that stay: processes in a gloo group, started once, that run one function after the other."""

import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120
JOBS = 12
"""After so many the ranks are started anew: the process groups of what ran stay, each with threads and sockets of its own."""


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started the ranks
    torch.set_num_threads(1)  # more ranks than cores share them
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S)
    )
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            pipe.send((function(*args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
    os._exit(0)  # as train.py does


class RankError(Exception):
    """A function raised on a rank; the text is its traceback."""


class GlooPool:
    def __init__(self, size: int):
        self.size = size
        self.folder = tempfile.TemporaryDirectory()
        self._start()

    def _start(self) -> None:
        # The compiler's own worker processes would outlive ranks that end without clean-up. Read when torch is loaded.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        # Forked from a server that has loaded torch and started no thread of it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "trainer.trainer"])
        store = tempfile.mktemp(dir=self.folder.name)
        self.jobs = 0
        self.busy = False
        self.pipes = []
        self.processes = []
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, store, there))
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(*args) on every rank, together; the results in the order of the ranks. The function must be one that
        can be imported. Raises RankError; the ranks are then started anew, since others may wait for the one that failed."""
        if self.jobs == JOBS:
            self._stop()
            self._start()
        self.jobs += 1
        self.busy = True
        for pipe in self.pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        while len(results) < self.size:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]
            ready = wait(
                waiting, 2 * TIMEOUT_S
            )  # whoever has an answer, so that the first error is the one that is told
            rank, (result, error) = self._answer(ready[0]) if ready else (None, (None, "no answer"))
            if error:
                self._stop()
                self._start()
                raise RankError(f"rank {rank} of {self.size}\n{error}")
            results[rank] = result
        self.busy = False
        return [results[rank] for rank in range(self.size)]

    def _answer(self, pipe: Connection) -> tuple[int, tuple[Any, str | None]]:
        try:
            return self.pipes.index(pipe), pipe.recv()
        except EOFError:
            return self.pipes.index(pipe), (None, "the rank ended")

    def _stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def close(self) -> None:
        """At once, where the ranks are still at work because something interrupted it."""
        if not self.busy:
            for pipe in self.pipes:
                pipe.send(None)
            for process in self.processes:
                process.join(10)
        self._stop()
        self.folder.cleanup()
