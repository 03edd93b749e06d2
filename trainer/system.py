"""What the operating system gives: cores, this rank's place on its machine, and files that survive a power cut."""

import os
from pathlib import Path


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_rank() -> int:
    """Number of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    path.write_text(text)
    sync(path)
