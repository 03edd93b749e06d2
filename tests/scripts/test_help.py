"""--help of every command."""

import argparse
import importlib
import signal

import pytest

from tests.commands import parser_of
from tests.conftest import ROOT

COMMANDS = sorted(f"scripts.{path.stem}" for path in (ROOT / "scripts").glob("*.py"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_option_with_a_text_and_a_value(command, monkeypatch):
    if command.endswith("train_tokenizer"):
        pytest.importorskip("tokenizers")
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
