"""Processes that multiprocessing starts, and their behaviour after signals."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import BaseContext, ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from trainer.base.system.process import limit_spinning
from trainer.base.system.signals import STOP_SIGNALS


def for_pool(context: BaseContext) -> BaseContext:
    """Return a context for a ProcessPoolExecutor whose processes ignore SIGTERM. `terminate` kills them.

    When a process of a pool dies, the pool terminates the others and waits for them. From Python 3.12 on, it holds a lock
    meanwhile, for which `submit` and `shutdown` wait."""

    def process(**options: Any) -> BaseProcess:
        created = context.Process(**options)
        created.terminate = created.kill
        return created

    own = type(context)()
    own.Process = process
    return own


@contextmanager
def children_ignore_signals() -> Iterator[None]:
    """Context manager in which new processes inherit that stop signals are blocked, because this process handles them. After
    Ctrl-C, they would otherwise print tracebacks while they import modules. This process handles Ctrl-C when the block ends."""
    received = []
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):  # otherwise SIGINT is ignored
        signal.signal(signal.SIGINT, lambda *arguments: received.append(arguments))  # other threads receive it too
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    resource_tracker.ensure_running()  # unblocks SIGINT and SIGTERM, now or when a process starts
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
            if received:
                handler(*received[0])


def end_children() -> None:
    """Kill the processes that multiprocessing has started, unlink its semaphores, about which Python would warn otherwise, and
    remove its temporary folder."""
    children = multiprocessing.active_children()
    util._run_finalizers(0)
    for child in children:  # last, because another thread may report that a child was killed
        child.kill()
    if server := forkserver._forkserver._forkserver_pid:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(server, signal.SIGKILL)
    util._run_finalizers()


def require_main_guard() -> None:
    """Raise RuntimeError if a new process of multiprocessing runs this while it imports the main file of its parent again. A run
    that it started would wait for the parent's."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "a worker process imports this file: put the code that starts a run under if __name__ == '__main__'"
        )


def exit_with_parent() -> None:
    """Exit when the process that started this one through multiprocessing exits for any reason. The kernel cannot do this: the
    parent of a fork server's child is the fork server, which runs until its children exit."""

    def wait() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def start_fork_server(modules: Sequence[str]) -> ForkServerContext:
    """Return a context whose processes are forked from a server that has imported the modules. They ignore stop signals."""
    limit_spinning()  # the server inherits it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    options, folder = multiprocessing.current_process()._config, util.get_temp_dir()
    options["tempdir"] = _path_for_sockets(folder)
    try:
        with children_ignore_signals():
            forkserver.ensure_running()
    finally:
        options["tempdir"] = folder
    return context


@cache
def _path_for_sockets(folder: str) -> str:
    """Return a short path of a folder: that of a socket has at most 107 characters, and TMPDIR may be longer. Its descriptor
    stays open, because this process uses the path whenever it connects to a socket."""
    return f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_CLOEXEC)}" if sys.platform == "linux" else folder
