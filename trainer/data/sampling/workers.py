"""Processes that load microbatches in the background."""

import errno
import multiprocessing
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing.process import BaseProcess

import numpy as np
import torch
from torch import Tensor

from trainer.base.system.children import exit_with_parent, for_pool
from trainer.base.system.files import describe
from trainer.base.system.process import detach_signals
from trainer.batch import Batch
from trainer.data.sampling.samples import Samples

_START_METHOD = "fork" if sys.platform == "linux" else None
"""A forked process shares the memory maps of the samples. Other processes get a copy of the tokens."""
_POLL_S = 0.5
"""Seconds between two checks, while a microbatch is awaited, whether a worker has ended or the run was asked to stop."""
_JOIN_S = 1.0
"""Seconds to wait for the exit code of a worker that has ended."""

_START_ADVICE = {
    errno.EMFILE: "the limit of open files (ulimit -Hn) is too low",
    errno.ENFILE: "the system's limit of open files is reached",
    errno.EAGAIN: "the limit of processes (ulimit -u, or the container's pids.max) is too low",
    errno.ENOMEM: "the memory is exhausted",
    errno.ENOSPC: "/dev/shm is full",
    errno.EACCES: "/dev/shm must be writable",
    errno.EROFS: "/dev/shm must be writable",
    errno.ENOENT: "/dev/shm must exist",
    errno.ENOSYS: "/dev/shm must be a tmpfs",
}
"""Error of the operating system when workers are started -> its usual cause. Queues between processes need a semaphore, which
is a file of 32 bytes in /dev/shm."""
_DEATH_ADVICE = {
    signal.SIGKILL: "the kernel does this if no memory is left; fewer data.num_workers need less",
    signal.SIGBUS: "a file of the token store has become shorter, or its disk or file system cannot read it",
}
"""Signal that killed a worker -> its usual cause."""


class LoadingFailed(Exception):
    """Error that ends a run whose samples cannot be loaded. Its message is one line for the user. The exit code is 1."""


_samples: Samples
"""In a worker process: the samples that it loads."""


def _start_worker(samples: Samples) -> None:
    global _samples
    detach_signals()
    exit_with_parent()  # also if the parent ended before detach_signals was called
    torch.set_num_threads(1)  # a forked process has no OpenMP threads and must not wait for them
    _samples = samples


def _load(index: np.ndarray) -> Batch:
    """Return the microbatch with NumPy arrays instead of tensors. A tensor would be sent through shared memory and a socket in
    TMPDIR. If these fail, the microbatch is lost without an error in the receiving process."""
    return _samples[index].map(Tensor.numpy)


@contextmanager
def explain_read_errors() -> Iterator[None]:
    """Context manager that turns the errors of a failed read into LoadingFailed."""
    try:
        yield
    except OSError as error:
        raise LoadingFailed(f"the training data cannot be read: {describe(error)}") from None
    except MemoryError:
        raise LoadingFailed(
            "the memory is exhausted: the process that loads training data can allocate no more"
        ) from None


@contextmanager
def _explain_start_errors(num_workers: int) -> Iterator[None]:
    try:
        yield
    except (OSError, NotImplementedError, RuntimeError) as error:  # RuntimeError: no thread can be started
        number, text = (error.errno, error.strerror) if isinstance(error, OSError) else (errno.EAGAIN, error)
        cause = _START_ADVICE.get(number, "the system does not allow it")
        message = f"the {num_workers} processes of data.num_workers cannot be started ({text}): {cause}"
        raise LoadingFailed(f"{message}; data.num_workers = 0 needs none") from None


def _exit_code(process: BaseProcess) -> int | None:
    """Return the exit code of a process, or None if it does not end within _JOIN_S.

    The pool's thread joins its processes, too. The thread that comes second is told that there is no such process, and finds the
    code once the first has stored it."""
    deadline = time.monotonic() + _JOIN_S
    while process.exitcode is None and (remaining := deadline - time.monotonic()) > 0:
        process.join(remaining)
    return process.exitcode


class WorkerPool:
    """Processes that load microbatches in the order of their sample indices, `prefetch` microbatches for each process ahead."""

    def __init__(self, samples: Samples, indices: Iterator[np.ndarray], asked_to_stop: Callable[[], bool]):
        """Describe the work.

        Args:
            samples: The samples of all microbatches.
            indices: Sample indices of one microbatch after the other, endless.
            asked_to_stop: Whether the run was asked to stop. If so, this process loads a microbatch itself rather than wait for a
                worker that may hang.
        """
        self._samples, self._indices = samples, indices
        self._processes: set[BaseProcess] = set()
        self._pool: ProcessPoolExecutor
        self._requested: deque[tuple[np.ndarray, Future[Batch]]] = deque()
        self._asked_to_stop = asked_to_stop
        self._is_late = False
        """Whether the run was asked to stop while it waited for a microbatch."""

    def start(self, num_workers: int, prefetch: int) -> None:
        """Start the processes.

        Args:
            num_workers: Number of processes.
            prefetch: Number of microbatches per process that are requested ahead.

        Raises:
            LoadingFailed: The processes cannot be started.
        """
        context = for_pool(multiprocessing.get_context(_START_METHOD))
        with _explain_start_errors(num_workers):
            self._pool = ProcessPoolExecutor(num_workers, context, _start_worker, (self._samples,))
            self._requested.extend(map(self._request, islice(self._indices, num_workers * prefetch)))

    def _request(self, index: np.ndarray) -> tuple[np.ndarray, "Future[Batch]"]:
        before = multiprocessing.active_children()
        future = self._pool.submit(_load, index)
        # The first request starts all processes that are forked. Others are started when a request finds no idle one.
        self._processes |= {*multiprocessing.active_children()} - {*before}
        return index, future

    def batches(self) -> Iterator[Batch]:
        """Yield the microbatches endlessly. Raises LoadingFailed if a worker ends."""
        try:
            while True:
                index, future = self._requested.popleft()
                self._requested.append(self._request(next(self._indices)))
                yield self._result(future) or self._samples[index]
        except BrokenProcessPool as error:
            message = self._describe_death(error)
            for process in self._processes:
                process.terminate()  # the pool does not, while it waits for the rest of a result
            raise LoadingFailed(message) from None
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _result(self, future: "Future[Batch]") -> Batch | None:
        """Return the microbatch, or None if the run was asked to stop and no worker has loaded it yet."""
        while not future.done():
            if self._is_late:
                return None
            with suppress(FutureTimeoutError):
                future.exception(_POLL_S)
                break
            if any(process.exitcode is not None for process in self._processes):
                # The pool waits forever for the rest of a result whose worker was killed while it sent the result.
                raise BrokenProcessPool("no further result")
            self._is_late = self._asked_to_stop()
        return future.result().map(torch.from_numpy)

    def _describe_death(self, error: BrokenProcessPool) -> str:
        for process in self._processes:
            exit_code = _exit_code(process)
            if exit_code is not None and exit_code < 0 and not process.is_killed:
                number = -exit_code
                name = signal.Signals(number).name
                cause = f": {_DEATH_ADVICE[number]}" if number in _DEATH_ADVICE else ""
                return f"{name} killed process {process.pid}, which loads training data{cause}"
        return f"a process that loads training data has ended: {error.__cause__ or error}"
