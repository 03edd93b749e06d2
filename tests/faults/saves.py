"""Faults of saves and of what was saved."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.bench import ROOT, FaultHarness, SeededRandom, TrialRun, digest, digests, expect, few_lines
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


def row_15(bench: FaultHarness, draw: SeededRandom) -> None:
    """Every combination in turn."""
    every = [(point, mode, ranks) for ranks in (2, 1, 4) for mode in MODES for point in POINTS]
    crash(bench, *every[draw.trial % len(every)], draw)


def crash(bench: FaultHarness, point: str, mode: str, ranks: int, draw: SeededRandom) -> None:
    """SIGKILL of one rank at a point of its second or third save."""
    more = mode_flags(mode)
    name = bench.fresh("row-15")
    every_rank = point in ("header written", "half of a shard", "shard written", "before the plan", "before the folder")
    rank = draw.randrange(ranks) if every_rank and point != "before the folder" else 0
    fault = {"kind": "crash", "point": point, "rank": rank, "save": draw.choice((2, 3))}
    reference = bench.reference(ranks, more)
    ended = bench.run(name, ranks, more, fault).wait()
    expect(ended.code != 0, f"{point}, {mode}, {ranks} ranks: the fault did not come")
    there = digests(bench.folder / "runs" / name)  # which verifies each
    mixed = [step for step, found in there.items() if found != reference[step]]
    expect(not mixed, f"{point}, {mode}, {ranks} ranks: mixed at steps {mixed}")
    bench.finish(name, ranks, more)


def row_16(bench: FaultHarness, draw: SeededRandom) -> None:
    """A step is saved again, with other content, and the save is killed."""
    new = saved_again(bench, "row-16-undisturbed", None)
    point = draw.choice(("old moved aside", "renamed", "manifest written", "half of a shard"))
    old = saved_again(bench, "row-16", {"kind": "crash", "point": point, "rank": 0, "save": 1})
    folder = bench.folder / "runs" / "row-16" / "checkpoints"
    for path in folder.glob("step-00000030*"):
        if (path / "manifest").exists():
            (path / "manifest").rename(path / "manifest.json")
    for path in latest_per_step(folder):  # which are all to be whole
        digest(path)
    ended = bench.run("row-16", 2, [*SHORT, *CHANGED]).wait()
    expect(ended.code == 0, f"{point}: started again it ended with {ended.code}: {ended.err[-300:]}")
    end = digests(folder.parent)[30]
    expect(end in (old[0], new[1]), f"{point}: neither the old end nor the new one")
    expect(end == new[1] or point != "renamed", f"{point}: the new one is lost")


SHORT = ["--training.steps", "30"]
CHANGED = ["--optimizer.lr", "1e-3"]


def saved_again(bench: FaultHarness, name: str, fault: dict | None) -> tuple[str, str]:
    """A run to step 30, which is then hidden, so that another goes on from 20 and saves 30 again; the digests of both, where
    no fault is in the second."""
    expect(bench.run(bench.fresh(name), 2, SHORT).wait().code == 0, "the first run failed")
    newest = bench.folder / "runs" / name / "checkpoints" / "step-00000030"
    old = digest(newest)
    (newest / "manifest.json").rename(newest / "manifest")
    ended = bench.run(name, 2, [*SHORT, *CHANGED], fault).wait()
    expect((ended.code == 0) == (fault is None), f"{name}: ended with {ended.code}")
    return old, "" if fault else digest(newest)


def row_17(bench: FaultHarness, draw: SeededRandom) -> None:
    mode, error = draw.choice(MODES), draw.choice(("ENOSPC", "EDQUOT", "EFBIG"))
    more = mode_flags(mode)
    name = bench.fresh("row-17")
    fault = {"kind": "write_error", "rank": draw.randrange(2), "error": error, "times": 1, "save": draw.randrange(2, 8)}
    ended = bench.run(name, 2, more, fault).wait()
    expect(ended.code == 0, f"ended with {ended.code}: {ended.err[-300:]}")
    expect(ended.err.count("could not be saved") == 1, f"not told once: {ended.err}")
    left = [p.name for p in (bench.folder / "runs" / name / "checkpoints").glob("*.tmp-*")]
    expect(not left, f"left behind: {left}")
    bench.assert_same_final_state(name, 2, more)
    stop = [*more, "--checkpoint.on_failure", "stop"]
    ended = bench.run(bench.fresh(name), 2, stop, fault).wait()
    expect(ended.code == 1 and "could not be saved" in ended.err, f"to stop was set, ended with {ended.code}")
    few_lines(ended)
    bench.finish(name, 2, more)


def row_19(bench: FaultHarness, draw: SeededRandom) -> None:
    more = mode_flags(draw.choice(MODES))
    fault = {"kind": "write_error", "rank": 0, "error": "EIO", "times": 2, "save": draw.randrange(1, 8)}
    ended = bench.run(bench.fresh("row-19"), 2, more, fault).wait()
    expect(ended.code == 0, f"ended with {ended.code}: {ended.err[-300:]}")
    expect(ended.err.count("Input/output error; attempt") == 2 or "process" in more, f"not told: {ended.err}")
    bench.assert_same_final_state("row-19", 2, more)


def row_20(bench: FaultHarness, draw: SeededRandom) -> None:
    more = [*mode_flags(draw.choice(("thread", "process"))), "--checkpoint.on_failure", "stop"]
    fault = {"kind": "write_error", "rank": draw.randrange(2), "error": "EROFS", "times": 99, "save": 3}
    ended = bench.run(bench.fresh("row-20"), 2, more, fault).wait()
    expect(ended.code == 1 and "Read-only file system" in ended.err, f"ended with {ended.code}: {ended.err[-300:]}")
    few_lines(ended)
    bench.finish("row-20", 2, more[:2])


@contextmanager
def damaged(bench: FaultHarness, name: str) -> Iterator[Path]:
    """A finished run's folder, a copy to be damaged."""
    source = bench.folder / "runs" / "whole"
    if not source.exists():
        expect(bench.run("whole", 2, ["--training.steps", "20"]).wait().code == 0, "the run to damage failed")
    copy = bench.folder / "runs" / bench.fresh(name)
    shutil.copytree(source, copy)
    yield copy / "checkpoints" / "step-00000020"


def require_fall_back(bench: FaultHarness, name: str) -> None:
    """Started again, the run says what is damaged, goes on from the one before, and ends as if nothing had been."""
    ended = bench.run(name, 2, ["--training.steps", "20"]).wait()
    expect(ended.code == 0, f"ended with {ended.code}: {ended.err[-300:]}")
    expect("warning: ignoring damaged checkpoint" in ended.err, f"not told: {ended.err}")
    expect("step-00000010 (step 10" in ended.out, f"did not go on from step 10: {ended.out[-300:]}")
    expect(digests(bench.folder / "runs" / name) == digests(bench.folder / "runs" / "whole"), "other content")


def row_21(bench: FaultHarness, draw: SeededRandom) -> None:
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
            expect(path.name in manifest.find_damage(newest), f"byte {place} of {path.name}: not told")
            if number < 24:
                path.write_bytes(data)
        require_fall_back(bench, "row-21")


def row_22(bench: FaultHarness, draw: SeededRandom) -> None:
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
                expect(manifest.find_damage(newest), f"{kind} {name}: not told")
                shutil.rmtree(newest)
                shutil.copytree(safe, newest)
        kinds[draw.choice(list(kinds))](newest / "rank-00001.safetensors")
        shutil.rmtree(safe)
        require_fall_back(bench, "row-22")


def row_23(bench: FaultHarness, draw: SeededRandom) -> None:
    with damaged(bench, "row-23") as newest:
        for path in latest_per_step(newest.parent):
            (path / draw.choice(("index.json", "rank-00000.safetensors", "train_state.json"))).unlink()
        before = sorted(str(p) for p in newest.parent.rglob("*"))
        ended = bench.run("row-23", 2, ["--training.steps", "20"]).wait()
        expect(
            ended.code == 2 and "all 2 checkpoints are damaged" in ended.err, f"ended with {ended.code}: {ended.err}"
        )
        expect(sorted(str(p) for p in newest.parent.rglob("*")) == before, "something was changed")


def row_25(bench: FaultHarness, draw: SeededRandom) -> None:
    """Killed while old ones are removed, or just before."""
    more = [*mode_flags(draw.choice(MODES)), "--checkpoint.keep", "1"]
    name = bench.fresh("row-25")
    fault = {"kind": "crash", "point": "committed", "rank": 0, "save": draw.randrange(2, 10)}
    expect(bench.run(name, 2, more, fault).wait().code != 0, "the fault did not come")
    there = digests(bench.folder / "runs" / name)
    expect(there, "no checkpoint is left")
    bench.finish(name, 2, more)
    expect(len(digests(bench.folder / "runs" / name)) == 1, "more than one is left")


def row_26(bench: FaultHarness, draw: SeededRandom) -> None:
    name = bench.fresh("row-26")
    run = bench.run(name, 2, ["--training.steps", "1000000"])
    run.await_step(1)
    second = TrialRun(bench, name, draw.choice((1, 2)), [], None).wait()
    expect(second.code == 2 and "is in use by process" in second.err, f"ended with {second.code}: {second.err}")
    few_lines(second, 1)
    run.process.send_signal(signal.SIGTERM)
    expect(run.wait(60).code == 0, "the first run was disturbed")
    expect(digests(run.folder), "the first run has no checkpoint")


def row_27(bench: FaultHarness, draw: SeededRandom) -> None:
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
