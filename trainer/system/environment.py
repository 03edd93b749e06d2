"""Description of the software and hardware of a process, for the record of a run."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def environment(repository: Path) -> dict[str, Any]:
    """Return command line, git commit, packages, platform and CPU. repository: root folder of the code."""
    return {
        "command": sys.orig_argv,
        **_git(repository),
        "python": platform.python_version(),
        "packages": dict(sorted((d.metadata["Name"], d.version) for d in metadata.distributions())),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
    }


def _git(repository: Path) -> dict[str, Any]:
    """Return the commit and whether the working tree is clean. Both are None outside a repository."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(repository), *args], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    changes = git("status", "--porcelain")
    return {"git_commit": git("rev-parse", "HEAD"), "git_clean": None if changes is None else changes == ""}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
