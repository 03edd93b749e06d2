"""Faults of saves and of what was saved."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.harness import ROOT, FaultHarness, SeededRandom, TrialRun, digest, digests, expect, few_lines
from tests.faults.processes import MODES, mode_flags
from trainer.checkpoint import manifest
from trainer.checkpoint.commit import latest_per_step

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


def case_15(harness: FaultHarness, rng: SeededRandom) -> None:
    """Every combination in turn."""
    every = [(point, mode, ranks) for ranks in (2, 1, 4) for mode in MODES for point in POINTS]
    crash(harness, *every[rng.trial % len(every)], rng)


def crash(harness: FaultHarness, point: str, mode: str, ranks: int, rng: SeededRandom) -> None:
    """SIGKILL of one rank at a point of its second or third save."""
    more = mode_flags(mode)
    name = harness.fresh("case-15")
    every_rank = point in ("header written", "half of a shard", "shard written", "before the plan", "before the folder")
    rank = rng.randrange(ranks) if every_rank and point != "before the folder" else 0
    fault = {"kind": "crash", "point": point, "rank": rank, "save": rng.choice((2, 3))}
    reference = harness.reference(ranks, more)
    ended = harness.run(name, ranks, more, fault).wait()
    expect(ended.code != 0, f"{point}, {mode}, {ranks} ranks: the fault did not come")
    there = digests(harness.folder / "runs" / name)  # which verifies each
    mixed = [step for step, found in there.items() if found != reference[step]]
    expect(not mixed, f"{point}, {mode}, {ranks} ranks: mixed at steps {mixed}")
    harness.finish(name, ranks, more)


def case_16(harness: FaultHarness, rng: SeededRandom) -> None:
    """A step is saved again, with other content, and the save is killed."""
    new = saved_again(harness, "case-16-undisturbed", None)
    point = rng.choice(("old moved aside", "renamed", "manifest written", "half of a shard"))
    old = saved_again(harness, "case-16", {"kind": "crash", "point": point, "rank": 0, "save": 1})
    folder = harness.folder / "runs" / "case-16" / "checkpoints"
    for path in folder.glob("step-00000030*"):
        if (path / "manifest").exists():
            (path / "manifest").rename(path / "manifest.json")
    for path in latest_per_step(folder):  # which are all to be whole
        digest(path)
    ended = harness.run("case-16", 2, [*SHORT, *CHANGED]).wait()
    expect(ended.code == 0, f"{point}: started again it ended with {ended.code}: {ended.err[-300:]}")
    end = digests(folder.parent)[30]
    expect(end in (old[0], new[1]), f"{point}: neither the old end nor the new one")
    expect(end == new[1] or point != "renamed", f"{point}: the new one is lost")


SHORT = ["--training.steps", "30"]
CHANGED = ["--optimizer.lr", "1e-3"]


def saved_again(harness: FaultHarness, name: str, fault: dict | None) -> tuple[str, str]:
    """A run to step 30, which is then hidden, so that another goes on from 20 and saves 30 again; the digests of both, where
    no fault is in the second."""
    expect(harness.run(harness.fresh(name), 2, SHORT).wait().code == 0, "the first run failed")
    newest = harness.folder / "runs" / name / "checkpoints" / "step-00000030"
    old = digest(newest)
    (newest / "manifest.json").rename(newest / "manifest")
    ended = harness.run(name, 2, [*SHORT, *CHANGED], fault).wait()
    expect((ended.code == 0) == (fault is None), f"{name}: ended with {ended.code}")
    return old, "" if fault else digest(newest)


def case_17(harness: FaultHarness, rng: SeededRandom) -> None:
    mode, error = rng.choice(MODES), rng.choice(("ENOSPC", "EDQUOT", "EFBIG"))
    more = mode_flags(mode)
    name = harness.fresh("case-17")
    fault = {"kind": "write_error", "rank": rng.randrange(2), "error": error, "times": 1, "save": rng.randrange(2, 8)}
    ended = harness.run(name, 2, more, fault).wait()
    expect(ended.code == 0, f"ended with {ended.code}: {ended.err[-300:]}")
    expect(ended.err.count("could not be saved") == 1, f"not told once: {ended.err}")
    left = [p.name for p in (harness.folder / "runs" / name / "checkpoints").glob("*.tmp-*")]
    expect(not left, f"left behind: {left}")
    harness.assert_same_final_state(name, 2, more)
    stop = [*more, "--checkpoint.on_failure", "stop"]
    ended = harness.run(harness.fresh(name), 2, stop, fault).wait()
    expect(ended.code == 1 and "could not be saved" in ended.err, f"to stop was set, ended with {ended.code}")
    few_lines(ended)
    harness.finish(name, 2, more)


def case_19(harness: FaultHarness, rng: SeededRandom) -> None:
    more = mode_flags(rng.choice(MODES))
    fault = {"kind": "write_error", "rank": 0, "error": "EIO", "times": 2, "save": rng.randrange(1, 8)}
    ended = harness.run(harness.fresh("case-19"), 2, more, fault).wait()
    expect(ended.code == 0, f"ended with {ended.code}: {ended.err[-300:]}")
    expect(ended.err.count("Input/output error; attempt") == 2 or "process" in more, f"not told: {ended.err}")
    harness.assert_same_final_state("case-19", 2, more)


def case_20(harness: FaultHarness, rng: SeededRandom) -> None:
    more = [*mode_flags(rng.choice(("thread", "process"))), "--checkpoint.on_failure", "stop"]
    fault = {"kind": "write_error", "rank": rng.randrange(2), "error": "EROFS", "times": 99, "save": 3}
    ended = harness.run(harness.fresh("case-20"), 2, more, fault).wait()
    expect(ended.code == 1 and "Read-only file system" in ended.err, f"ended with {ended.code}: {ended.err[-300:]}")
    few_lines(ended)
    harness.finish("case-20", 2, more[:2])


@contextmanager
def damaged(harness: FaultHarness, name: str) -> Iterator[Path]:
    """A finished run's folder, a copy to be damaged."""
    source = harness.folder / "runs" / "whole"
    if not source.exists():
        expect(harness.run("whole", 2, ["--training.steps", "20"]).wait().code == 0, "the run to damage failed")
    copy = harness.folder / "runs" / harness.fresh(name)
    shutil.copytree(source, copy)
    yield copy / "checkpoints" / "step-00000020"


def require_fall_back(harness: FaultHarness, name: str) -> None:
    """Started again, the run says what is damaged, goes on from the one before, and ends as if nothing had been."""
    ended = harness.run(name, 2, ["--training.steps", "20"]).wait()
    expect(ended.code == 0, f"ended with {ended.code}: {ended.err[-300:]}")
    expect("warning: ignoring damaged checkpoint" in ended.err, f"not told: {ended.err}")
    expect("step-00000010 (step 10" in ended.out, f"did not go on from step 10: {ended.out[-300:]}")
    expect(digests(harness.folder / "runs" / name) == digests(harness.folder / "runs" / "whole"), "other content")


def case_21(harness: FaultHarness, rng: SeededRandom) -> None:
    """25 flips are told; one of them is gone on from."""
    with damaged(harness, "case-21") as newest:
        files = sorted(newest.iterdir())
        for number in range(25):
            path = rng.choices(files, [p.stat().st_size for p in files])[0] if number % 2 else rng.choice(files)
            data = path.read_bytes()
            flipped = bytearray(data)
            place = rng.randrange(len(data))
            flipped[place] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            expect(path.name in manifest.find_damage(newest), f"byte {place} of {path.name}: not told")
            if number < 24:
                path.write_bytes(data)
        require_fall_back(harness, "case-21")


def case_22(harness: FaultHarness, rng: SeededRandom) -> None:
    """Six kinds of damage to every file are told; one of them is gone on from."""
    with damaged(harness, "case-22") as newest:
        names = sorted(p.name for p in newest.iterdir())
        kinds = {
            "cut": lambda p: p.write_bytes(p.read_bytes()[: rng.randrange(p.stat().st_size)]),
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
                expect(manifest.find_damage(newest), f"{kind} {name}: not told")
                shutil.rmtree(newest)
                shutil.copytree(safe, newest)
        kinds[rng.choice(list(kinds))](newest / "rank-00001.safetensors")
        shutil.rmtree(safe)
        require_fall_back(harness, "case-22")


def case_23(harness: FaultHarness, rng: SeededRandom) -> None:
    with damaged(harness, "case-23") as newest:
        for path in latest_per_step(newest.parent):
            (path / rng.choice(("index.json", "rank-00000.safetensors", "train_state.json"))).unlink()
        before = sorted(str(p) for p in newest.parent.rglob("*"))
        ended = harness.run("case-23", 2, ["--training.steps", "20"]).wait()
        expect(
            ended.code == 2 and "all 2 checkpoints are damaged" in ended.err, f"ended with {ended.code}: {ended.err}"
        )
        expect(sorted(str(p) for p in newest.parent.rglob("*")) == before, "something was changed")


def case_25(harness: FaultHarness, rng: SeededRandom) -> None:
    """Killed while old ones are removed, or just before."""
    more = [*mode_flags(rng.choice(MODES)), "--checkpoint.keep", "1"]
    name = harness.fresh("case-25")
    fault = {"kind": "crash", "point": "committed", "rank": 0, "save": rng.randrange(2, 10)}
    expect(harness.run(name, 2, more, fault).wait().code != 0, "the fault did not come")
    there = digests(harness.folder / "runs" / name)
    expect(there, "no checkpoint is left")
    harness.finish(name, 2, more)
    expect(len(digests(harness.folder / "runs" / name)) == 1, "more than one is left")


def case_26(harness: FaultHarness, rng: SeededRandom) -> None:
    name = harness.fresh("case-26")
    run = harness.run(name, 2, ["--training.steps", "1000000"])
    run.await_step(1)
    second = TrialRun(harness, name, rng.choice((1, 2)), [], None).wait()
    expect(second.code == 2 and "is in use by process" in second.err, f"ended with {second.code}: {second.err}")
    few_lines(second, 1)
    run.process.send_signal(signal.SIGTERM)
    expect(run.wait(60).code == 0, "the first run was disturbed")
    expect(digests(run.folder), "the first run has no checkpoint")


def case_27(harness: FaultHarness, rng: SeededRandom) -> None:
    place = harness.folder / "no-folder"
    place.write_text("")
    run = subprocess.run(
        [ROOT / "run_llama_train.sh", "--config", harness.config, "--run.output_folder", place],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHON": sys.executable, "NGPU": str(rng.choice((1, 2)))},
    )
    expect(run.returncode == 2 and "cannot be written" in run.stderr, f"ended with {run.returncode}: {run.stderr}")
    expect(len(run.stderr.splitlines()) == 1, run.stderr)
