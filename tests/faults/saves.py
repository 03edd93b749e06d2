"""Faults of saves and of checkpoints."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.harness import ROOT, FaultHarness, SeededRandom, digest, digests, expect, expect_few_lines
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
"""Points of a save, for the fault "crash" of sitecustomize.py."""
POINTS_ON_EVERY_RANK = ("before the plan", "header written", "half of a shard", "shard written")


def case_15(harness: FaultHarness, rng: SeededRandom) -> None:
    """Test one combination per trial, in turn."""
    combinations = [(point, mode, ranks) for ranks in (2, 1, 4) for mode in MODES for point in POINTS]
    crash(harness, *combinations[rng.trial % len(combinations)], rng)


def crash(harness: FaultHarness, point: str, mode: str, ranks: int, rng: SeededRandom) -> None:
    """SIGKILL one rank at a point of its second or third save."""
    flags = mode_flags(mode)
    name = harness.fresh("case-15")
    rank = rng.randrange(ranks) if point in POINTS_ON_EVERY_RANK else 0
    fault = {"kind": "crash", "point": point, "rank": rank, "save": rng.choice((2, 3))}
    reference = harness.reference(ranks, flags)
    result = harness.run(name, ranks, flags, fault).wait()
    expect(result.code != 0, f"{point}, {mode}, {ranks} ranks: the fault was not injected")
    actual = digests(harness.folder / "runs" / name)  # verifies each checkpoint
    mixed = [step for step, found in actual.items() if found != reference[step]]
    expect(not mixed, f"{point}, {mode}, {ranks} ranks: mixed content at steps {mixed}")
    harness.finish(name, ranks, flags)


def case_16(harness: FaultHarness, rng: SeededRandom) -> None:
    """Save a step again with other content and kill this save."""
    _, new = save_again(harness, "case-16-reference", None)
    point = rng.choice(("old renamed", "renamed", "manifest written", "half of a shard"))
    old, _ = save_again(harness, "case-16", {"kind": "crash", "point": point, "rank": 0, "save": 1})
    folder = harness.folder / "runs" / "case-16" / "checkpoints"
    for path in folder.glob("step-00000030*"):
        if (path / "manifest").exists():
            (path / "manifest").rename(path / "manifest.json")
    for path in latest_per_step(folder):
        digest(path)  # verifies the checkpoint
    result = harness.run("case-16", 2, [*SHORT, *OTHER_LR]).wait()
    expect(result.code == 0, f"{point}: the resumed run exited with {result.code}: {result.err[-300:]}")
    final = digests(folder.parent)[30]
    expect(final in (old, new), f"{point}: neither the old nor the new final state")
    expect(final == new or point != "renamed", f"{point}: the new checkpoint is lost")


SHORT = ["--training.steps", "30"]
OTHER_LR = ["--optimizer.lr", "1e-3"]


def save_again(harness: FaultHarness, name: str, fault: dict | None) -> tuple[str, str]:
    """Train to step 30, hide this checkpoint, and resume from step 20 with another learning rate, so that step 30 is saved again.
    Return the digests of both; the second one is "" if there is a fault in the second run."""
    expect(harness.run(harness.fresh(name), 2, SHORT).wait().code == 0, "the first run failed")
    newest = harness.folder / "runs" / name / "checkpoints" / "step-00000030"
    old = digest(newest)
    (newest / "manifest.json").rename(newest / "manifest")
    result = harness.run(name, 2, [*SHORT, *OTHER_LR], fault).wait()
    expect((result.code == 0) == (fault is None), f"{name}: exited with {result.code}")
    return old, "" if fault else digest(newest)


def case_17(harness: FaultHarness, rng: SeededRandom) -> None:
    mode, error = rng.choice(MODES), rng.choice(("ENOSPC", "EDQUOT", "EFBIG"))
    flags = mode_flags(mode)
    name = harness.fresh("case-17")
    fault = {"kind": "write_error", "rank": rng.randrange(2), "error": error, "times": 1, "save": rng.randrange(2, 8)}
    result = harness.run(name, 2, flags, fault).wait()
    expect(result.code == 0, f"exited with {result.code}: {result.err[-300:]}")
    expect(result.err.count("could not be saved") == 1, f"not reported once: {result.err}")
    temporary = [p.name for p in (harness.folder / "runs" / name / "checkpoints").glob("*.tmp-*")]
    expect(not temporary, f"not removed: {temporary}")
    harness.assert_same_final_state(name, 2, flags)
    result = harness.run(harness.fresh(name), 2, [*flags, "--checkpoint.on_failure", "stop"], fault).wait()
    stopped = result.code == 1 and "could not be saved" in result.err
    expect(stopped, f"on_failure = stop, but exited with {result.code}")
    expect_few_lines(result)
    harness.finish(name, 2, flags)


def case_19(harness: FaultHarness, rng: SeededRandom) -> None:
    flags = mode_flags(rng.choice(MODES))
    fault = {"kind": "write_error", "rank": 0, "error": "EIO", "times": 2, "save": rng.randrange(1, 8)}
    result = harness.run(harness.fresh("case-19"), 2, flags, fault).wait()
    expect(result.code == 0, f"exited with {result.code}: {result.err[-300:]}")
    reported = result.err.count("Input/output error; attempt") == 2
    expect(reported, f"not reported: {result.err}")
    harness.assert_same_final_state("case-19", 2, flags)


def case_20(harness: FaultHarness, rng: SeededRandom) -> None:
    flags = mode_flags("thread")
    fault = {"kind": "write_error", "rank": rng.randrange(2), "error": "EROFS", "times": 99, "save": 3}
    result = harness.run(harness.fresh("case-20"), 2, [*flags, "--checkpoint.on_failure", "stop"], fault).wait()
    stopped = result.code == 1 and "Read-only file system" in result.err
    expect(stopped, f"exited with {result.code}: {result.err[-300:]}")
    expect_few_lines(result)
    harness.finish("case-20", 2, flags)


@contextmanager
def checkpoint_to_damage(harness: FaultHarness, name: str) -> Iterator[Path]:
    """Copy a finished run of 20 steps to a new run and yield its newest checkpoint."""
    source = harness.folder / "runs" / "intact"
    if not source.exists():
        expect(harness.run("intact", 2, ["--training.steps", "20"]).wait().code == 0, "the run to damage failed")
    copy = harness.folder / "runs" / harness.fresh(name)
    shutil.copytree(source, copy)
    yield copy / "checkpoints" / "step-00000020"


def expect_fallback(harness: FaultHarness, name: str) -> None:
    """The resumed run reports the damage, resumes from the previous checkpoint, and has the same final state."""
    result = harness.run(name, 2, ["--training.steps", "20"]).wait()
    expect(result.code == 0, f"exited with {result.code}: {result.err[-300:]}")
    expect("warning: ignoring damaged checkpoint" in result.err, f"not reported: {result.err}")
    expect("step-00000010 (step 10" in result.out, f"not resumed from step 10: {result.out[-300:]}")
    same = digests(harness.folder / "runs" / name) == digests(harness.folder / "runs" / "intact")
    expect(same, "content differs from the intact run")


def case_21(harness: FaultHarness, rng: SeededRandom) -> None:
    """Flip a bit 25 times; the run resumes after the last one."""
    with checkpoint_to_damage(harness, "case-21") as newest:
        files = sorted(newest.iterdir())
        for i in range(25):
            path = rng.choices(files, [p.stat().st_size for p in files])[0] if i % 2 else rng.choice(files)
            data = path.read_bytes()
            flipped = bytearray(data)
            offset = rng.randrange(len(data))
            flipped[offset] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            expect(path.name in manifest.find_damage(newest), f"byte {offset} of {path.name}: not reported")
            if i < 24:
                path.write_bytes(data)
        expect_fallback(harness, "case-21")


def case_22(harness: FaultHarness, rng: SeededRandom) -> None:
    """Damage every file in six ways; the run resumes after one of them."""
    with checkpoint_to_damage(harness, "case-22") as newest:
        names = sorted(p.name for p in newest.iterdir())
        previous = newest.parent / "step-00000010"
        damages = {
            "truncated": lambda p: p.write_bytes(p.read_bytes()[: rng.randrange(p.stat().st_size)]),
            "missing": lambda p: p.unlink(),
            "extra": lambda p: p.with_name(f"{p.name}.1").write_bytes(b"x"),
            "longer": lambda p: p.write_bytes(p.read_bytes() + b"\0"),
            "swapped": lambda p: p.write_bytes((previous / p.name).read_bytes()),
            "zeros": lambda p: p.write_bytes(bytes(min(4096, p.stat().st_size)) + p.read_bytes()[4096:]),
        }
        intact = newest.parent / "intact"
        shutil.copytree(newest, intact)
        for damage, apply in damages.items():
            for name in names:
                if damage == "swapped" and (intact / name).read_bytes() == (previous / name).read_bytes():
                    continue  # the file is the same in both checkpoints
                apply(newest / name)
                expect(manifest.find_damage(newest), f"{damage} {name}: not reported")
                shutil.rmtree(newest)
                shutil.copytree(intact, newest)
        damages[rng.choice(list(damages))](newest / "rank-00001.safetensors")
        shutil.rmtree(intact)
        expect_fallback(harness, "case-22")


def case_23(harness: FaultHarness, rng: SeededRandom) -> None:
    with checkpoint_to_damage(harness, "case-23") as newest:
        folder = newest.parent
        for path in latest_per_step(folder):
            (path / rng.choice(("index.json", "rank-00000.safetensors", "train_state.json"))).unlink()
        before = sorted(str(p) for p in folder.rglob("*"))
        result = harness.run("case-23", 2, ["--training.steps", "20"]).wait()
        refused = result.code == 2 and "all 2 checkpoints are damaged" in result.err
        expect(refused, f"exited with {result.code}: {result.err}")
        expect(sorted(str(p) for p in folder.rglob("*")) == before, "the folder was changed")


def case_25(harness: FaultHarness, rng: SeededRandom) -> None:
    """SIGKILL rank 0 just before it deletes old checkpoints."""
    flags = [*mode_flags(rng.choice(MODES)), "--checkpoint.keep", "1"]
    name = harness.fresh("case-25")
    fault = {"kind": "crash", "point": "committed", "rank": 0, "save": rng.randrange(2, 10)}
    expect(harness.run(name, 2, flags, fault).wait().code != 0, "the fault was not injected")
    expect(digests(harness.folder / "runs" / name), "no checkpoint exists")
    harness.finish(name, 2, flags)
    expect(len(digests(harness.folder / "runs" / name)) == 1, "more than one checkpoint exists")


def case_26(harness: FaultHarness, rng: SeededRandom) -> None:
    name = harness.fresh("case-26")
    first = harness.run(name, 2, ["--training.steps", "1000000"])
    first.wait_for_step(1)
    second = harness.run(name, rng.choice((1, 2))).wait()
    refused = second.code == 2 and "is in use by process" in second.err
    expect(refused, f"exited with {second.code}: {second.err}")
    expect_few_lines(second, 1)
    first.process.send_signal(signal.SIGTERM)
    expect(first.wait(60).code == 0, "the first run failed")
    expect(digests(first.folder), "the first run has no checkpoint")


def case_27(harness: FaultHarness, rng: SeededRandom) -> None:
    """Use a file as the output folder."""
    path = harness.folder / "file"
    path.write_text("")
    result = subprocess.run(
        [ROOT / "run_llama_train.sh", "--config", harness.config, "--run.output_folder", path],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHON": sys.executable, "NGPU": str(rng.choice((1, 2)))},
    )
    refused = result.returncode == 2 and "cannot be written" in result.stderr
    expect(refused, f"exited with {result.returncode}: {result.stderr}")
    expect(len(result.stderr.splitlines()) == 1, result.stderr)
