"""--help of every command."""

import argparse
import importlib
import signal
import subprocess
import sys

import pytest

from tests.commands import parser_of
from tests.conftest import ROOT

COMMANDS = sorted(f"scripts.{path.stem}" for path in (ROOT / "scripts").glob("*.py"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_option_with_a_text_and_a_value(command, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    parsers = [parser_of(importlib.import_module(command).main)]
    while parsers:
        parser = parsers.pop()
        usage = parser.format_usage()
        assert usage.startswith("usage: ") and parser.format_help().startswith(usage)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
                continue
            assert action.help, action
            takes_value = action.option_strings and action.nargs != 0
            assert not takes_value or action.metavar or action.choices, action
            assert not action.option_strings or action.option_strings[0] in usage


def test_help_and_wrong_arguments_do_not_wait_for_torch():
    """All scripts in one process, because each new one takes 0.2 s."""
    program = (
        "import runpy, sys\n"
        "for script in sys.argv[1:]:\n"
        "    for word, code in (('--help', 0), ('--no-such-option=1', 2)):\n"
        "        if code and 'settings=True' in open(script).read(): continue  # settings are checked later\n"
        "        sys.argv = [script, word]\n"
        "        try: runpy.run_path(script, run_name='__main__')\n"
        "        except SystemExit as exit: assert exit.code == code, (script, word, exit.code)\n"
        "        assert 'torch' not in sys.modules, script\n"
    )
    scripts = [f"{command.replace('.', '/')}.py" for command in COMMANDS]
    done = subprocess.run([sys.executable, "-c", program, *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
