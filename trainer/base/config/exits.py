"""Ends of commands: what is wrong is one line on stderr, and the exit code says which kind it is."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from trainer.base.config.environment_variables import check_environment
from trainer.base.config.errors import ConfigError
from trainer.base.system.children import end_children
from trainer.base.system.files import describe
from trainer.base.system.process import local_rank
from trainer.base.system.signals import Terminated, raise_interrupts
from trainer.base.system.streams import STDOUT, name_stdout_in_errors, open_standard_streams, print_error, printable


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Context manager that ends the process with one line and code 2 on a ConfigError or an error of the file system, and with
    code 141 if the reader of stdout has exited. All ranks of a node fail with the same line, which only local rank 0 prints."""
    try:
        yield
    except ConfigError as error:
        _exit_with_line(str(error))
    except BrokenPipeError:
        _exit_without_stdout(128 + signal.SIGPIPE)
    except OSError as error:
        if error.strerror is None:  # not an error of the file system
            raise
        if error.filename == STDOUT:
            print_error(describe(error))
            _exit_without_stdout(2)
        _exit_with_line(describe(error))


@contextmanager
def _results_on_stdout() -> Iterator[None]:
    """Context manager like `one_line_errors`, which also writes what stdout holds back."""
    name_stdout_in_errors()
    with one_line_errors():
        try:
            yield
        finally:
            sys.stdout.flush()


def answer_early(parser: argparse.ArgumentParser) -> None:
    """Print the help, or one line about wrong arguments, and exit. A script calls this before it imports torch, which takes
    seconds, and parses the arguments again later."""
    with _results_on_stdout():
        parser.parse_known_args()


def run_to_end(main: Callable[[], None], interrupted: str = "interrupted") -> None:
    """Check the environment and call main, whose errors `one_line_errors` prints. On Ctrl-C or SIGTERM, print one line and exit
    with code 130 or 143."""
    open_standard_streams()
    try:
        raise_interrupts()
        with _results_on_stdout():
            check_environment()
            main()
    except KeyboardInterrupt as interrupt:
        print_error(interrupted)
        end_children()
        os._exit(143 if isinstance(interrupt, Terminated) else 130)


def end_process_after(work: Callable[[], None]) -> NoReturn:
    """Call work, whose errors `one_line_errors` prints, and exit without the interpreter's clean-up, during which gloo's threads
    sometimes abort."""
    code = 0
    try:
        with one_line_errors():
            work()
    except SystemExit as exit:
        code = exit.code
    sys.stdout.flush()
    os._exit(code)


def _exit_with_line(line: str) -> NoReturn:
    if local_rank():
        time.sleep(5)  # meanwhile local rank 0 prints the line and exits, and the launcher stops this rank
    print_error(printable(line))
    sys.exit(2)


def _exit_without_stdout(code: int) -> NoReturn:
    """Exit although stdout cannot be written, as in `--help | head`. The interpreter's clean-up must not write to it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
