"""Ranks of a gloo group on this machine, that run one function together."""

import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120


def _serve(rank: int, size: int, store: str, pipe: Connection, function: Callable[..., Any], args: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started the ranks
    torch.set_num_threads(1)  # more ranks than cores share them
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S)
    )
    try:
        pipe.send((function(*args), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    try:
        pipe.recv()  # the others may still need this one; whoever started them ends them all
    except EOFError:
        os._exit(1)


class RankError(Exception):
    """A function raised on a rank; the text is its traceback."""


class LocalRanks:
    """New ones for each function: they start in a twentieth of a second, and every process group that a function leaves behind
    has a thread that wakes a hundred times a second."""

    def __init__(self, size: int):
        self.size = size

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(*args) on every rank, together; the results in the order of the ranks. The function must be one that
        can be imported. Raises RankError as soon as one rank fails, since the others may wait for it."""
        # The compiler's own worker processes would outlive ranks that end without clean-up. Read when torch is loaded.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        # Forked from a server that has loaded torch and started no thread of it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "trainer.trainer"])
        pipes, processes = [], []
        with tempfile.TemporaryDirectory() as folder:
            try:
                for rank in range(self.size):
                    here, there = context.Pipe()
                    place = (rank, self.size, str(Path(folder) / "store"), there)
                    processes.append(context.Process(target=_serve, args=(*place, function, args)))
                    processes[-1].start()
                    there.close()
                    pipes.append(here)
                return _results(pipes)
            finally:
                for process in processes:
                    process.kill()
                    process.join()


def _results(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        # Of whoever has an answer, so that the first error is the one that is told.
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], 2 * TIMEOUT_S)
        if not ready:
            raise RankError(f"{len(pipes)} ranks: no answer")
        rank = pipes.index(ready[0])
        try:
            results[rank], error = pipes[rank].recv()
        except EOFError:
            error = "the rank ended"
        if error:
            raise RankError(f"rank {rank} of {len(pipes)}\n{error}")
    return [results[rank] for rank in range(len(pipes))]
