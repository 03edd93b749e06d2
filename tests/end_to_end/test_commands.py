"""The commands as a user runs them: output, exit codes, files, signals."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from tests.ports import free_port
from tests.training_runs import records

SCRIPT = str(ROOT / "run_llama_train.sh")


def environment(**variables):
    own = ("NGPU", "NNODES", "NODE_RANK", "MASTER_PORT", "LOG_RANK")
    return {k: v for k, v in os.environ.items() if k not in own} | {"PYTHON": sys.executable} | variables


def call(*command, cwd=None, **variables):
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env=environment(**variables),
    )


def start(*command, **variables):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([str(word) for word in command], env=environment(**variables), **pipes)


def await_step(process):
    for line in process.stdout:
        if "step" in line and "loss" in line:
            return


@pytest.fixture(scope="module")
def complete_runs(tiny, tmp_path_factory):
    """For 1 and 2 ranks: the working folder of a complete run, and its command's result."""
    folders = {size: tmp_path_factory.mktemp(f"complete_{size}") for size in (1, 2)}
    options = ["--metrics.sinks", "console,jsonl,tensorboard"]
    return {size: (cwd, call(SCRIPT, *tiny, *options, cwd=cwd, NGPU=str(size))) for size, cwd in folders.items()}


def test_one_process_trains_from_any_working_folder(complete_runs):
    cwd, done = complete_runs[1]
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    folder = cwd / "outputs" / "tiny"
    assert sorted(p.name for p in folder.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.toml",
        "environment.json",
        "log.txt",
        "metrics.jsonl",
        "sinks",
        "tb",
    ]
    assert [r["step"] for r in records(folder)] == [1, 2, 3, 4]
    assert json.loads((folder / "environment.json").read_text())["world_size"] == 1
    assert "step 4/4 | loss " in done.stdout


def test_a_finished_run_is_neither_repeated_nor_resumed_with_another_seed(complete_runs, tiny):
    cwd, _ = complete_runs[1]
    other = call(SCRIPT, *tiny, "--run.seed", "5", cwd=cwd, NGPU="1")
    assert (other.returncode, other.stdout) == (2, "")
    assert other.stderr.startswith("cannot resume from outputs/tiny/checkpoints/step-00000004: run.seed was 0, is 5;")

    again = call(SCRIPT, *tiny, cwd=cwd, NGPU="1")
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout[9:] == "tiny already finished at step 4; raise --training.steps to continue\n"


def test_one_and_two_processes_train_to_the_same_losses(complete_runs):
    for _, done in complete_runs.values():
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
    one, two = (records(cwd / "outputs" / "tiny") for cwd, _ in complete_runs.values())
    assert [r["loss"] for r in one] == pytest.approx([r["loss"] for r in two], rel=5e-6)


def test_an_error_that_only_the_ranks_can_find_is_printed_once(complete_runs, tiny):
    cwd, first = complete_runs[2]
    assert first.returncode == 0
    files = sorted((path, path.stat().st_size) for path in cwd.rglob("*") if path.name not in (".lock", "log.txt"))
    done = call(SCRIPT, *tiny, "--training.steps", "8", "--run.seed", "5", cwd=cwd, NGPU="2")
    assert done.returncode == 2
    assert done.stderr == (
        "cannot resume from outputs/tiny/checkpoints/step-00000004: run.seed was 0, is 5; "
        "set another --run.name for a new run\n"
    )
    assert (
        sorted((path, path.stat().st_size) for path in cwd.rglob("*") if path.name not in (".lock", "log.txt")) == files
    )


def test_gpus_are_counted_where_nvidia_smi_exists(tmp_path):
    """run_llama_train.sh calls a function of trainer/runtime/device.py for it; here, the count is 0."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = call(SCRIPT, "--training.stepz", "5", PATH=f"{tmp_path}:{os.environ['PATH']}")
    line = "--training.stepz: unknown setting; did you mean '--training.steps'?\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def two_nodes(command, *options):
    """Start two launchers as on two nodes, the second with further options. Return their exit codes and outputs."""
    variables = {"NNODES": "2", "NGPU": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    launchers = [start(*command, *(options if node == "1" else ()), NODE_RANK=node, **variables) for node in "01"]
    outputs = [launcher.communicate(timeout=200) for launcher in launchers]
    return [launcher.returncode for launcher in launchers], outputs


def test_two_nodes_train_together(tiny, tmp_path):
    codes, outputs = two_nodes([SCRIPT, *tiny, "--run.output_folder", tmp_path])
    assert codes == [0, 0], outputs
    assert [("step 4/4" in out, err) for out, err in outputs] == [(True, ""), (False, "")]
    assert json.loads((tmp_path / "tiny" / "environment.json").read_text())["world_size"] == 2


def await_listener(port):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("localhost", int(port)), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"no process listens at port {port}")


def test_an_elastic_run_continues_when_a_node_is_lost_and_when_it_rejoins(tiny, tmp_path):
    port = free_port()
    variables = {"NNODES": "1:2", "NGPU": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "MAX_RESTARTS": "2"}
    command = [SCRIPT, *tiny, "--run.output_folder", tmp_path, "--training.steps", "1000000"]
    command += ["--checkpoint.interval_steps", "5", "--checkpoint.keep", "2"]
    command += ["--metrics.sinks", "jsonl"]  # lines of endless steps would fill the pipe, and the run would wait

    def start_node():
        process = start(*command, **variables)
        await_listener(port)  # the first node hosts the rendezvous
        return process

    def await_size(size, *running):
        path, end = tmp_path / "tiny" / "environment.json", time.monotonic() + 300
        while not (path.exists() and path.read_text() and json.loads(path.read_text())["world_size"] == size):
            if time.monotonic() > end or any(process.poll() is not None for process in running):
                for process in running:
                    process.kill()
                pytest.fail(f"no run of {size} ranks: {[process.communicate() for process in running]}")
            time.sleep(0.05)

    first = start_node()
    second = start_node()
    await_size(2, first, second)
    second.kill()
    second.communicate()
    await_size(1, first)
    rejoined = start_node()
    await_size(2, first, rejoined)
    step = max((r["step"] for r in records(tmp_path / "tiny")), default=0)
    while max((r["step"] for r in records(tmp_path / "tiny")), default=0) < step + 10:
        assert first.poll() is None and rejoined.poll() is None
        time.sleep(0.05)
    first.terminate()
    for process in (first, rejoined):
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    steps = [r["step"] for r in records(tmp_path / "tiny")]
    assert steps == list(range(1, len(steps) + 1))


def test_nodes_with_different_settings_are_an_error(tiny, tmp_path):
    codes, outputs = two_nodes([SCRIPT, *tiny, "--run.output_folder", tmp_path], "--run.seed", "4")
    assert codes == [2, 2], outputs
    assert [err for _, err in outputs] == 2 * [
        "ranks were launched with different settings: run.seed is 0 on rank 0, 4 on rank 1\n",
    ]
    assert not (tmp_path / "tiny").exists()


def test_a_run_with_non_finite_losses_stops_and_does_not_save_them(tiny, tmp_path):
    done = call(SCRIPT, *tiny, "--optimizer.lr", "1e30", "--checkpoint.interval_steps", "1", cwd=tmp_path, NGPU="2")
    assert done.returncode == 1
    lines = sorted(re.sub(r"loss [^,]+", "loss X", re.sub(r"^[\d:]+ ", "", line)) for line in done.stderr.splitlines())
    # The rank that stops first may be ahead of the rank that warns.
    assert [line for line in lines if "warning" in line] == [
        f"warning: step {n}: loss X, gradient norm nan; update skipped ({n - 1} in a row, {n - 1} in total)"
        for n in (2, 3, 4)
    ]
    assert re.search(r"step 4: loss \S+, gradient norm nan: training stops, and this state is not saved", done.stderr)
    assert len(lines) == 4
    assert [p.name for p in (tmp_path / "outputs" / "tiny" / "checkpoints").iterdir()] == ["step-00000001"]


def test_an_unwritable_run_folder_is_an_error_before_training(tiny, tmp_path):
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "tiny").touch()
    done = call(SCRIPT, *tiny, cwd=tmp_path, NGPU="2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == '[run] name = "tiny" (default): outputs/tiny is a file, not a folder\n'
    (tmp_path / "outputs" / "tiny").unlink()
    (tmp_path / "outputs" / "tiny").mkdir()
    (tmp_path / "outputs" / "tiny" / "checkpoints").touch()
    done = call(SCRIPT, *tiny, cwd=tmp_path, NGPU="1")
    assert (done.returncode, done.stdout) == (2, "")
    origin = '[run] output_folder = "outputs" (default)'
    problem = "is a file, not a folder; move it away, or choose another --run.name"
    assert done.stderr == f"{origin}: outputs/tiny/checkpoints {problem}\n"


WRONG = {
    "--training.stpes 5": "--training.stpes: unknown setting; did you mean '--training.steps'?",
    "--model.overrides.n_layer 4": "--model.overrides.n_layer 4: llama3 has no dimension of this name; did you mean 'n_layers'?",
    "--parallel.dp_shard 3": None,
    "--data.dataset text --data.path /no/such": "--data.path /no/such: no such file or folder",
}


@pytest.mark.parametrize(("command", "ngpu"), [*zip(WRONG, "1212", strict=True), ("--parallel.dp_shard 3", "2")])
def test_a_wrong_setting_is_one_line_and_exit_code_2(command, ngpu, tmp_path):
    done = call(SCRIPT, *command.split(), cwd=tmp_path, NGPU=ngpu)
    message = f"--parallel.dp_shard 3: must equal the number of ranks, {ngpu}; -1 uses all remaining ranks"
    message += "; for 3 ranks: NGPU=3 ./run_llama_train.sh, or plan.py --world-size 3"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{WRONG[command] or message}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_run_with_invalid_data_leaves_no_folder(tiny, tmp_path):
    (tmp_path / "bad.jsonl").write_text("not JSON\n")
    data = ["--data.dataset", "jsonl", "--data.path", tmp_path / "bad.jsonl"]
    done = call(SCRIPT, *tiny, *data, "--run.output_folder", tmp_path / "out", NGPU="2")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert list((tmp_path / "out").iterdir()) == []


VARIABLES = {
    "NGPU=two": "NGPU=two: expected an integer from 1 to 4096",
    "NGPU=0": "NGPU=0: expected an integer from 1 to 4096",
    "NNODES=4:2": "NNODES=4:2: expected an integer of at least 1, or a minimum and a maximum such as 2:4",
    "NNODES=x": "NNODES=x: expected an integer of at least 1, or a minimum and a maximum such as 2:4",
    "NNODES=2": "NNODES=2: set MASTER_ADDR to the host name of the first node",
    "NNODES=2 NODE_RANK=2 MASTER_ADDR=x": "NODE_RANK=2: must be below NNODES=2",
    "NGPU=2 MASTER_PORT=70000": "MASTER_PORT=70000: expected an integer from 1 to 65535",
    "LOG_RANK=first": 'LOG_RANK=first: expected "all" or a list of ranks such as "0,3"',
    "LOG_RANK=1": "LOG_RANK=1: nothing would be logged, because this run has only rank 0",
    "WORLD_SIZE=abc": "WORLD_SIZE=abc: expected an integer from 1 to 2147483648",
    "LOCAL_RANK=x": "LOCAL_RANK=x: expected an integer from 0 to 2147483648",
    "RANK=1 WORLD_SIZE=1": "RANK=1: must be below WORLD_SIZE=1",
    "RANK=1 WORLD_SIZE=2": "WORLD_SIZE=2: needs MASTER_ADDR too; torchrun sets both",
    "NGPU=2 MASTER_PORT=http": "MASTER_PORT=http: expected an integer from 1 to 65535",
}


@pytest.mark.parametrize("variables", VARIABLES)
def test_a_wrong_environment_variable_is_one_line_and_exit_code_2(variables, tmp_path):
    done = call(SCRIPT, cwd=tmp_path, **{"NGPU": "1"} | dict(v.split("=") for v in variables.split()))
    assert (done.returncode, done.stdout, done.stderr) == (2, "", VARIABLES[variables] + "\n")


def test_print_config_prints_a_config_that_prints_the_same(tmp_path):
    done = call(SCRIPT, "--training.steps", "7", "--print-config", cwd=tmp_path, NGPU="2")
    assert done.returncode == 0
    (tmp_path / "printed.toml").write_text(done.stdout)
    again = call(SCRIPT, "--config", tmp_path / "printed.toml", "--print-config", cwd=tmp_path, NGPU="1")
    assert again.stdout == done.stdout
    assert "steps = 7" in done.stdout


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    """Return the process ids of the launcher's children that run train.py."""
    listing = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()[1:]]
    return [int(pid) for pid, parent, args in rows if int(parent) == launcher.pid and "train.py" in args]


def endless_run(tiny, tmp_path, ngpu, *options):
    """Start a run, wait for its first step, and kill it after the test."""
    command = [SCRIPT, *tiny, "--training.steps", "1000000", "--run.output_folder", tmp_path, *options]
    process = start(*command, NGPU=ngpu)
    await_step(process)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def running(tiny, tmp_path):
    """A run on two ranks that is training."""
    yield from endless_run(tiny, tmp_path, "2")


@pytest.fixture
def running_on_one_rank(tiny, tmp_path):
    """A run on one rank that is training."""
    yield from endless_run(tiny, tmp_path, "1")


@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_store_that_is_truncated_ends_the_run_with_one_line(tiny, tmp_path, prefetch):
    options = ["--data.store_folder", tmp_path / "stores", "--data.prefetch", str(prefetch)]
    for process in endless_run(tiny, tmp_path, "1", *options):
        (tokens,) = (tmp_path / "stores").glob("*/train.tokens")
        os.truncate(tokens, 0)
        _, errors = process.communicate(timeout=60)
        problem = f"{tokens}: the file has become shorter since it was opened"
        assert (process.returncode, errors) == (1, f"[rank 0] the training data cannot be read: {problem}\n")


def have_ended(pids) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            return True
        time.sleep(0.05)
    return False


STOPPED = r"stopped at step (\d+) \(checkpoint saved\); rerun the same command to resume"


def assert_saved_and_stopped(process, folder):
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, ""), errors
    step = int(re.search(STOPPED, out.splitlines()[-1])[1])
    assert [p.name for p in (folder / "checkpoints").iterdir()] == [f"step-{step:08d}"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_command_saves_and_ends_all_ranks(running, tmp_path, signum):
    pids = ranks_of(running)
    assert len(pids) == 2
    running.send_signal(signum)
    assert_saved_and_stopped(running, tmp_path / "tiny")
    assert have_ended(pids)


def test_a_signal_to_one_rank_saves_the_same_step_on_all(running, tmp_path):
    os.kill(ranks_of(running)[1], signal.SIGTERM)
    assert_saved_and_stopped(running, tmp_path / "tiny")


def test_a_signal_to_launcher_and_ranks_is_one_request(running, tmp_path):
    """Schedulers signal all processes of a job."""
    for pid in [*ranks_of(running), running.pid]:
        os.kill(pid, signal.SIGTERM)
    assert_saved_and_stopped(running, tmp_path / "tiny")


def test_a_second_signal_ends_the_run_without_saving(running, tmp_path):
    pids = ranks_of(running)
    os.kill(pids[1], signal.SIGSTOP)  # so that saving is impossible
    running.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    running.send_signal(signal.SIGTERM)
    os.kill(pids[1], signal.SIGCONT)
    running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM
    assert have_ended(pids)


def test_a_killed_rank_ends_the_run_in_a_few_lines(running):
    """The exit code is that of the killed rank (137) or of its peer (1), whichever the launcher sees first."""
    pids = ranks_of(running)
    os.kill(pids[1], signal.SIGKILL)
    _, errors = running.communicate(timeout=60)
    assert running.returncode in (1, 128 + signal.SIGKILL)
    assert "Traceback" not in errors
    assert len(errors.splitlines()) <= 2, errors
    assert have_ended(pids)


def test_a_killed_rank_is_restarted_and_the_run_resumes(tiny, tmp_path):
    command = [SCRIPT, *tiny, "--training.steps", "60", "--run.output_folder", tmp_path]
    process = start(*command, "--checkpoint.interval_steps", "5", NGPU="2", MAX_RESTARTS="1")
    for line in process.stdout:
        if "step  8/60" in line:
            break
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert re.search(r"resuming from \S+ \(step \d+, saved by 2 ranks\)", out)
    assert [r["step"] for r in records(tmp_path / "tiny")] == list(range(1, 61))


def test_ranks_end_when_the_launcher_is_killed(running):
    pids = ranks_of(running)
    running.kill()
    assert have_ended(pids)


def test_a_run_folder_in_use_is_refused(running_on_one_rank, tiny, tmp_path):
    done = call(SCRIPT, *tiny, "--run.output_folder", tmp_path, NGPU="1")
    assert (done.returncode, done.stdout) == (2, "")
    expected = rf"{tmp_path}/tiny is in use by process \d+ on \S+, since [-0-9: ]+; choose another --run.name"
    assert re.fullmatch(expected, done.stderr.strip())


def test_an_interrupted_run_of_one_process_is_saved(running_on_one_rank, tmp_path):
    running_on_one_rank.send_signal(signal.SIGINT)
    assert_saved_and_stopped(running_on_one_rank, tmp_path / "tiny")
