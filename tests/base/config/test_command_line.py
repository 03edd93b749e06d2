import ast
import errno
import os
import signal
import subprocess
import sys

import pytest

from tests.commands import run_script
from tests.conftest import ROOT
from trainer.base.config import ConfigError, separate_tasks
from trainer.base.config.environment_variables import check_environment
from trainer.base.config.exits import one_line_errors, run_to_end
from trainer.base.config.separate_tasks import refuse_separate_tasks
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


SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}


@pytest.fixture
def variables(monkeypatch):
    """Function that sets environment variables, after those of a cluster are removed."""
    for name in ("WORLD_SIZE", "NNODES", *separate_tasks._TASK_COUNTS):
        monkeypatch.delenv(name, raising=False)
    return lambda values: [monkeypatch.setenv(*pair) for pair in values.items()]


@pytest.mark.parametrize(
    ("launcher", "count", "index"),
    [
        ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("mpirun", "PMI_SIZE", "PMI_RANK"),  # MPICH and Intel MPI
        ("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),  # MVAPICH2
        ("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ],
)
def test_several_tasks_without_a_rendezvous_are_refused(variables, monkeypatch, launcher, count, index, capsys):
    line = (
        f"{count}=2: {launcher} has started 2 tasks of this command, but the run has 1 node. For one run, start one task per "
        "node and set NNODES, NODE_RANK and MASTER_ADDR (docs/multi_node.md). For separate runs, start each task with "
        f"env -u {count}\n"
    )
    monkeypatch.setattr(separate_tasks.time, "sleep", lambda _: None)
    for task, expected in (("0", line), ("1", "")):  # the first task prints the line for all
        variables({count: "2", index: task})
        with pytest.raises(SystemExit) as exit, one_line_errors():
            refuse_separate_tasks()
        assert (exit.value.code, capsys.readouterr().err) == (2, expected)


def test_more_tasks_than_nodes_are_refused_and_the_line_names_all_variables_to_remove(variables):
    variables({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "PMI_SIZE": "4", "NNODES": "2"})
    with pytest.raises(ConfigError) as error:
        refuse_separate_tasks(2)
    line = str(error.value)
    assert line.startswith(
        "SLURM_STEP_NUM_TASKS=4: srun has started 4 tasks of this command, but the run has 2 nodes. "
    )
    assert line.endswith(" start each task with env -u SLURM_STEP_NUM_TASKS -u PMI_SIZE")


@pytest.mark.parametrize("command", ["train.py", "trainer/launch.py"])
def test_nnodes_1_does_not_allow_several_tasks(command):
    """A script may set it as a matter of course. train.py ignores it."""
    variables = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"} | SRUN | {"NNODES": "1"}
    done = subprocess.run([sys.executable, ROOT / command], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("SLURM_STEP_NUM_TASKS=2: srun has started 2 tasks")


@pytest.mark.parametrize(
    "values",
    [
        {
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": "0",
            "SLURM_JOB_ID": "7",
        },  # a batch script, or the shell of an allocation
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},  # srun --pty
        MPIRUN | {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "node-a"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {},
    ],
)
def test_one_task_or_tasks_with_a_rendezvous_are_not_refused(variables, values):
    variables(values)
    refuse_separate_tasks()


@pytest.mark.parametrize("nodes", [2, 4])  # all nodes, and two of an elastic run
def test_one_task_per_node_is_not_refused(variables, nodes):
    variables(SRUN)
    refuse_separate_tasks(nodes)


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
