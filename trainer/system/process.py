"""What the operating system gives: cores, this rank's place on its machine, and files that survive a power cut."""

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_rank() -> int:
    """Number of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def node_id() -> str:
    """This one among those of a run: torchrun numbers them; started by hand, they have their names."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def meminfo(name: str) -> int:
    """Bytes, as Linux tells them under that name. Raises OSError on other systems."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def memory_available() -> int | None:
    """Bytes that this machine, or the container on it, can give without swapping; None where that is not told."""
    try:
        free = meminfo("MemAvailable")
    except OSError:
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        files = next(
            line for line in (group / "memory.stat").read_text().splitlines() if line.startswith("inactive_file ")
        )
    except (OSError, ValueError, StopIteration):  # no container, or one without a limit
        return free
    return min(free, limit - used + int(files.split()[1]))


def die_with_parent() -> None:
    """End this process when the one that started it ends, however that may be (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def in_child_of(parent: int) -> bool:
    return os.getppid() == parent


def detach_signals(*_: object) -> None:
    """For a process that works for another one: who stops, and when, is not its business, and it ends with that one."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
