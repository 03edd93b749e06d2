"""Files that survive a power cut, digests and locks."""

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import TextIO

import xxhash

_BLOCK = 2**22


def folder_error(path: str | Path) -> str:
    """Why there is no folder there, or "" where there is one."""
    if os.path.isdir(path):
        return ""
    return "is a file, not a folder" if os.path.exists(path) else "no such folder"


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_page_cache(path: Path) -> None:
    """What is read of the file next comes from the disk, where the system can do that."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_durably(path: Path, text: str) -> None:
    path.write_text(text)
    sync(path)


def atomic_write(path: Path, text: str) -> None:
    """The old content stays until the new one is there."""
    aside = path.with_name(f"{path.name}.aside")
    write_durably(aside, text)
    aside.replace(path)
    sync(path.parent)


def try_lock(path: Path, timeout_s: float) -> TextIO | str:
    """Take the lock that a file is, for as long as the returned file stays open and this process lives; or say who has it.
    The lock goes with the process, however that ends: there are no stale ones. Raises OSError.

    timeout_s: how long to wait for a holder that is just ending.
    """
    end = time.monotonic() + timeout_s
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


def digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def digest_of(path: Path) -> str:
    running = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            running.update(block)
    return running.hexdigest()
