"""Description of the software and hardware that a process uses. A run records it in environment.json."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from trainer.base.system.streams import without_credentials


def environment(repository: Path) -> dict[str, Any]:
    """Return the command line, git commit, packages, platform and CPU. repository: root folder of the code."""
    changes = _git(repository, "status", "--porcelain")
    return {
        "command": [without_credentials(word) for word in sys.orig_argv],
        "git_commit": _git(repository, "rev-parse", "HEAD"),
        "git_clean": None if changes is None else changes == "",
        "python": platform.python_version(),
        "packages": dict(sorted(_packages())),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
    }


def _packages() -> Iterator[tuple[str, str]]:
    """Yield name and version of each installed package. An interrupted installation leaves folders without them."""
    for distribution in metadata.distributions():
        with suppress(Exception):  # metadata may be damaged in any way
            name, version = distribution.metadata["Name"], distribution.version
            if isinstance(name, str) and isinstance(version, str):
                yield name, version


def _git(repository: Path, *args: str) -> str | None:
    """Return the output of a git command, or None if it fails, for example outside a repository."""
    try:
        done = subprocess.run(["git", "-C", str(repository), *args], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
