"""A check that this Python has the dependencies of pyproject.toml. Commands call it before they import the first of them."""

import importlib.util
import sys
from pathlib import Path

from trainer.base.system.streams import print_error

MODULES = [
    "google.protobuf",
    "jinja2",
    "numpy",
    "safetensors",
    "sentencepiece",
    "tensorboard",
    "tiktoken",
    "tomli",
    "torch",
    "torchdata",
    "tqdm",
    "xxhash",
]
"""Modules of the dependencies. scripts/environment.sh imports this list."""
_ROOT = Path(__file__).parents[3]


def require_dependencies() -> None:
    """If a dependency is not installed, print one line and exit with code 2."""
    missing = [name for name in MODULES if not _is_installed(name)]
    if not missing:
        return
    own = _ROOT / ".venv" / "bin" / "python"
    use = f"use {own}" if own.exists() else f"{_ROOT / 'run_llama_train.sh'} installs them into {own.parents[1]}"
    print_error(f"{sys.executable} lacks {', '.join(missing)}: {use}")
    sys.exit(2)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that would contain the module
        return False
