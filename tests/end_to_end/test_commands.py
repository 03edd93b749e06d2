"""The commands as a user types them: output, exit codes, files."""

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
from tests.training_runs import records

SCRIPT = str(ROOT / "run_llama_train.sh")


def environment(**more):
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("NGPU", "NNODES", "NODE_RANK", "MASTER_PORT", "LOG_RANK")
    }
    return inherited | {"PYTHON": sys.executable} | more


def call(*command, cwd=None, **variables):
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env=environment(**variables),
    )


def test_one_process_trains_from_anywhere_and_says_what_it_does(tiny, tmp_path):
    done = call(SCRIPT, *tiny, "--metrics.tensorboard", "true", cwd=tmp_path, NGPU="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    folder = tmp_path / "outputs" / "tiny"
    assert sorted(p.name for p in folder.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "tb",
    ]
    assert [r["step"] for r in records(folder)] == [1, 2, 3, 4]
    assert json.loads((folder / "environment.json").read_text())["world_size"] == 1
    assert "step 4/4 | loss " in done.stdout

    other = call(SCRIPT, *tiny, "--run.seed", "5", cwd=tmp_path, NGPU="1")
    assert (other.returncode, other.stdout) == (2, "")
    assert other.stderr.startswith("cannot resume from outputs/tiny/checkpoints/step-00000004: run.seed was 0, is 5;")

    again = call(SCRIPT, *tiny, cwd=tmp_path, NGPU="1")
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout[9:] == "tiny is finished: step 4; a higher --training.steps trains on\n"


def test_several_processes_train_to_the_same_losses(tiny, tmp_path):
    for size in ("1", "2"):
        done = call(SCRIPT, *tiny, "--run.name", size, cwd=tmp_path, NGPU=size)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
    one, two = (records(tmp_path / "outputs" / size) for size in ("1", "2"))
    assert [r["loss"] for r in one] == pytest.approx([r["loss"] for r in two], rel=5e-6)


def two_machines(command, *more):
    """Two launchers, as on two machines, that find each other at a port of this one; more: arguments of the second.
    Their exit codes and outputs."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    variables = {"NNODES": "2", "NGPU": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [*map(str, command), *(more if node == "1" else ())],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(NODE_RANK=node, **variables),
        )
        for node in "01"
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    return [process.returncode for process in processes], outputs


def test_two_machines_train_together(tiny, tmp_path):
    codes, outputs = two_machines([SCRIPT, *tiny, "--run.output_folder", tmp_path])
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
    raise AssertionError(f"nobody listens at {port}")


def test_a_run_goes_on_with_the_machines_that_are_left_and_takes_in_those_that_come_back(tiny, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    variables = {"NNODES": "1:2", "NGPU": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "MAX_RESTARTS": "2"}
    command = [SCRIPT, *tiny, "--run.output_folder", str(tmp_path), "--training.steps", "1000000"]
    command += ["--checkpoint.interval_steps", "5", "--checkpoint.keep", "2"]

    def start():
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=environment(**variables), **pipes)
        await_listener(port)  # the first machine is where the others meet
        return process

    def await_size(size, *running):
        place = tmp_path / "tiny" / "environment.json"
        while not (place.exists() and place.read_text() and json.loads(place.read_text())["world_size"] == size):
            assert all(process.poll() is None for process in running), [p.communicate() for p in running if p.poll()]
            time.sleep(0.05)

    first = start()
    second = start()
    await_size(2, first, second)
    second.kill()
    second.communicate()
    await_size(1, first)
    again = start()
    await_size(2, first, again)
    step = max((r["step"] for r in records(tmp_path / "tiny")), default=0)
    while max((r["step"] for r in records(tmp_path / "tiny")), default=0) < step + 10:
        assert first.poll() is None and again.poll() is None
        time.sleep(0.05)
    first.terminate()
    for process in (first, again):
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    steps = [r["step"] for r in records(tmp_path / "tiny")]
    assert steps == list(range(1, len(steps) + 1))


def test_machines_with_different_settings_are_refused(tiny, tmp_path):
    codes, outputs = two_machines([SCRIPT, *tiny, "--run.output_folder", tmp_path], "--run.seed", "4")
    assert codes == [2, 2], outputs
    assert [err for _, err in outputs] == 2 * [
        "the ranks were not started alike: run.seed is 0 on rank 0, 4 on rank 1\n",
    ]
    assert not (tmp_path / "tiny").exists()


def test_a_loss_that_is_no_number_stops_the_run_and_is_not_saved(tiny, tmp_path):
    done = call(SCRIPT, *tiny, "--optimizer.lr", "1e30", "--checkpoint.interval_steps", "1", cwd=tmp_path, NGPU="2")
    assert done.returncode == 1
    lines = sorted(re.sub(r"loss [^,]+", "loss X", re.sub(r"^[\d:]+ ", "", line)) for line in done.stderr.splitlines())
    # The rank that stops first may be ahead of the one that warns.
    assert [line for line in lines if "warning" in line] == [
        f"warning: step {n}: loss X, gradient norm nan; update left out, {n - 1} in a row, {n - 1} in all"
        for n in (2, 3, 4)
    ]
    assert re.search(r"step 4: loss \S+, gradient norm nan; stopped, and this state is not saved", done.stderr)
    assert len(lines) == 4
    assert [p.name for p in (tmp_path / "outputs" / "tiny" / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_run_folder_that_cannot_be_written_is_told_before_the_work(tiny, tmp_path):
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "tiny").touch()
    done = call(SCRIPT, *tiny, cwd=tmp_path, NGPU="2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == '[run] name = "tiny" (default): outputs/tiny is a file, not a folder\n'
    (tmp_path / "outputs" / "tiny").unlink()
    (tmp_path / "outputs" / "tiny").mkdir()
    (tmp_path / "outputs" / "tiny" / "checkpoints").touch()
    done = call(SCRIPT, *tiny, cwd=tmp_path, NGPU="2")
    assert (done.returncode, done.stdout) == (2, "")
    origin = '[run] output_folder = "outputs" (default)'
    assert done.stderr == f"{origin}: outputs/tiny/checkpoints cannot be written (File exists)\n"


WRONG = {
    "--training.stpes 5": "--training.stpes: unknown setting; did you mean '--training.steps'?",
    "--model.overrides.n_layer 4": "--model.overrides.n_layer 4: unknown dimension of llama3; did you mean 'n_layers'?",
    "--parallel.dp_shard 3": None,
    "--data.dataset text --data.path /no/such": "--data.path /no/such: no such file or folder, and no match as a pattern",
}


@pytest.mark.parametrize("ngpu", ["1", "2"])
@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_setting_is_one_line_and_exit_code_2(command, ngpu, tmp_path):
    done = call(SCRIPT, *command.split(), cwd=tmp_path, NGPU=ngpu)
    world = {"1": "1 rank", "2": "2 ranks"}[ngpu]
    here = f"--parallel.dp_shard 3: this run has {world}; -1 takes what is left"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{WRONG[command] or here}\n")
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_only_the_ranks_can_find_is_told_once(tiny, tmp_path):
    first = call(SCRIPT, *tiny, cwd=tmp_path, NGPU="2")
    assert first.returncode == 0
    files = sorted((path, path.stat().st_size) for path in tmp_path.rglob("*") if path.name != ".lock")
    done = call(SCRIPT, *tiny, "--training.steps", "8", "--run.seed", "5", cwd=tmp_path, NGPU="2")
    assert done.returncode == 2
    assert done.stderr == (
        "cannot resume from outputs/tiny/checkpoints/step-00000004: run.seed was 0, is 5; "
        "another --run.name starts a new run\n"
    )
    assert sorted((path, path.stat().st_size) for path in tmp_path.rglob("*") if path.name != ".lock") == files


def test_a_refused_run_leaves_no_folder(tiny, tmp_path):
    (tmp_path / "bad.jsonl").write_text("no JSON\n")
    data = ["--data.dataset", "jsonl", "--data.path", tmp_path / "bad.jsonl"]
    done = call(SCRIPT, *tiny, *data, "--run.output_folder", tmp_path / "out", NGPU="2")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert list((tmp_path / "out").iterdir()) == []


VARIABLES = {
    "NGPU=two": "NGPU=two: expected an integer of at least 1",
    "NGPU=0": "NGPU=0: expected an integer of at least 1",
    "NNODES=4:2": "NNODES=4:2: expected an integer of at least 1, or the fewest and the most as 2:4",
    "NNODES=x": "NNODES=x: expected an integer of at least 1, or the fewest and the most as 2:4",
    "NNODES=2": "NNODES=2: needs MASTER_ADDR, the name of the first machine",
    "NNODES=2 NODE_RANK=2 MASTER_ADDR=x": "NODE_RANK=2: must be below NNODES=2",
    "NGPU=2 MASTER_PORT=70000": "MASTER_PORT=70000: must be at most 65535",
    "LOG_RANK=first": "LOG_RANK=first: expected all, or numbers of ranks such as 0,3",
    "NGPU=2 MASTER_PORT=http": "MASTER_PORT=http: expected an integer of at least 1",
}


@pytest.mark.parametrize("variables", VARIABLES)
def test_wrong_variables_are_one_line_and_exit_code_2(variables, tmp_path):
    done = call(SCRIPT, cwd=tmp_path, **{"NGPU": "1"} | dict(v.split("=") for v in variables.split()))
    assert (done.returncode, done.stdout, done.stderr) == (2, "", VARIABLES[variables] + "\n")


def test_print_config_prints_what_runs(tmp_path):
    done = call(SCRIPT, "--training.steps", "7", "--print-config", cwd=tmp_path, NGPU="2")
    assert done.returncode == 0
    (tmp_path / "printed.toml").write_text(done.stdout)
    again = call(SCRIPT, "--config", tmp_path / "printed.toml", "--print-config", cwd=tmp_path, NGPU="1")
    assert again.stdout == done.stdout
    assert "steps = 7" in done.stdout


def ranks_of(process: subprocess.Popen) -> list[int]:
    """Processes below the launcher that run train.py."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    return [int(pid) for pid, parent, args in rows if int(parent) == process.pid and "train.py" in args]


@pytest.fixture
def endless(tiny, tmp_path):
    """A run on two ranks that has begun to train."""
    process = subprocess.Popen(
        [SCRIPT, *tiny, "--training.steps", "1000000", "--run.output_folder", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(NGPU="2"),
    )
    for line in process.stdout:
        if "step" in line and "loss" in line:
            break
    yield process
    process.kill()
    process.wait()


def gone(pids) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            return True
        time.sleep(0.05)
    return False


STOPPED = r"stopped as asked at step (\d+), which is saved; the same command goes on from there"


def assert_stopped_in_peace(process, folder):
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    step = int(re.search(STOPPED, out.splitlines()[-1])[1])
    assert [p.name for p in (folder / "checkpoints").iterdir()] == [f"step-{step:08d}"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_script_saves_and_ends_all_ranks(endless, tmp_path, number):
    pids = ranks_of(endless)
    assert len(pids) == 2
    endless.send_signal(number)
    assert_stopped_in_peace(endless, tmp_path / "tiny")
    assert gone(pids)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_saves_the_same_step_on_all(endless, tmp_path, rank):
    os.kill(ranks_of(endless)[rank], signal.SIGTERM)
    assert_stopped_in_peace(endless, tmp_path / "tiny")


def test_a_signal_to_launcher_and_ranks_is_one_request(endless, tmp_path):
    """As schedulers do it."""
    for pid in [*ranks_of(endless), endless.pid]:
        os.kill(pid, signal.SIGTERM)
    assert_stopped_in_peace(endless, tmp_path / "tiny")


def test_a_second_signal_ends_at_once(endless, tmp_path):
    pids = ranks_of(endless)
    os.kill(pids[1], signal.SIGSTOP)  # so that nothing can be saved
    endless.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    endless.send_signal(signal.SIGTERM)
    os.kill(pids[1], signal.SIGCONT)
    endless.communicate(timeout=60)
    assert endless.returncode == 128 + signal.SIGTERM
    assert gone(pids)


def test_a_killed_rank_ends_the_run_in_a_few_lines(endless):
    """The first failure is the killed rank's (137), or the other's that misses it (1): whichever the launcher sees first."""
    pids = ranks_of(endless)
    os.kill(pids[1], signal.SIGKILL)
    _, errors = endless.communicate(timeout=60)
    assert endless.returncode in (1, 128 + signal.SIGKILL)
    assert "Traceback" not in errors
    assert len(errors.splitlines()) <= 2, errors
    assert gone(pids)


def test_a_killed_rank_is_started_again_and_the_run_goes_on_by_itself(tiny, tmp_path):
    command = [SCRIPT, *tiny, "--training.steps", "60", "--run.output_folder", str(tmp_path)]
    command += ["--checkpoint.interval_steps", "5"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(NGPU="2", MAX_RESTARTS="1")
    )
    for line in process.stdout:
        if "step  8/60" in line:
            break
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert re.search(r"resuming from \S+ \(step \d+, saved by 2 ranks\)", out)
    assert [r["step"] for r in records(tmp_path / "tiny")] == list(range(1, 61))


def test_a_killed_launcher_leaves_nobody_behind(endless):
    pids = ranks_of(endless)
    endless.kill()
    assert gone(pids)


def test_a_run_folder_in_use_is_refused(endless, tiny, tmp_path):
    done = call(SCRIPT, *tiny, "--run.output_folder", tmp_path, NGPU="1")
    assert (done.returncode, done.stdout) == (2, "")
    expected = (
        rf"{tmp_path}/tiny is in use by process \d+ on \S+, since [-0-9: ]+; another --run.name starts a run beside it"
    )
    assert re.fullmatch(expected, done.stderr.strip())


def test_an_interrupted_run_of_one_process_is_saved(tiny, tmp_path):
    command = [SCRIPT, *tiny, "--training.steps", "1000000", "--run.output_folder", str(tmp_path)]
    command += ["--data.num_workers", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(NGPU="1")
    )
    for line in process.stdout:
        if "step" in line and "loss" in line:
            break
    process.send_signal(signal.SIGINT)
    assert_stopped_in_peace(process, tmp_path / "tiny")
