"""Lines for people, printed by the ranks named in LOG_RANK (default: 0; several as 0,3; or all)."""

import os
import sys
import time
from contextlib import suppress
from typing import TextIO


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _chosen() -> bool:
    chosen = os.environ.get("LOG_RANK", "0")
    return chosen == "all" or str(_rank()) in chosen.split(",")


def _line(text: str) -> str:
    rank = f"[rank {_rank()}] " if _rank() else ""
    return f"{time.strftime('%H:%M:%S')} {rank}{text}"


def _print(line: str, file: TextIO) -> None:
    with suppress(OSError):  # a disk that is full, a terminal that is gone: no reason to end a run
        print(line, file=file, flush=True)


def info(text: str) -> None:
    if _chosen():
        _print(_line(text), sys.stdout)


def warning(text: str) -> None:
    if _chosen():
        _print(_line(f"warning: {text}"), sys.stderr)


def on_terminal() -> bool:
    """Whether a person reads along, so that colour and moving bars make sense."""
    return _chosen() and sys.stdout.isatty()
