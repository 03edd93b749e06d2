"""Properties of a process and its node: cores, rank, memory and children."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_rank() -> int:
    """Return the index of this process among the ranks of its node. An invalid LOCAL_RANK, whose error is being printed, is 0."""
    text = os.environ.get("LOCAL_RANK", "0")
    return int(text) if text.isdecimal() else 0


def node_id() -> str:
    """Return an identifier of this node: its index if torchrun started this process, otherwise the host name."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def meminfo(name: str) -> int:
    """Return an entry of /proc/meminfo, in bytes. Raises OSError on systems other than Linux."""
    entries = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
    return int(entries[f"{name}:"]) * 1024


def memory_available() -> int | None:
    """Return the number of bytes that this process can allocate without swapping, or None if unknown."""
    try:
        free = meminfo("MemAvailable")
    except OSError:
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return min(free, limit - used + int(statistics["inactive_file"]))
    except (OSError, ValueError, KeyError):  # this process is not in a container, or the container has no limit
        return free


def limit_spinning() -> None:
    """Let OpenMP threads that wait for others sleep after a few microseconds, unless the user has chosen another policy. By
    default they wait actively for milliseconds, which slows down a run beside other jobs. Call this before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def spins() -> bool:
    """Return whether OpenMP threads of this process would wait actively for milliseconds."""
    return not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()


def die_with_parent() -> None:
    """On Linux, have the kernel kill this process when its parent exits for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


_PGREP = threading.Lock()
"""Held while the command pgrep is a child of this process, so that no other thread takes it for a rank."""


def children() -> list[int]:
    """Return the ids of running child processes."""
    if not Path("/proc/thread-self/children").exists():  # not Linux
        with _PGREP:
            found = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]
    found: set[int] = set()
    for _ in range(2):  # the children of a thread that ends meanwhile are then those of another one
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                found |= {int(pid) for pid in (task / "children").read_text().split()}
    return sorted(found)
