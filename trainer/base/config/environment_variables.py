"""Environment variables that torchrun, a launcher or the user sets."""

import argparse
import os
import re

from trainer.base.config.argument_types import number
from trainer.base.config.errors import ConfigError


def environment_int(name: str, default: int, least: int, most: int = 2**31) -> int:
    """Return the value of an environment variable, or its default if it is not set. Raises ConfigError if it is invalid."""
    try:
        return number(int, least, most)(os.environ.get(name, str(default)))
    except argparse.ArgumentTypeError as error:
        raise ConfigError("", f"{name}={error}") from None


def check_log_rank(world_size: int) -> None:
    """Raise ConfigError if LOG_RANK, which is valid, names no rank of a run, so that nothing would be logged."""
    ranks = os.environ.get("LOG_RANK", "0")
    if ranks != "all" and min(map(int, ranks.split(","))) >= world_size:
        which = f"ranks 0 to {world_size - 1}" if world_size > 1 else "only rank 0"
        raise ConfigError("", f"LOG_RANK={ranks}: nothing would be logged, because this run has {which}")


def check_environment() -> None:
    """Check LOG_RANK and the variables that torchrun sets. Raises ConfigError if one is invalid."""
    ranks = os.environ.get("LOG_RANK", "0")
    if ranks != "all" and not re.fullmatch("[0-9]+(,[0-9]+)*", ranks):
        raise ConfigError("", f'LOG_RANK={ranks}: expected "all" or a list of ranks such as "0,3"')
    environment_int("LOCAL_RANK", 0, 0)
    environment_int("LOCAL_WORLD_SIZE", 1, 1)
    rank, world_size = environment_int("RANK", 0, 0), environment_int("WORLD_SIZE", 1, 1)
    if rank >= world_size:
        raise ConfigError("", f"RANK={rank}: must be below WORLD_SIZE={world_size}")
    if world_size > 1:
        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise ConfigError("", f"WORLD_SIZE={world_size}: needs {name} too; torchrun sets both")
        environment_int("MASTER_PORT", 29500, 1, 65535)
