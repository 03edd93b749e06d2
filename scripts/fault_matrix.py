"""Put faults into real runs and look whether anything is lost: python scripts/fault_matrix.py [--rows 1 5 15] [...]

Every row is one kind of fault; a trial of it starts runs of a tiny model with ./run_llama_train.sh, hurts them, starts them
again, and compares what comes out with an undisturbed run. Results are added to a file, so that counts grow over several
calls; the table shows all of them. Exit code 1 if any trial in the file failed.

--rows N ...       rows (default: all)
--trials N         trials of each row (default: 1)
--results FILE     where results are kept (default: outputs/fault_matrix.jsonl)
--folder PATH      where the runs are made (default: a temporary folder)
--seed N           of the moments and places of the faults; trial t of a row draws from (seed, row, t) (default: 0)
--table            run nothing, show the results
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import xxhash

from scripts.arguments import Arguments, count, whole
from trainer import manifest
from trainer.checkpoint import step_of, steps_in
from trainer.shards import read_index, read_rows

CONFIG = """
[model]
overrides = {{ dim = 32, hidden_dim = 64, n_layers = 2 }}
[data]
dataset = "text"
path = "{folder}/corpus"
store_folder = "{folder}/stores"
held_out_fraction = 0.1
prepare_processes = 1
[training]
steps = {steps}
seq_len = 32
global_batch_size = 8
local_batch_size = 2
compute_dtype = "fp32"
cpu_threads = 1
[lr_schedule]
warmup_steps = 2
[checkpoint]
interval_steps = {interval}
[metrics]
log_every = 1
tensorboard = false
"""
STEPS, INTERVAL = 120, 10
MODES = ("off", "thread", "process")
POINTS = (
    "before the folder",
    "folder made",
    "before the plan",
    "header written",
    "half of a shard",
    "shard written",
    "written, not committed",
    "before the manifest",
    "half of the manifest",
    "manifest written",
    "renamed",
    "committed",
)


class Failed(Exception):
    """What was expected and did not come."""


def expect(condition: object, what: str) -> None:
    if not condition:
        raise Failed(what)


# ---------------------------------------------------------------- runs


@dataclass
class Ended:
    code: int
    out: str
    err: str
    seconds: float


class Run:
    """A started run; its processes end with it."""

    def __init__(
        self, bench: "Bench", name: str, ranks: int, more: Sequence[str], fault: dict | None, **variables: str
    ):
        self.folder = bench.folder / "runs" / name
        bench.started += 1
        self.logs = tuple(bench.folder / f"{name}-{bench.started}.{kind}" for kind in ("out", "err"))
        environment = {k: v for k, v in os.environ.items() if k not in ("NGPU", "NNODES", "MASTER_PORT", "FAULT")}
        environment |= {"PYTHON": sys.executable, "NGPU": str(ranks), **variables}
        if fault is not None:
            environment |= {"FAULT": json.dumps(fault), "PYTHONPATH": str(ROOT / "scripts" / "faults")}
        command = [str(ROOT / "run_llama_train.sh"), "--config", str(bench.config), "--run.name", name]
        command += ["--run.output_folder", str(bench.folder / "runs"), *more]
        self.start = time.monotonic()
        with self.logs[0].open("w") as out, self.logs[1].open("w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
        self.several = ranks > 1

    def wait(self, timeout_s: float = 240) -> Ended:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failed(f"did not end within {timeout_s:g} s") from None
        out, err = (log.read_text(errors="replace") for log in self.logs)
        return Ended(code, out, err, time.monotonic() - self.start)

    def below(self) -> list[tuple[int, str]]:
        """Every process that the run has started, with its command."""
        listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
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


class Bench:
    """A corpus, a configuration, and what undisturbed runs of it come to."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = folder / "tiny.toml"
        self.started = 0
        self.known: dict[tuple, dict[int, str]] = {}
        corpus = folder / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        draw = random.Random(0)
        words = (
            "the",
            "of",
            "and",
            "a",
            "to",
            "in",
            "is",
            "you",
            "that",
            "it",
            "he",
            "was",
            "for",
            "on",
            "are",
            "with",
        )
        for number in range(200):
            text = " ".join(draw.choice(words) for _ in range(draw.randrange(20, 200)))
            (corpus / f"{number:04d}.txt").write_text(text + ".\n")
        self.config.write_text(CONFIG.format(folder=folder, steps=STEPS, interval=INTERVAL))

    def run(
        self, name: str, ranks: int = 2, more: Sequence[str] = (), fault: dict | None = None, **variables: str
    ) -> Run:
        return Run(self, name, ranks, more, fault, **variables)

    def fresh(self, name: str) -> str:
        """The name, and nothing under it."""
        shutil.rmtree(self.folder / "runs" / name, ignore_errors=True)
        return name

    def undisturbed(self, ranks: int, more: Sequence[str] = ()) -> dict[int, str]:
        """Step -> digest of the checkpoint, of a run that nothing happened to."""
        key = (ranks, *more)
        if key not in self.known:
            name = self.fresh(f"reference-{len(self.known)}")
            ended = self.run(name, ranks, more).wait()
            expect(ended.code == 0, f"the undisturbed run ended with {ended.code}: {ended.err[-300:]}")
            self.known[key] = digests(self.folder / "runs" / name)
        return self.known[key]

    def require_same_end(self, name: str, ranks: int, more: Sequence[str] = ()) -> None:
        """Outcome B: what the run has come to is bit by bit what the undisturbed one came to."""
        mine, reference = digests(self.folder / "runs" / name), self.undisturbed(ranks, more)
        expect(max(mine, default=0) == max(reference), f"ended at step {max(mine, default=0)}, not {max(reference)}")
        differing = [step for step in mine if mine[step] != reference.get(step, mine[step])]
        expect(not differing, f"other content than undisturbed at steps {differing}")

    def finish(self, name: str, ranks: int, more: Sequence[str] = ()) -> Ended:
        """Start it again, to its end, and compare."""
        ended = self.run(name, ranks, more).wait()
        expect(ended.code == 0, f"started again it ended with {ended.code}: {ended.err[-300:]}")
        self.require_same_end(name, ranks, more)
        return ended


def digests(folder: Path) -> dict[int, str]:
    return {step_of(path): digest(path) for path in steps_in(folder / "checkpoints")}


def digest(checkpoint: Path) -> str:
    """Of every tensor, and of where the run stands."""
    problem = manifest.problem(checkpoint)
    expect(not problem, f"{checkpoint}: {problem}")
    whole_content = xxhash.xxh3_128()
    index = read_index(checkpoint)
    for name in sorted(index):
        rows = read_rows(checkpoint, name, index[name], 0, index[name].shape[0]) if index[name].shape else None
        whole_content.update(name.encode())
        if rows is not None:
            whole_content.update(memoryview(rows.contiguous().numpy()).cast("B"))
    state = json.loads((checkpoint / "train_state.json").read_text())
    whole_content.update(json.dumps([state[key] for key in ("step", "cursor", "tokens_seen", "passed_over")]).encode())
    return whole_content.hexdigest()


def few_lines(ended: Ended, limit: int = 10) -> None:
    lines = ended.err.splitlines()
    expect(len(lines) <= limit, f"{len(lines)} lines of errors: {ended.err[-500:]}")


# ---------------------------------------------------------------- rows


Draw = random.Random


def mode_flags(mode: str) -> list[str]:
    return ["--checkpoint.async_mode", mode]


def killed_at_random(
    bench: Bench, draw: Draw, victims: Callable[[Run], list[int]], name: str
) -> tuple[list[str], Ended]:
    """A run on two ranks, hurt after a random time of training; the flags of its mode, and how it ended."""
    more = mode_flags(draw.choice(MODES))
    bench.undisturbed(2, more)
    run = bench.run(bench.fresh(name), 2, more)
    run.await_step(1)
    time.sleep(draw.uniform(0, 2.5))
    before = time.monotonic()
    for pid in victims(run):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    ended = run.wait(60)
    ended.seconds = time.monotonic() - before
    return more, ended


def row_1(bench: Bench, draw: Draw) -> None:
    more, _ = killed_at_random(bench, draw, lambda run: [pid for pid, _ in run.below()], "row-1")
    bench.finish("row-1", 2, more)


def row_2(bench: Bench, draw: Draw) -> None:
    more, ended = killed_at_random(bench, draw, lambda run: [draw.choice(run.ranks() or [run.process.pid])], "row-2")
    if ended.code != 0:  # else it was at its end
        expect(ended.seconds <= 5, f"the others ended after {ended.seconds:.1f} s")
        few_lines(ended)
        expect("ended by SIGKILL" in ended.err or "lost contact" in ended.err, f"does not say so: {ended.err}")
    bench.finish("row-2", 2, more)


def row_3(bench: Bench, draw: Draw) -> None:
    family: list[int] = []

    def launcher(run: Run) -> list[int]:
        family.extend(pid for pid, _ in run.below())
        return [run.process.pid]

    more, _ = killed_at_random(bench, draw, launcher, "row-3")
    expect(gone(family, 10), "ranks still run 10 s after their launcher was killed")
    bench.finish("row-3", 2, more)


def row_4(bench: Bench, draw: Draw) -> None:
    more = mode_flags("process")
    run = bench.run(bench.fresh("row-4"), 2, more)
    run.await_step(draw.randrange(2, 60))
    writers = run.writers()
    expect(len(writers) == 2, f"{len(writers)} writers")
    os.kill(draw.choice(writers), signal.SIGKILL)
    ended = run.wait()
    expect(ended.code == 1, f"ended with {ended.code}")
    expect("the process that writes checkpoints was ended by SIGKILL" in ended.err, f"does not say so: {ended.err}")
    few_lines(ended)
    bench.finish("row-4", 2, more)


def stopped(bench: Bench, draw: Draw, name: str, victims: Callable[[Run], list[int]]) -> None:
    more = mode_flags(draw.choice(MODES))
    run = bench.run(bench.fresh(name), 2, more)
    run.await_step(draw.randrange(1, 100))
    for pid in victims(run):
        os.kill(pid, draw.choice((signal.SIGTERM, signal.SIGINT)))
    ended = run.wait(60)
    expect(ended.code == 0, f"ended with {ended.code}: {ended.err[-300:]}")
    said = re.search(r"stopped as asked at step (\d+)", ended.out)
    expect(said or "done: step" in ended.out, f"said neither stopped nor done: {ended.out[-300:]}")
    if said:
        newest = steps_in(run.folder / "checkpoints")[0]
        expect(step_of(newest) == int(said[1]) == run.step(), f"{newest} is not the last step, {run.step()}")
    bench.finish(name, 2, more)


def row_5(bench: Bench, draw: Draw) -> None:
    stopped(bench, draw, "row-5", lambda run: [run.process.pid])


def row_6(bench: Bench, draw: Draw) -> None:
    stopped(bench, draw, "row-6", lambda run: [draw.choice(run.ranks())])


def row_7(bench: Bench, draw: Draw) -> None:
    """The second signal comes while the save that the first one asked for goes on (it is made slow)."""
    more = mode_flags(draw.choice(MODES))
    run = bench.run(bench.fresh("row-7"), 2, more)
    run.await_step(draw.randrange(1, 60))
    run.process.send_signal(signal.SIGTERM)
    time.sleep(draw.choice((0.0, 1.1)))
    run.process.send_signal(signal.SIGINT)
    ended = run.wait(60)
    expect(ended.code in (0, 130), f"ended with {ended.code}")
    bench.finish("row-7", 2, more)


def row_8(bench: Bench, draw: Draw) -> None:
    rank = draw.randrange(2)
    run = bench.run(bench.fresh("row-8"), 2, fault={"kind": "raise", "rank": rank, "step": draw.randrange(1, STEPS)})
    ended = run.wait()
    expect(ended.code == 1, f"ended with {ended.code}")
    expect(ended.err.count("Traceback") == 1 and f"[rank {rank}] Traceback" in ended.err, f"tracebacks: {ended.err}")
    bench.finish("row-8", 2)


def row_9(bench: Bench, draw: Draw) -> None:
    rank = draw.randrange(2)
    fault = {"kind": "stop", "rank": rank, "step": draw.randrange(5, 60)}
    run = bench.run(bench.fresh("row-9"), 2, ["--resilience.hang_timeout_s", "4"], fault)
    ended = run.wait()
    expect(ended.code == 1, f"ended with {ended.code}")
    expect(f"rank {rank} gives no sign of life" in ended.err, f"not named: {ended.err}")
    expect(re.search(r"waiting in gloo:\w+, number \d+ of process group", ended.err), f"no collective: {ended.err}")
    expect("train_step" in ended.err, "no stack")
    bench.finish("row-9", 2)


def row_10(bench: Bench, draw: Draw) -> None:
    fault = {"kind": "desync", "rank": draw.randrange(2), "step": draw.randrange(5, 60)}
    run = bench.run(bench.fresh("row-10"), 2, ["--resilience.hang_timeout_s", "4"], fault)
    ended = run.wait()
    expect(ended.code == 1, f"ended with {ended.code}: {ended.out[-200:]}")
    expect(ended.err.strip(), "nothing was said")
    bench.finish("row-10", 2)


def row_12(bench: Bench, draw: Draw) -> None:
    run = bench.run(bench.fresh("row-12"), 2, fault={"kind": "memory", "rank": 1, "step": draw.randrange(1, STEPS)})
    ended = run.wait()
    expect(ended.code == 1 and ended.err.count("Traceback") == 1, f"ended with {ended.code}: {ended.err[-300:]}")
    expect("[rank 1]" in ended.err and "memory" in ended.err, f"does not say so: {ended.err[-300:]}")
    bench.finish("row-12", 2)


def row_13(bench: Bench, draw: Draw) -> None:
    more = ["--training.steps", "5", *mode_flags(draw.choice(MODES))]
    ended = bench.run(bench.fresh("row-13"), draw.choice((1, 2)), more).wait()
    expect((ended.code, ended.err) == (0, ""), f"ended with {ended.code}: {ended.err[-300:]}")


def row_14(bench: Bench, draw: Draw) -> None:
    more = ["--distributed.init_timeout_s", "6"]
    place = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(draw.randrange(20000, 30000)),
        "WORLD_SIZE": "2",
        "RANK": "0",
    }
    ended = bench.run(bench.fresh("row-14"), 1, more, **place, LOCAL_RANK="0").wait(60)
    expect(ended.code == 1, f"ended with {ended.code}")
    expect("of 2 ranks, 1 did not come within 6 s" in ended.err, f"not named: {ended.err}")
    few_lines(ended)


def row_15(bench: Bench, draw: Draw) -> None:
    for_point = draw.choice(POINTS)
    crash(bench, for_point, draw.choice(MODES), draw.choice((1, 2, 4)), draw)


def crash(bench: Bench, point: str, mode: str, ranks: int, draw: Draw) -> None:
    """SIGKILL of one rank at a point of its second or third save."""
    more = mode_flags(mode)
    name = bench.fresh("row-15")
    every_rank = point in ("header written", "half of a shard", "shard written", "before the plan", "before the folder")
    rank = draw.randrange(ranks) if every_rank and point != "before the folder" else 0
    fault = {"kind": "crash", "point": point, "rank": rank, "save": draw.choice((2, 3))}
    reference = bench.undisturbed(ranks, more)
    ended = bench.run(name, ranks, more, fault).wait()
    expect(ended.code != 0, f"{point}, {mode}, {ranks} ranks: the fault did not come")
    there = digests(bench.folder / "runs" / name)  # which verifies each
    mixed = [step for step, found in there.items() if found != reference[step]]
    expect(not mixed, f"{point}, {mode}, {ranks} ranks: mixed at steps {mixed}")
    bench.finish(name, ranks, more)


def row_16(bench: Bench, draw: Draw) -> None:
    """A step is saved again, with other content, and the save is killed between the two renames."""
    name = bench.fresh("row-16")
    first = ["--training.steps", "30"]
    expect(bench.run(name, 2, first).wait().code == 0, "the first run failed")
    point = draw.choice(("old moved aside", "renamed", "manifest written", "half of a shard"))
    newest = bench.folder / "runs" / name / "checkpoints" / "step-00000030"
    old = digest(newest)
    # What makes it be saved again: the newer ones are there, but the run goes on from 20.
    (newest / "manifest.json").rename(newest / "manifest")
    fault = {"kind": "crash", "point": point, "rank": 0, "save": 1}
    ended = bench.run(name, 2, [*first, "--optimizer.lr", "1e-3"], fault).wait()
    expect(ended.code != 0, f"{point}: the fault did not come")
    for path in newest.parent.glob("step-00000030*"):
        if (path / "manifest").exists():
            (path / "manifest").rename(path / "manifest.json")
    for path in steps_in(newest.parent):
        expect(not manifest.problem(path), f"{point}: {path}: {manifest.problem(path)}")
    found = {
        digest(path) for path in newest.parent.glob("step-00000030*") if "." not in path.name or path.suffix == ".old"
    }
    expect(old in found or "renamed" in point, f"{point}: neither the old one nor the new one is there")


def row_17(bench: Bench, draw: Draw) -> None:
    mode, error = draw.choice(MODES), draw.choice(("ENOSPC", "EDQUOT", "EFBIG"))
    more = mode_flags(mode)
    name = bench.fresh("row-17")
    fault = {"kind": "write_error", "rank": draw.randrange(2), "error": error, "times": 1, "save": draw.randrange(2, 8)}
    ended = bench.run(name, 2, more, fault).wait()
    expect(ended.code == 0, f"ended with {ended.code}: {ended.err[-300:]}")
    expect(ended.err.count("could not be saved") == 1, f"not told once: {ended.err}")
    left = [p.name for p in (bench.folder / "runs" / name / "checkpoints").glob("*.saving*")]
    expect(not left, f"left behind: {left}")
    bench.require_same_end(name, 2, more)
    fault |= {"times": 1}
    stop = [*more, "--checkpoint.on_failure", "stop"]
    ended = bench.run(bench.fresh(name), 2, stop, fault).wait()
    expect(ended.code == 1 and "could not be saved" in ended.err, f"to stop was set, ended with {ended.code}")
    few_lines(ended)
    bench.finish(name, 2, more)


def row_19(bench: Bench, draw: Draw) -> None:
    more = mode_flags(draw.choice(MODES))
    fault = {"kind": "write_error", "rank": 0, "error": "EIO", "times": 2, "save": draw.randrange(1, 8)}
    ended = bench.run(bench.fresh("row-19"), 2, more, fault).wait()
    expect(ended.code == 0, f"ended with {ended.code}: {ended.err[-300:]}")
    expect(ended.err.count("Input/output error; attempt") == 2 or "process" in more, f"not told: {ended.err}")
    bench.require_same_end("row-19", 2, more)


def row_20(bench: Bench, draw: Draw) -> None:
    more = [*mode_flags(draw.choice(("thread", "process"))), "--checkpoint.on_failure", "stop"]
    fault = {"kind": "write_error", "rank": draw.randrange(2), "error": "EROFS", "times": 99, "save": 3}
    ended = bench.run(bench.fresh("row-20"), 2, more, fault).wait()
    expect(ended.code == 1 and "Read-only file system" in ended.err, f"ended with {ended.code}: {ended.err[-300:]}")
    few_lines(ended)
    bench.finish("row-20", 2, more[:2])


@contextmanager
def damaged(bench: Bench, name: str):
    """A finished run's folder, a copy to be damaged."""
    source = bench.folder / "runs" / "whole"
    if not source.exists():
        expect(bench.run("whole", 2, ["--training.steps", "20"]).wait().code == 0, "the run to damage failed")
    copy = bench.folder / "runs" / bench.fresh(name)
    shutil.copytree(source, copy)
    yield copy / "checkpoints" / "step-00000020"


def require_fall_back(bench: Bench, name: str) -> None:
    """Started again, the run says what is damaged, goes on from the one before, and ends as if nothing had been."""
    ended = bench.run(name, 2, ["--training.steps", "20"]).wait()
    expect(ended.code == 0, f"ended with {ended.code}: {ended.err[-300:]}")
    expect("warning: passed over" in ended.err, f"not told: {ended.err}")
    expect("step-00000010 (step 10" in ended.out, f"did not go on from step 10: {ended.out[-300:]}")
    expect(digests(bench.folder / "runs" / name) == digests(bench.folder / "runs" / "whole"), "other content")


def row_21(bench: Bench, draw: Draw) -> None:
    """25 flips are told; one of them is gone on from."""
    with damaged(bench, "row-21") as newest:
        files = sorted(newest.iterdir())
        for number in range(25):
            path = draw.choices(files, [p.stat().st_size for p in files])[0] if number % 2 else draw.choice(files)
            data = path.read_bytes()
            flipped = bytearray(data)
            place = draw.randrange(len(data))
            flipped[place] ^= 1 << draw.randrange(8)
            path.write_bytes(flipped)
            expect(path.name in manifest.problem(newest), f"byte {place} of {path.name}: not told")
            if number < 24:
                path.write_bytes(data)
        require_fall_back(bench, "row-21")


def row_22(bench: Bench, draw: Draw) -> None:
    """Six kinds of damage to every file are told; one of them is gone on from."""
    with damaged(bench, "row-22") as newest:
        names = sorted(p.name for p in newest.iterdir())
        kinds = {
            "cut": lambda p: p.write_bytes(p.read_bytes()[: draw.randrange(p.stat().st_size)]),
            "missing": lambda p: p.unlink(),
            "extra": lambda p: p.with_name(f"{p.name}.1").write_bytes(b"x"),
            "longer": lambda p: p.write_bytes(p.read_bytes() + b"\0"),
            "swapped": lambda p: p.write_bytes((p.parent.parent / "step-00000010" / p.name).read_bytes() + b""),
            "zeros": lambda p: p.write_bytes(bytes(min(4096, p.stat().st_size)) + p.read_bytes()[4096:]),
        }
        safe = newest.parent / "safe"
        shutil.copytree(newest, safe)
        for kind, hurt in kinds.items():
            for name in names:
                if (
                    kind == "swapped"
                    and (safe / name).read_bytes() == (newest.parent / "step-00000010" / name).read_bytes()
                ):
                    continue  # the same file
                hurt(newest / name)
                problem = manifest.problem(newest) or (kind == "swapped" and name == "manifest.json")
                expect(problem, f"{kind} {name}: not told")
                shutil.rmtree(newest)
                shutil.copytree(safe, newest)
        kinds[draw.choice(list(kinds))](newest / "rank-00001.safetensors")
        shutil.rmtree(safe)
        require_fall_back(bench, "row-22")


def row_23(bench: Bench, draw: Draw) -> None:
    with damaged(bench, "row-23") as newest:
        for path in steps_in(newest.parent):
            (path / draw.choice(("index.json", "rank-00000.safetensors", "train_state.json"))).unlink()
        before = sorted(str(p) for p in newest.parent.rglob("*"))
        ended = bench.run("row-23", 2, ["--training.steps", "20"]).wait()
        expect(
            ended.code == 2 and "all 2 checkpoints are damaged" in ended.err, f"ended with {ended.code}: {ended.err}"
        )
        expect(sorted(str(p) for p in newest.parent.rglob("*")) == before, "something was changed")


def row_25(bench: Bench, draw: Draw) -> None:
    """Killed while old ones are removed, or just before."""
    more = [*mode_flags(draw.choice(MODES)), "--checkpoint.keep", "1"]
    name = bench.fresh("row-25")
    fault = {"kind": "crash", "point": "committed", "rank": 0, "save": draw.randrange(2, 10)}
    expect(bench.run(name, 2, more, fault).wait().code != 0, "the fault did not come")
    there = digests(bench.folder / "runs" / name)
    expect(there, "no checkpoint is left")
    bench.finish(name, 2, more)
    expect(len(digests(bench.folder / "runs" / name)) == 1, "more than one is left")


def row_26(bench: Bench, draw: Draw) -> None:
    name = bench.fresh("row-26")
    run = bench.run(name, 2, ["--training.steps", "1000000"])
    run.await_step(1)
    second = Run(bench, name, draw.choice((1, 2)), [], None).wait()
    expect(second.code == 2 and "is in use by process" in second.err, f"ended with {second.code}: {second.err}")
    few_lines(second, 1)
    run.process.send_signal(signal.SIGTERM)
    expect(run.wait(60).code == 0, "the first run was disturbed")
    expect(digests(run.folder), "the first run has no checkpoint")


def row_27(bench: Bench, draw: Draw) -> None:
    place = bench.folder / "no-folder"
    place.write_text("")
    run = subprocess.run(
        [ROOT / "run_llama_train.sh", "--config", bench.config, "--run.output_folder", place],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHON": sys.executable, "NGPU": str(draw.choice((1, 2)))},
    )
    expect(run.returncode == 2 and "cannot be written" in run.stderr, f"ended with {run.returncode}: {run.stderr}")
    expect(len(run.stderr.splitlines()) == 1, run.stderr)


def row_29(bench: Bench, draw: Draw) -> None:
    """Numbers that are none, on one rank: once (the update is left out), and several times in a row (rolled back)."""
    step = draw.randrange(15, 100)
    fault = {"kind": "gradient", "rank": draw.randrange(2), "scale": draw.choice(("nan", "inf")), "steps": [step]}
    ended = bench.run(bench.fresh("row-29"), 2, fault=fault).wait()
    expect(ended.code == 0, f"ended with {ended.code}: {ended.err[-300:]}")
    expect(ended.err.count("update left out, 1 in a row, 1 in all") == 1, f"not told once: {ended.err}")
    more = ["--resilience.max_left_out", "2", "--resilience.after_left_out", "rollback"]
    fault |= {"steps": [step, step + 1]}
    ended = bench.run(bench.fresh("row-29"), 2, more, fault).wait()
    expect(ended.code == 0 and "going back to step" in ended.err, f"ended with {ended.code}: {ended.err[-300:]}")
    state = json.loads((steps_in(bench.folder / "runs/row-29/checkpoints")[0] / "train_state.json").read_text())
    expect(state["passed_over"] == [[(step - 1) * 8, (step + 1) * 8]], f"passed over {state['passed_over']}")


def row_30(bench: Bench, draw: Draw) -> None:
    policy = draw.choice(("skip", "rollback"))
    step = draw.randrange(60, 110)
    fault = {"kind": "gradient", "rank": draw.randrange(2), "scale": "1e4", "steps": [step]}
    more = ["--resilience.loss_spike", policy]
    ended = bench.run(bench.fresh("row-30"), 2, more, fault).wait()
    expect(ended.code == 0, f"ended with {ended.code}: {ended.err[-300:]}")
    expect(f"step {step}: loss" in ended.err, f"not told: {ended.err}")
    expect(("going back to step" in ended.err) == (policy == "rollback"), f"not as set: {ended.err}")


def row_32(bench: Bench, draw: Draw) -> None:
    more = mode_flags(draw.choice(MODES))
    name = bench.fresh("row-32")
    expect(bench.run(name, 2, more).wait().code == 0, "the run failed")
    bench.require_same_end(name, 2, more)


def row_37(bench: Bench, draw: Draw) -> None:
    """Stopped and gone on with another number of ranks, several times: the same losses, to rounding."""
    name = bench.fresh("row-37")
    for ranks, steps in ((4, 30), (2, 60), (1, 90), (2, STEPS)):
        ended = bench.run(name, ranks, ["--training.steps", str(steps), "--lr_schedule.min_lr_ratio", "1.0"]).wait()
        expect(ended.code == 0, f"on {ranks} ranks it ended with {ended.code}: {ended.err[-300:]}")
    plain = bench.fresh("row-37-plain")
    expect(bench.run(plain, 2, ["--lr_schedule.min_lr_ratio", "1.0"]).wait().code == 0, "the plain run failed")
    mine, reference = (losses(bench.folder / "runs" / folder) for folder in (name, plain))
    far = [step for step in reference if abs(mine[step] - reference[step]) > 1e-5 * reference[step]]
    expect(set(mine) == set(reference) and not far, f"other losses at steps {far[:5]}")


def losses(folder: Path) -> dict[int, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def row_46(bench: Bench, draw: Draw) -> None:
    secret = f"s3cr3t{draw.randrange(10**9)}"
    names = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY")
    name = bench.fresh("row-46")
    fault = {"kind": "raise", "rank": 1, "step": 12}
    ended = bench.run(name, 2, (), fault, **dict.fromkeys(names, secret)).wait()
    written = [p.read_bytes() for p in (bench.folder / "runs" / name).rglob("*") if p.is_file()]
    hits = sum(secret.encode() in text for text in [*written, ended.out.encode(), ended.err.encode()])
    expect(ended.code == 1 and hits == 0, f"the secret is in {hits} outputs")


ROWS: dict[int, tuple[str, Callable[[Bench, Draw], None]]] = {
    1: ("SIGKILL to all, at a random moment, in every mode of saving: the same end, bit by bit", row_1),
    2: ("SIGKILL to one rank: the others end within 5 s and say so; the same end", row_2),
    3: ("SIGKILL to the launcher: nobody left after 10 s; the same end", row_3),
    4: ("SIGKILL to the process that writes: told, stopped; the same end", row_4),
    5: ("SIGTERM or SIGINT to the launcher: no step lost, exit 0; the same end", row_5),
    6: ("SIGTERM or SIGINT to one rank: all save the same step; the same end", row_6),
    7: ("a second signal while the first one's save goes on: the same end", row_7),
    8: ("an exception on one rank: one traceback, with the rank; the same end", row_8),
    9: ("a rank stands still: named, with the collective and stacks; the same end", row_9),
    10: ("a rank leaves out a reduction: the run ends; the same end", row_10),
    12: ("more memory than there is: told with the rank; the same end", row_12),
    13: ("clean runs exit 0", row_13),
    14: ("a rank that never joins is named", row_14),
    15: ("SIGKILL at 12 points of a save, 3 modes, 1, 2, 4 ranks: old or new, never mixed; the same end", row_15),
    16: ("a step is saved again and the save is killed: old or new", row_16),
    17: ("disk full: warned, goes on, and so ends the same; or stops, as set", row_17),
    19: ("errors of the disk that pass: tried again; the same end", row_19),
    20: ("a failure in the background reaches the run", row_20),
    21: ("flipped bits (25 a trial): told, and gone on from the one before", row_21),
    22: ("six kinds of damage to every file: told, and gone on from the one before", row_22),
    23: ("all checkpoints damaged: refused, nothing touched", row_23),
    25: ("killed between commit and the removal of old ones: one is whole", row_25),
    26: ("a second trainer in a run folder is refused", row_26),
    27: ("a folder that cannot be written is refused before the first step", row_27),
    29: ("no numbers on one rank: update left out on all; several times: rolled back", row_29),
    30: ("a spike: left out or rolled back, as set", row_30),
    32: ("the same run twice: bit by bit", row_32),
    37: ("4, 2, 1, 2 ranks after each other: the same losses", row_37),
    46: ("secrets of the environment are in no output", row_46),
}


# ---------------------------------------------------------------- the matrix


def trial(bench: Bench, row: int, number: int, seed: int) -> str:
    """What went wrong, or ""."""
    draw = random.Random(f"{seed}/{row}/{number}")
    try:
        if row == 15:  # every combination in turn
            every = [(p, m, w) for w in (2, 1, 4) for m in MODES for p in POINTS]
            crash(bench, *every[number % len(every)], draw)
        else:
            ROWS[row][1](bench, draw)
    except Failed as failure:
        return str(failure)
    return ""


def show(results: Path) -> bool:
    """Print the table; returns whether nothing failed."""
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    for row, (text, _) in ROWS.items():
        mine = [line for line in lines if line["row"] == row]
        good = sum(not line["problem"] for line in mine)
        print(f"{row:>3}  {f'{good} of {len(mine)}' if mine else 'not run':>12}  {text}")
        for line in mine:
            if line["problem"]:
                print(f"       trial {line['trial']}, seed {line['seed']}: {line['problem'][:300]}")
    return all(not line["problem"] for line in lines)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--rows", type=count, nargs="+", default=list(ROWS))
    parser.add_argument("--trials", type=count, default=1)
    parser.add_argument("--results", type=Path, default=Path("outputs/fault_matrix.jsonl"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=whole, default=0)
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    unknown = [row for row in chosen.rows if row not in ROWS]
    if unknown:
        parser.error(f"--rows {unknown[0]}: expected some of {', '.join(map(str, ROWS))}")
    if not chosen.table:
        chosen.results.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=chosen.folder, ignore_cleanup_errors=True) as folder:
            bench = Bench(Path(folder))
            for row in chosen.rows:
                run_row(bench, row, chosen.trials, chosen.seed, chosen.results)
    sys.exit(0 if show(chosen.results) else 1)


def run_row(bench: Bench, row: int, trials: int, seed: int, results: Path) -> None:
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    first = 1 + max((line["trial"] for line in lines if (line["row"], line["seed"]) == (row, seed)), default=-1)
    for number in range(first, first + trials):
        start = time.monotonic()
        problem = trial(bench, row, number, seed)
        seconds = time.monotonic() - start
        print(f"row {row}, trial {number}: {problem or 'as it should be'} ({seconds:.0f} s)", flush=True)
        with results.open("a") as file:
            line = {"row": row, "trial": number, "seed": seed, "problem": problem, "seconds": round(seconds, 1)}
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
