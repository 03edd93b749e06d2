"""Calls of the commands in scripts/ with random arguments. A refusal is one line on stderr, with exit code 2."""

import argparse
import contextlib
import importlib
import io
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from scripts.dev.fuzz_cases import checkpoints
from scripts.dev.fuzz_cases.damage import NUMBERS, TEXTS, require
from trainer.config.command_line import run_to_end
from trainer.config.fields import settings
from trainer.config.schema import toml_value

ROOT = Path(__file__).parents[3]
_COMMANDS = sorted(f"scripts.{path.stem}" for path in (ROOT / "scripts").glob("*.py"))

_MAY_FAIL = ("scripts.checkpoint", "scripts.compare_runs", "scripts.parity")
"""Commands that exit with code 1 if they find a difference or damage."""
_SLOW = ("scripts.leak_probe", "scripts.parity", "scripts.prepare_data", "scripts.train_tokenizer")
"""Commands whose valid calls would reach the limit of CPU time."""


def make_fixtures(folder: Path) -> None:
    checkpoints.make_fixtures(folder)
    for name in _COMMANDS:
        importlib.import_module(name)


class Parsed(Exception):
    """Carries the parser of a command."""


def parser_of(main: Callable[[], None]) -> argparse.ArgumentParser:
    """Return the parser of a command without parsing any arguments."""
    original = argparse.ArgumentParser.parse_known_args

    def parse(self: argparse.ArgumentParser, *_: object) -> None:
        raise Parsed(self)

    argparse.ArgumentParser.parse_known_args = parse
    try:
        main()
    except Parsed as parsed:
        return parsed.args[0]
    finally:
        argparse.ArgumentParser.parse_known_args = original
    raise AssertionError("the command has no parser")


def _accepts(action: argparse.Action, value: str) -> bool:
    try:
        return (action.type or str)(value) is not None and value in (action.choices or [value])
    except (ValueError, TypeError, argparse.ArgumentTypeError):
        return False


def _words(random: Random, parser: argparse.ArgumentParser, values: list[str]) -> Iterator[str]:
    """Yield random arguments, most of which have the declared type."""
    for action in parser._actions:
        likely = [value for value in (*values, *map(str, action.choices or ())) if _accepts(action, value)]
        if isinstance(action, argparse._SubParsersAction):
            name = random.choice(list(action.choices))
            yield name if random.random() < 0.97 else random.choice(values)
            yield from _words(random, action.choices[name], values)
        elif action.option_strings == ["--section.key"]:
            for setting in random.sample(list(settings().values()), random.choice((0, 0, 1, 2))):
                yield from (f"--{setting.key}", toml_value(setting.default))
        elif isinstance(action, argparse._HelpAction) or random.random() < (0.7 if action.option_strings else 0.03):
            continue
        else:
            yield from action.option_strings[:1]
            for _ in range(0 if action.nargs == 0 else random.choice((1,) * 12 + (2, 0))):
                yield random.choice(likely if likely and random.random() < 0.85 else values)


def run(random: Random, fixtures: Path, folder: Path) -> str:
    copy = shutil.copytree(fixtures / "run", folder / "run")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.chdir(folder)
    command = random.choice(_COMMANDS)
    main = importlib.import_module(command).main
    paths = [
        str(copy),
        str(copy / "checkpoints" / "step-00000002"),
        str(copy / "config.toml"),
        "new",
        "no/such",
        str(ROOT),
    ]
    values = [*NUMBERS, *TEXTS, *paths, *paths, "-5", "--", "--x", "\udcff"]
    words = list(_words(random, parser_of(main), values))
    if random.random() < 0.1:
        words.insert(random.randrange(len(words) + 1), random.choice(values))
    if command in _SLOW or "--search" in words:  # makes the call invalid
        words.append(random.choice(("--x", "--steps", "--vocab-size")))
    sys.argv = [f"{command.replace('.', '/')}.py", *words]
    print(sys.argv, flush=True)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_to_end(main)
        except SystemExit as exit:
            code = exit.code or 0
    printed = f"{sys.argv} ended with {code}:\n{(out.getvalue() + err.getvalue())[-2000:]}"
    require(code in ((0, 1, 2) if command in _MAY_FAIL else (0, 2)), printed)
    require("Traceback" not in err.getvalue(), printed)
    lines = err.getvalue().splitlines()
    require(code != 2 or len(lines) == 1, printed)
    return lines[0] if code == 2 else ""
