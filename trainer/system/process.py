"""What the operating system gives: cores, this rank's place on its machine, and files that survive a power cut."""

import ctypes
import fcntl
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TextIO


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_rank() -> int:
    """Number of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def machine() -> str:
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


def no_folder(path: str | Path) -> str:
    """Why there is no folder there, or "" where there is one."""
    if os.path.isdir(path):
        return ""
    return "is a file, no folder" if os.path.exists(path) else "no such folder"


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget_pages(path: Path) -> None:
    """What is read of the file next comes from the disk, where the system can do that."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_durably(path: Path, text: str) -> None:
    path.write_text(text)
    sync(path)


def replace_durably(path: Path, text: str) -> None:
    """The old content stays until the new one is there."""
    aside = path.with_name(f"{path.name}.aside")
    write_durably(aside, text)
    aside.replace(path)
    sync(path.parent)


def die_with_parent() -> None:
    """End this process when the one that started it ends, however that may be (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def in_child_of(parent: int) -> bool:
    return os.getppid() == parent


def try_lock(path: Path, patience_s: float) -> TextIO | str:
    """Take the lock that a file is, for as long as the returned file stays open and this process lives; or say who has it.
    The lock goes with the process, however that ends: there are no stale ones. Raises OSError.

    patience_s: how long to wait for a holder that is just ending.
    """
    end = time.monotonic() + patience_s
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < end:
                file.close()
                time.sleep(0.1)
                continue
            file.seek(0)
            return file.read().strip() or "another process"
        if not _is_named(file, path):
            file.close()  # whoever had it has removed it
            continue
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
        return file


def _is_named(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def work_for_parent(*_: object) -> None:
    """For a process that works for another one: who stops, and when, is not its business, and it ends with that one."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
