"""Runs of a tiny model to inject faults into, and their comparison with reference runs."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tests.training_runs import read_tensor, train
from trainer.base.system.files import read_json_lines
from trainer.base.system.run_files import latest_per_step, step_of
from trainer.checkpoint import manifest
from trainer.checkpoint.tensor_files import read_index
from trainer.tools.testing.ranks import LocalRanks

ROOT = Path(__file__).parent.parent.parent

CONFIG = """
[model]
overrides = {{ dim = 32, hidden_dim = 64, n_layers = 2 }}
[data]
dataset = "text"
path = "{corpus}"
store_folder = "{stores}"
held_out_fraction = 0.1
prepare_workers = 1
[training]
steps = {steps}
seq_len = 32
global_batch_size = {global_batch_size}
local_batch_size = 2
compute_dtype = "fp32"
cpu_threads = 1
[lr_schedule]
warmup_steps = 2
[checkpoint]
interval_steps = {interval_steps}
[metrics]
interval_steps = 1
sinks = ["console", "jsonl"]
"""
"""Settings of a run with a model of two layers of dim 32."""
STEPS, INTERVAL = 120, 10
WORDS = ("the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "with", "his")


def write_corpus(folder: Path, documents: int, seed: int = 0) -> Path:
    """Write text files of random words and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for i in range(documents):
        text = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(20, 200)))
        (folder / f"{i:04d}.txt").write_text(text + ".\n")
    return folder


class SeededRandom(random.Random):
    """Random time and location of the fault of a trial, which depend on its seed, case and index only."""

    def __init__(self, seed: int, case: int, trial: int):
        super().__init__(f"{seed}/{case}/{trial}")
        self.trial = trial


class Failed(Exception):
    """One line: the expectation that a trial did not meet."""


def expect(condition: object, message: str) -> None:
    if not condition:
        raise Failed(message)


# ---------------------------------------------------------------- runs


@dataclass
class ProcessResult:
    code: int
    out: str
    err: str
    duration_s: float


class TrialRun:
    """A started run."""

    def __init__(
        self,
        harness: "FaultHarness",
        name: str,
        ranks: int,
        flags: Sequence[str],
        fault: dict | None,
        wrapper: Sequence[str],
        **variables: str,
    ):
        """fault: for sitecustomize.py in every process of the run. wrapper: command that runs the script. variables: of the
        environment."""
        self.folder = harness.folder / "runs" / name
        harness.runs.append(self)
        self.logs = tuple(harness.folder / f"{name}-{len(harness.runs)}.{stream}" for stream in ("out", "err"))
        environment = {k: v for k, v in os.environ.items() if k not in ("NGPU", "NNODES", "MASTER_PORT", "FAULT")}
        environment |= {"PYTHON": sys.executable, "NGPU": str(ranks), **variables}
        if fault is not None:
            environment |= {"FAULT": json.dumps(fault), "PYTHONPATH": str(Path(__file__).parent)}
        command = [*wrapper, str(ROOT / "run_llama_train.sh"), "--config", str(harness.config), "--run.name", name]
        command += ["--run.output_folder", str(harness.folder / "runs"), *harness.layout, *flags]
        self.start = time.monotonic()
        with self.logs[0].open("w") as out, self.logs[1].open("w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
        self.has_launcher = ranks > 1

    def wait(self, timeout_s: float = 240) -> ProcessResult:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failed(f"did not end within {timeout_s:g} s") from None
        out, err = (log.read_text(errors="replace") for log in self.logs)
        return ProcessResult(code, out, err, time.monotonic() - self.start)

    def processes(self) -> list[tuple[int, str]]:
        """Return the id and the command of every process of the run."""
        listed = subprocess.run(
            ["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
        ).stdout
        lines = [line.split(None, 2) for line in listed.splitlines()[1:]]
        family = {self.process.pid}
        while children := {int(pid) for pid, parent, _ in lines if int(parent) in family} - family:
            family |= children
        return [(int(pid), args) for pid, _, args in lines if int(pid) in family]

    def pids(self) -> list[int]:
        return [pid for pid, _ in self.processes()]

    def rank_pids(self) -> list[int]:
        if not self.has_launcher:
            return [self.process.pid]
        return [
            pid
            for pid, args in self.processes()
            if "train.py" in args and pid != self.process.pid and "spawn" not in args
        ]

    def step(self) -> int:
        """Return the last recorded step."""
        try:
            return max((record["step"] for record in read_json_lines(self.folder / "metrics.jsonl")), default=0)
        except FileNotFoundError:
            return 0

    def wait_for_step(self, step: int) -> None:
        end = time.monotonic() + 120
        while self.step() < step:
            expect(self.process.poll() is None, f"ended before step {step}")
            expect(time.monotonic() < end, f"step {step} was not reached within 120 s")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL every process of the run."""
        for pid in self.pids() or [self.process.pid]:
            kill(pid, signal.SIGKILL)
        self.process.wait()


def kill(pid: int, number: int) -> None:
    """Send a signal to a process, which may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def is_pending(pid: int, number: int) -> bool:
    """Return whether a stopped process has received a signal that it has not handled."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        (mask,) = re.findall(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return bool(int(mask, 16) >> (number - 1) & 1)
    return False


def is_stopped(pid: int) -> bool:
    """Return whether SIGSTOP has stopped a process."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def have_ended(pids: Sequence[int], within_s: float) -> bool:
    def is_running(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    end = time.monotonic() + within_s
    while any(map(is_running, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


class FaultHarness:
    """A corpus, a configuration, runs of it, and the checkpoints of reference runs without faults."""

    def __init__(
        self,
        folder: Path,
        soak_minutes: float = 60.0,
        steps: int = STEPS,
        interval: int = INTERVAL,
        layout: Sequence[str] = (),
    ):
        """steps: number of steps of each run. interval: number of steps between checkpoints. layout: command-line flags of all
        runs."""
        self.folder = folder
        self.layout = layout
        self.soak_minutes = soak_minutes
        self.steps = steps
        self.config = folder / "tiny.toml"
        self.runs: list[TrialRun] = []
        self.references: dict[tuple, dict[int, str]] = {}
        settings = {"steps": steps, "interval_steps": interval, "global_batch_size": 8, "stores": folder / "stores"}
        self.config.parent.mkdir(parents=True, exist_ok=True)
        self.config.write_text(CONFIG.format(corpus=write_corpus(folder / "corpus", 200), **settings))

    def run(
        self,
        name: str,
        ranks: int = 2,
        flags: Sequence[str] = (),
        fault: dict | None = None,
        wrapper: Sequence[str] = (),
        **variables: str,
    ) -> TrialRun:
        return TrialRun(self, name, ranks, flags, fault, wrapper, **variables)

    def close(self) -> None:
        """Kill all runs that have not ended."""
        for run in self.runs:
            if run.process.poll() is None:
                run.kill()

    def fresh(self, name: str) -> str:
        """Delete the folder of a run and return its name."""
        shutil.rmtree(self.folder / "runs" / name, ignore_errors=True)
        return name

    def reference(self, ranks: int, flags: Sequence[str] = ()) -> dict[int, str]:
        """Return the digests of the checkpoints of a run without faults, by step. Settings of [checkpoint] must not affect the
        content of a checkpoint, so one run with their defaults is the reference for all of them."""
        pairs = zip(flags[::2], flags[1::2], strict=True)
        flags = [word for flag, value in pairs if not flag.startswith("--checkpoint.") for word in (flag, value)]
        key = (ranks, *flags)
        if key not in self.references:
            name = self.fresh(f"reference-{len(self.references)}")
            words = ["--config", str(self.config), "--run.output_folder", str(self.folder / "runs"), "--run.name", name]
            LocalRanks(ranks).run(train, [*words, *self.layout, *flags])
            self.references[key] = digests(self.folder / "runs" / name)
        return self.references[key]

    def assert_same_final_state(self, name: str, ranks: int, flags: Sequence[str] = ()) -> None:
        """Raise Failed unless the run has the last step of the reference run, and bitwise identical checkpoints."""
        actual, reference = digests(self.folder / "runs" / name), self.reference(ranks, flags)
        expect(
            max(actual, default=0) == max(reference), f"ended at step {max(actual, default=0)}, not {max(reference)}"
        )
        differing = [step for step in actual if actual[step] != reference.get(step, actual[step])]
        expect(not differing, f"content differs from the reference run at steps {differing}")

    def finish(self, name: str, ranks: int, flags: Sequence[str] = ()) -> ProcessResult:
        """Resume the run until its last step and compare it with the reference run."""
        result = self.run(name, ranks, flags).wait()
        expect(result.code == 0, f"the resumed run exited with {result.code}: {result.err[-300:]}")
        self.assert_same_final_state(name, ranks, flags)
        return result


def digests(folder: Path) -> dict[int, str]:
    """Return the digest of each checkpoint of a run folder, by step."""
    return {step_of(path): digest(path) for path in latest_per_step(folder / "checkpoints")}


def digest(checkpoint: Path) -> str:
    """Return a hash of every tensor and of the run's progress. Raise Failed if the checkpoint is damaged."""
    problem = manifest.find_damage(checkpoint)
    expect(not problem, f"{checkpoint}: {problem}")
    content = xxhash.xxh3_128()
    index = read_index(checkpoint)
    for name in sorted(index):
        tensor = read_tensor(checkpoint, name, index[name])
        content.update(name.encode() + tensor.contiguous().numpy().tobytes())
    state = json.loads((checkpoint / "train_state.json").read_text())
    content.update(json.dumps([state[key] for key in ("step", "cursor", "tokens_seen", "skipped_samples")]).encode())
    return content.hexdigest()


def expect_few_lines(result: ProcessResult, limit: int = 10) -> None:
    lines = result.err.splitlines()
    expect(len(lines) <= limit, f"{len(lines)} lines on stderr: {result.err[-500:]}")
