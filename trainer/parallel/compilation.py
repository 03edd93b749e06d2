"""Whether blocks are compiled."""

import os
import shutil
import sysconfig
from typing import Literal

from trainer.base.config import ParallelConfig
from trainer.parallel.stages import splits_backward


def may_compile(choice: Literal["auto"] | bool, parallel: ParallelConfig, on_gpu: bool) -> bool:
    """Return whether blocks are compiled on a node that has a C compiler. choice: value of [compile] enabled."""
    return on_gpu and not splits_backward(parallel) if choice == "auto" else choice


def resolve_compilation(choice: Literal["auto"] | bool, parallel: ParallelConfig, on_gpu: bool) -> bool:
    """Return whether blocks are compiled on this node. The arguments are those of `may_compile`."""
    return may_compile(choice, parallel, on_gpu) and (choice != "auto" or _has_compiler())


def _has_compiler() -> bool:
    compilers = filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))
    headers = os.path.join(sysconfig.get_path("include"), "Python.h")  # Triton compiles with them
    return any(map(shutil.which, compilers)) and os.path.exists(headers)
