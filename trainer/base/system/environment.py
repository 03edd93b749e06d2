"""Description of the software and hardware that a process uses. A run records it in environment.json."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def environment(repository: Path) -> dict[str, Any]:
    """Return the command line, git commit, packages, platform and CPU. repository: root folder of the code."""
    changes = _git(repository, "status", "--porcelain")
    return {
        "command": sys.orig_argv,
        "git_commit": _git(repository, "rev-parse", "HEAD"),
        "git_clean": None if changes is None else changes == "",
        "python": platform.python_version(),
        "packages": dict(sorted((d.metadata["Name"], d.version) for d in metadata.distributions())),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
    }


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
