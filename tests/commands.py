"""Commands of scripts/, called in the process of the tests. Importing torch takes seconds in each new process."""

import argparse
import contextlib
import importlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn
from unittest import mock

from tests.conftest import ROOT
from trainer.base.config.exits import run_to_end

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)


def parser_of(main: Callable[[], None]) -> argparse.ArgumentParser:
    """Return the parser of a command without parsing any arguments."""
    parsers = []

    def parse(self: argparse.ArgumentParser, *_: object) -> NoReturn:
        parsers.append(self)
        raise SystemExit

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", parse), contextlib.suppress(SystemExit):
        main()
    return parsers[0]


def run_script(script: str, *words: object, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Call the main function of a script with arguments, in a folder. Return its exit code and output."""
    main = importlib.import_module(script.removesuffix(".py").replace("/", ".")).main
    argv, previous = [script, *map(str, words)], os.getcwd()
    out, err, code = io.StringIO(), io.StringIO(), 0
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    os.chdir(folder)
    try:
        with (
            mock.patch.object(sys, "argv", argv),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            run_to_end(main)
    except SystemExit as exit:
        code = exit.code or 0
    finally:
        os.chdir(previous)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())
