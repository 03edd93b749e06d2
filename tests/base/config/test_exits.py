"""Ends of commands."""

import ast
import errno
import os
import signal
import subprocess
import sys

import pytest

from tests.commands import run_script
from tests.conftest import ROOT
from trainer.base.config import ConfigError
from trainer.base.config.environment_variables import check_environment
from trainer.base.config.exits import run_to_end
from trainer.base.system import console
from trainer.base.system.children import children_ignore_signals
from trainer.base.system.streams import MAX_LINE, print_error, shorten

RUNNABLE = [path for path in (ROOT / "scripts").rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
SCRIPTS = sorted(str(path.relative_to(ROOT)) for path in RUNNABLE)


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc: expected an integer from 1 to 2147483648"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK=x: expected an integer from 0 to 2147483648"),
        ({"RANK": "9" * 5000}, shorten(f"RANK={'9' * 5000}: expected an integer from 0 to 2147483648")),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK=1: must be below WORLD_SIZE=1"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2: needs RANK too; torchrun sets both"),
        ({"LOG_RANK": "first"}, 'LOG_RANK=first: expected "all" or a list of ranks such as "0,3"'),
    ],
)
def test_wrong_variables_of_a_launcher_are_one_line_in_each_script(monkeypatch, variables, line):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = run_script("scripts/compare_runs.py", "--help")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line + "\n")


def test_the_port_of_a_single_process_is_not_read(monkeypatch):
    """Kubernetes sets MASTER_PORT=tcp://... if a service has the name "master"."""
    monkeypatch.setenv("MASTER_PORT", "tcp://10.0.0.1:80")
    check_environment()


def test_long_messages_keep_their_beginning_and_end():
    assert shorten("x" * MAX_LINE) == "x" * MAX_LINE
    shortened = shorten("--run.name " + 5000 * "x" + ": must be shorter")
    assert len(shortened) <= MAX_LINE
    assert shortened.startswith("--run.name xxx") and shortened.endswith("xxx: must be shorter")


def test_a_wrong_choice_of_a_script_names_the_nearest_one():
    done = run_script("scripts/generate.py", "x", "--prompt", "x", "--dtype", "BF16")
    assert done.stderr.startswith("argument --dtype: invalid choice: 'BF16' (choose from ")
    assert done.stderr.endswith("; did you mean 'bf16'?\n")


def test_messages_can_neither_control_nor_fill_the_console(capsys):
    print_error("a\x1b[2J" + 5000 * "x" + "\nb\r")
    console.warning("c\x1b[2J" + 5000 * "x")
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("a\\x1b[2Jx") and len(first) <= MAX_LINE and second == "b\\r"
    assert third[9:].startswith("warning: c\\x1b[2Jx") and len(third) <= MAX_LINE + 20


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("", "x must be y"), "x must be y\n"),
        (ConfigError("", "a\nb\u202e"), "a\\nb\\u202e\n"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device\n"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "folder"), "folder: File name too long\n"),
    ],
)
def test_errors_of_a_script_are_one_printable_line(error, line, capsys):
    def main():
        raise error

    with pytest.raises(SystemExit) as exit:
        run_to_end(main)
    assert (exit.value.code, capsys.readouterr().err) == (2, line)


def test_other_errors_are_not_hidden():
    def main():
        raise OSError("no errno")

    with pytest.raises(OSError, match="no errno"):
        run_to_end(main)


FULL = "stdout: No space left on device\n"
CLOSED = "stdout is closed, so that no result can be printed; to discard the results, use > /dev/null\n"


@pytest.mark.parametrize(("reader", "code", "error"), [("pipe", 141, ""), ("/dev/full", 2, FULL)])
@pytest.mark.parametrize("output", ["'x' * 10**6", "'x', flush=True", "'x'"])
def test_output_that_nobody_reads_ends_a_script_without_a_traceback(reader, code, error, output):
    program = f"from trainer.base.config.exits import run_to_end; run_to_end(lambda: print({output}))"
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") if reader == "pipe" else open(reader, "w") as out:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (code, error)


@pytest.mark.parametrize("command", ["train.py --help", "train.py --print-config", *SCRIPTS])
def test_a_command_that_prints_results_needs_stdout(command, tmp_path):
    def with_stdout(redirection):
        shell = f"exec {sys.executable} {command} {redirection}"
        return subprocess.run(shell, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=120)

    done = with_stdout(">&-")
    assert (done.returncode, done.stderr) == (2, CLOSED)
    if command.startswith("train.py"):
        done = with_stdout("> /dev/full")
        assert (done.returncode, done.stderr) == (2, FULL)


def test_an_interrupt_before_run_to_end_is_one_line():
    program = (
        "import os, signal; from trainer.base.system.signals import exit_on_interrupt\n"
        "exit_on_interrupt(); os.kill(os.getpid(), signal.SIGINT)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_handle_interrupts_before_they_import_other_packages(script):
    imported = set()
    for statement in ast.parse((ROOT / script).read_text()).body:
        if isinstance(statement, ast.If) and "exit_on_interrupt()" in ast.unparse(statement):
            break
        if isinstance(statement, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            imported.add(statement.module.partition(".")[0])
    else:
        pytest.fail("the script does not call exit_on_interrupt")
    assert imported - set(sys.stdlib_module_names) == {"trainer"}


def test_sigterm_ends_a_script_like_an_interrupt():
    program = (
        "import os, signal; from trainer.base.config.exits import run_to_end\n"
        "run_to_end(lambda: os.kill(os.getpid(), signal.SIGTERM), 'ended')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "ended\n")


def test_interrupts_wait_until_a_child_process_has_started():
    """The child has blocked SIGINT, which this process receives when the block ends."""
    program = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    with pytest.raises(KeyboardInterrupt), children_ignore_signals():
        os.kill(os.getpid(), signal.SIGINT)
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert child.stdout == "True\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
