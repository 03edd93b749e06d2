"""Processes that multiprocessing starts, and their behaviour after Ctrl-C."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext


@contextmanager
def children_ignore_interrupts() -> Iterator[None]:
    """Context manager in which new processes inherit that SIGINT is blocked, because this process handles Ctrl-C for them. They
    would otherwise print tracebacks while they import modules. This process handles Ctrl-C when the block ends."""
    received = []
    handler = signal.signal(
        signal.SIGINT, lambda *arguments: received.append(arguments)
    )  # other threads receive it too
    resource_tracker.ensure_running()  # would unblock SIGINT if it were started later
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if received and callable(handler):
            handler(*received[0])


def end_children() -> None:
    """Kill the processes that multiprocessing has started, and unlink its semaphores, about which Python would warn otherwise."""
    for child in multiprocessing.active_children():
        child.kill()
    if server := forkserver._forkserver._forkserver_pid:
        os.kill(server, signal.SIGKILL)
    util._run_finalizers(0)


def exit_with_parent() -> None:
    """Exit when the process that started this one through multiprocessing exits for any reason. The kernel cannot do this: the
    parent of a fork server's child is the fork server, which runs until its children exit."""

    def wait() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def start_fork_server(modules: Sequence[str]) -> ForkServerContext:
    """Return a context whose processes are forked from a server that has imported the modules. They ignore SIGINT."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    with children_ignore_interrupts():
        forkserver.ensure_running()
    return context
