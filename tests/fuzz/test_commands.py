"""Calls of the commands in scripts/ with random arguments. A refusal is one line on stderr, with exit code 2."""

import argparse
import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.commands import parser_of, run_script
from tests.conftest import ROOT
from tests.fuzz.check import bad_refusal, limits, record
from tests.fuzz.strategies import NUMBERS, TEXTS, sometimes
from trainer.base.config.argument_types import existing_folder, file_to_write, utf8
from trainer.base.config.fields import settings
from trainer.base.config.toml_text import toml_value

_COMMANDS = sorted(f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py"))
_MAY_FAIL = ("scripts/checkpoint.py", "scripts/compare_runs.py", "scripts/coordinate_check.py", "scripts/parity.py")
"""Commands that exit with code 1 if they find a difference or damage."""
_ONLY_INVALID = {
    "scripts/coordinate_check.py",
    "scripts/evaluate.py",  # ends its process, which is that of the tests
    "scripts/find_lr.py",
    "scripts/generate.py",  # likewise
    "scripts/leak_probe.py",
    "scripts/parity.py",
    "scripts/prepare_data.py",
    "scripts/train_tokenizer.py",
}
"""Commands that get an unknown flag. Valid calls of those without a comment would reach the limit of CPU time."""
_PLAN = "scripts/plan.py"
"""Command whose valid calls start a process that imports torch, so that most calls are invalid."""

_PATHS = ["run", "run/checkpoints/step-00000002", "run/config.toml", "new", "no/such", str(ROOT)]
"""Paths, in a folder that holds the run."""
_VALUES = [*NUMBERS, *TEXTS, *_PATHS, *_PATHS, "-5", "--", "--x", "\udcff"]


def _parser(command: str) -> argparse.ArgumentParser:
    return parser_of(importlib.import_module(command.removesuffix(".py").replace("/", ".")).main)


def _likely_values(action: argparse.Action) -> list[str]:
    """Return values of an option's type."""
    if action.choices:
        return [str(choice) for choice in action.choices]
    if action.type in (None, Path, existing_folder, file_to_write, utf8):
        return _PATHS
    return [value for value in _VALUES if _accepts(action.type, value)]


def _accepts(parse: Callable[[str], Any], value: str) -> bool:
    try:
        return parse(value) is not None
    except (ValueError, TypeError, argparse.ArgumentTypeError):
        return False


@st.composite
def _words(draw: st.DrawFn, parser: argparse.ArgumentParser, wrong: int) -> list[str]:
    """Draw arguments.

    Args:
        wrong: Percentage of values that may have another type than the declared one.
    """
    words: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            name = draw(st.sampled_from(list(action.choices)))
            words.append(draw(st.sampled_from(_VALUES)) if draw(sometimes(wrong // 5)) else name)
            words += draw(_words(action.choices[name], wrong))
        elif action.option_strings == ["--section.key"]:
            for setting in draw(st.lists(st.sampled_from(list(settings().values())), max_size=2)):
                words += [f"--{setting.key}", toml_value(setting.default)]
        elif not isinstance(action, argparse._HelpAction) and draw(
            sometimes(15 + wrong if action.option_strings else 97)
        ):
            likely = _likely_values(action)
            count = 0 if action.nargs == 0 else 1 if not wrong else draw(st.sampled_from([*[1] * 12, 2, 0]))
            words += action.option_strings[:1]
            for _ in range(count):
                words.append(draw(st.sampled_from(_VALUES if not likely or draw(sometimes(wrong)) else likely)))
    return words


_RUN_OR_CHECKPOINT = st.sampled_from(["run", "run/checkpoints/step-00000002"])
_VALID_CALLS = st.one_of(
    st.tuples(st.just("scripts/checkpoint.py"), st.sampled_from(["list", "verify", "inspect"]), _RUN_OR_CHECKPOINT),
    st.tuples(st.just("scripts/compare_runs.py"), st.just("run"), st.just("run")),
    st.tuples(st.just("scripts/inspect_samples.py"), st.just("run"), st.sampled_from(["1", "2"])),
    st.tuples(st.just("scripts/convert_hf.py"), st.just("to-hf"), _RUN_OR_CHECKPOINT, st.just("new")),
    st.tuples(st.just("scripts/report.py"), st.just("run"), st.just("--no-plan")),
)
"""Calls that are accepted. Random arguments rarely are."""


@st.composite
def calls(draw: st.DrawFn) -> list[str]:
    """Draw a command and its arguments."""
    if draw(sometimes(40)):
        return list(draw(_VALID_CALLS))
    command = draw(st.sampled_from(_COMMANDS))
    wrong = draw(st.sampled_from([0, 15]))
    words = draw(_words(_parser(command), wrong))
    if wrong and draw(sometimes(20)):
        words.insert(draw(st.integers(0, len(words))), draw(st.sampled_from(_VALUES)))
    too_long = command in _ONLY_INVALID or {"--search", "--watch"} & {*words}  # the second serves a page until Ctrl-C
    if too_long or (command == _PLAN and not draw(sometimes(10))):
        words.append(draw(st.sampled_from(["--x", "--steps", "--vocab-size"])))
    return [command, *words]


@given(calls())
def test_a_command_ends_without_a_traceback_and_refuses_its_arguments_with_one_line(trained_run, call):
    with limits() as folder:
        shutil.copytree(trained_run, folder / "run")
        done = run_script(*call, folder=folder)
    printed = f"{done.args} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
    assert done.returncode in ((0, 1, 2) if call[0] in _MAY_FAIL else (0, 2)), printed
    assert "Traceback" not in done.stderr, printed
    record("refused" if done.returncode == 2 else "accepted")
    if done.returncode == 2:
        (line,) = done.stderr.splitlines()
        assert not bad_refusal(line), printed
