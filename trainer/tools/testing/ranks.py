"""Local gloo ranks that run a function together."""

import copyreg
import faulthandler
import io
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.base.system.children import end_children, exit_with_parent, start_fork_server
from trainer.runtime.distributed import quiet_torch

_COLLECTIVE_S = 120
_RESULT_S = 900
"""Seconds until the next rank must return a result. Four ranks on two cores took 210 s with Kimi Linear's blocks, compiled."""


def _serve(rank: int, size: int, store: str, pipe: Connection, function: Callable[..., Any], args: tuple) -> None:
    faulthandler.enable()
    exit_with_parent()
    quiet_torch()
    torch.set_num_threads(1)  # because there may be more ranks than cores
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=_COLLECTIVE_S)
    )
    try:
        try:
            result = function(*args)
        finally:
            end_children()  # before the parent process kills this one
        pipe.send_bytes(_by_value((result, None)))
    except BaseException:
        pipe.send_bytes(_by_value((None, traceback.format_exc())))
    try:
        pipe.recv()  # other ranks may still need this one; the parent process ends all of them
    except EOFError:
        os._exit(1)


def _by_value(result: Any) -> bytes:
    """Return what Connection.send would send, but with the values of tensors: torch shares their memory through a file descriptor
    for each, and many systems allow 1,024. A view is sent with all that it is a view of."""
    content = io.BytesIO()
    pickler = ForkingPickler(content)
    pickler.dispatch_table = copyreg.dispatch_table  # without what torch has registered for multiprocessing
    pickler.dump(result)
    return content.getvalue()


class RankError(Exception):
    """Failure of a function on a rank. The message contains the traceback, if there is one."""


class LocalRanks:
    """Runner that starts new processes for each function. Starting them takes 0.05 s. Processes are not reused, because the
    thread of each old process group would still wake up 100 times a second."""

    def __init__(self, size: int):
        self.size = size

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run an importable function on every rank and return the results by rank. Raises RankError as soon as one rank fails,
        because other ranks may be waiting for it."""
        # torch reads this when it is imported. The compiler's worker processes would outlive ranks that are killed.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        # The fork server has imported torch, but started none of its threads.
        context = start_fork_server(["trainer.build", "pytest"])
        pipes, processes = [], []
        with tempfile.TemporaryDirectory() as folder:
            try:
                for rank in range(self.size):
                    parent_end, rank_end = context.Pipe()
                    rank_args = (rank, self.size, str(Path(folder) / "store"), rank_end, function, args)
                    process = context.Process(target=_serve, args=rank_args)
                    process.start()
                    processes.append(process)
                    rank_end.close()
                    pipes.append(parent_end)
                return _results(pipes)
            finally:
                for process in processes:
                    process.kill()
                    process.join()


def _results(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        # Read the first available result, so that the first error is the one that is raised.
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], _RESULT_S)
        if not ready:
            raise RankError(f"{len(pipes)} ranks: no rank returned a result within {_RESULT_S} s")
        rank = pipes.index(ready[0])
        try:
            results[rank], error = pipes[rank].recv()
        except EOFError:
            error = "the process ended without a result"
        if error:
            raise RankError(f"rank {rank} of {len(pipes)}\n{error}")
    return [results[rank] for rank in range(len(pipes))]
