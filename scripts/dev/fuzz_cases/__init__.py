"""The kinds of input of scripts/dev/fuzz.py."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from scripts.dev.fuzz_cases import checkpoints, commands, corpora, models, settings, tokenizers


@dataclass(frozen=True)
class Target:
    """A kind of input."""

    cases: int
    """Number of cases of a full run."""
    run: Callable[[Random, Path, Path], str]
    """Function (random, folder of the fixtures, empty folder) -> the line that refused the input, or "" if it was accepted. A
    ConfigError is a refusal too. Any other exception is a finding."""
    make_fixtures: Callable[[Path], None] = lambda folder: None
    """Function that writes files that all cases share to an empty folder."""


TARGETS: dict[str, Target] = {
    "settings": Target(12_000, settings.run),
    "models": Target(3_500, models.run),
    "corpora": Target(2_000, corpora.run),
    "tokenizers": Target(1_200, tokenizers.run, tokenizers.make_fixtures),
    "checkpoints": Target(800, checkpoints.run, checkpoints.make_fixtures),
    "commands": Target(500, commands.run, commands.make_fixtures),
}
