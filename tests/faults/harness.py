"""Runs of a tiny model that are to be hurt, and what undisturbed ones come to."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tests.training_runs import read_tensor
from trainer.checkpoint import manifest
from trainer.checkpoint.commit import latest_per_step, step_of
from trainer.checkpoint.storage import read_index

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
tensorboard = false
"""
"""Of a run whose model has two layers of dim 32."""
STEPS, INTERVAL = 120, 10
WORDS = ("the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "with", "his")


def write_corpus(folder: Path, documents: int, seed: int = 0) -> Path:
    """Text files of random words."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for number in range(documents):
        text = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(20, 200)))
        (folder / f"{number:04d}.txt").write_text(text + ".\n")
    return folder


class SeededRandom(random.Random):
    """Where and when the fault of a trial comes; the same for the same trial."""

    def __init__(self, seed: int, row: int, trial: int):
        super().__init__(f"{seed}/{row}/{trial}")
        self.trial = trial


class Failed(Exception):
    """What was expected and did not come."""


def expect(condition: object, what: str) -> None:
    if not condition:
        raise Failed(what)


# ---------------------------------------------------------------- runs


@dataclass
class ProcessResult:
    code: int
    out: str
    err: str
    seconds: float


class TrialRun:
    """A started run."""

    def __init__(
        self, harness: "FaultHarness", name: str, ranks: int, more: Sequence[str], fault: dict | None, **variables: str
    ):
        self.folder = harness.folder / "runs" / name
        harness.runs.append(self)
        self.logs = tuple(harness.folder / f"{name}-{len(harness.runs)}.{kind}" for kind in ("out", "err"))
        environment = {k: v for k, v in os.environ.items() if k not in ("NGPU", "NNODES", "MASTER_PORT", "FAULT")}
        environment |= {"PYTHON": sys.executable, "NGPU": str(ranks), **variables}
        if fault is not None:
            environment |= {"FAULT": json.dumps(fault), "PYTHONPATH": str(Path(__file__).parent)}
        command = [str(ROOT / "run_llama_train.sh"), "--config", str(harness.config), "--run.name", name]
        command += ["--run.output_folder", str(harness.folder / "runs"), *more]
        self.start = time.monotonic()
        with self.logs[0].open("w") as out, self.logs[1].open("w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
        self.several = ranks > 1

    def wait(self, timeout_s: float = 240) -> ProcessResult:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failed(f"did not end within {timeout_s:g} s") from None
        out, err = (log.read_text(errors="replace") for log in self.logs)
        return ProcessResult(code, out, err, time.monotonic() - self.start)

    def below(self) -> list[tuple[int, str]]:
        """Every process that the run has started, with its command."""
        listed = subprocess.run(
            ["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
        ).stdout
        rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
        family = {self.process.pid}
        while more := {int(pid) for pid, parent, _ in rows if int(parent) in family} - family:
            family |= more
        return [(int(pid), args) for pid, _, args in rows if int(pid) in family]

    def ranks(self) -> list[int]:
        """Processes of the ranks."""
        if not self.several:
            return [self.process.pid]
        return [
            pid for pid, args in self.below() if "train.py" in args and pid != self.process.pid and "spawn" not in args
        ]

    def writers(self) -> list[int]:
        return [pid for pid, args in self.below() if "spawn_main" in args]

    def step(self) -> int:
        try:
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
            return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)
        except (FileNotFoundError, ValueError):
            return 0

    def await_step(self, step: int) -> None:
        end = time.monotonic() + 120
        while self.step() < step:
            expect(self.process.poll() is None, f"ended before step {step}")
            expect(time.monotonic() < end, f"step {step} did not come")
            time.sleep(0.02)

    def kill(self) -> list[int]:
        """SIGKILL to all its processes; their numbers."""
        pids = [pid for pid, _ in self.below()] or [self.process.pid]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        return pids


def gone(pids: Sequence[int], within_s: float) -> bool:
    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    end = time.monotonic() + within_s
    while any(map(runs, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


class FaultHarness:
    """A corpus, a configuration, and what undisturbed runs of it come to."""

    def __init__(self, folder: Path, soak_minutes: float = 60.0):
        self.folder = folder
        self.soak_minutes = soak_minutes
        self.config = folder / "tiny.toml"
        self.runs: list[TrialRun] = []
        self.known: dict[tuple, dict[int, str]] = {}
        settings = {"steps": STEPS, "interval_steps": INTERVAL, "global_batch_size": 8, "stores": folder / "stores"}
        self.config.parent.mkdir(parents=True, exist_ok=True)
        self.config.write_text(CONFIG.format(corpus=write_corpus(folder / "corpus", 200), **settings))

    def run(
        self, name: str, ranks: int = 2, more: Sequence[str] = (), fault: dict | None = None, **variables: str
    ) -> TrialRun:
        return TrialRun(self, name, ranks, more, fault, **variables)

    def end(self) -> None:
        """Of all runs that have not ended."""
        for run in self.runs:
            if run.process.poll() is None:
                run.kill()

    def fresh(self, name: str) -> str:
        """The name, and nothing under it."""
        shutil.rmtree(self.folder / "runs" / name, ignore_errors=True)
        return name

    def reference(self, ranks: int, more: Sequence[str] = ()) -> dict[int, str]:
        """Step -> digest of the checkpoint, of a run that nothing happened to. How it saves is not to alter what it saves, so
        one run, with the default, stands for all that differ in that only."""
        flags = zip(more[::2], more[1::2], strict=True)
        kept = [word for flag, value in flags if not flag.startswith("--checkpoint.") for word in (flag, value)]
        key = (ranks, *kept)
        if key not in self.known:
            name = self.fresh(f"reference-{len(self.known)}")
            ended = self.run(name, ranks, kept).wait()
            expect(ended.code == 0, f"the undisturbed run ended with {ended.code}: {ended.err[-300:]}")
            self.known[key] = digests(self.folder / "runs" / name)
        return self.known[key]

    def assert_same_final_state(self, name: str, ranks: int, more: Sequence[str] = ()) -> None:
        """Outcome B: what the run has come to is bit by bit what the undisturbed one came to."""
        mine, reference = digests(self.folder / "runs" / name), self.reference(ranks, more)
        expect(max(mine, default=0) == max(reference), f"ended at step {max(mine, default=0)}, not {max(reference)}")
        differing = [step for step in mine if mine[step] != reference.get(step, mine[step])]
        expect(not differing, f"other content than undisturbed at steps {differing}")

    def finish(self, name: str, ranks: int, more: Sequence[str] = ()) -> ProcessResult:
        """Start it again, to its end, and compare."""
        ended = self.run(name, ranks, more).wait()
        expect(ended.code == 0, f"started again it ended with {ended.code}: {ended.err[-300:]}")
        self.assert_same_final_state(name, ranks, more)
        return ended


def digests(folder: Path) -> dict[int, str]:
    return {step_of(path): digest(path) for path in latest_per_step(folder / "checkpoints")}


def digest(checkpoint: Path) -> str:
    """Of every tensor, and of where the run stands."""
    problem = manifest.find_damage(checkpoint)
    expect(not problem, f"{checkpoint}: {problem}")
    whole_content = xxhash.xxh3_128()
    index = read_index(checkpoint)
    for name in sorted(index):
        tensor = read_tensor(checkpoint, name, index[name])
        whole_content.update(name.encode() + tensor.contiguous().numpy().tobytes())
    state = json.loads((checkpoint / "train_state.json").read_text())
    whole_content.update(
        json.dumps([state[key] for key in ("step", "cursor", "tokens_seen", "skipped_samples")]).encode()
    )
    return whole_content.hexdigest()


def few_lines(ended: ProcessResult, limit: int = 10) -> None:
    lines = ended.err.splitlines()
    expect(len(lines) <= limit, f"{len(lines)} lines of errors: {ended.err[-500:]}")
