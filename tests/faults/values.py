"""Faults of values: gradients, settings, meshes, secrets."""

import itertools
import json
import time
from pathlib import Path

from tests.faults.harness import STEPS, Failed, FaultHarness, SeededRandom, expect
from tests.faults.processes import MODES, mode_flags
from trainer.base.config import ConfigError, ParallelConfig
from trainer.base.config.fields import settings
from trainer.base.config.load import load_config
from trainer.checkpoint.commit import latest_per_step
from trainer.parallel.mesh import ParallelDims
from trainer.run.resolve import resolve


def case_29(harness: FaultHarness, rng: SeededRandom) -> None:
    """Make gradients of one rank non-finite at one step, which is skipped, and at two in a row, which are rolled back."""
    name = harness.fresh("case-29")
    step = rng.randrange(15, 100)
    fault = {"kind": "gradient", "rank": rng.randrange(2), "scale": rng.choice(("nan", "inf")), "steps": [step]}
    result = harness.run(name, 2, fault=fault).wait()
    expect(result.code == 0, f"exited with {result.code}: {result.err[-300:]}")
    expect(result.err.count("update skipped (1 in a row, 1 in total)") == 1, f"not reported once: {result.err}")
    flags = ["--resilience.max_consecutive_skips", "2", "--resilience.on_max_skips", "rollback"]
    fault |= {"steps": [step, step + 1]}
    result = harness.run(harness.fresh(name), 2, flags, fault).wait()
    rolled_back = result.code == 0 and "rolling back to step" in result.err
    expect(rolled_back, f"exited with {result.code}: {result.err[-300:]}")
    newest = latest_per_step(harness.folder / "runs" / name / "checkpoints")[0]
    skipped = json.loads((newest / "train_state.json").read_text())["skipped_samples"]
    expect(skipped == [[(step - 1) * 8, (step + 1) * 8]], f"skipped samples {skipped}")


def case_30(harness: FaultHarness, rng: SeededRandom) -> None:
    policy = rng.choice(("skip", "rollback"))
    step = rng.randrange(60, 110)
    fault = {"kind": "gradient", "rank": rng.randrange(2), "scale": "1e4", "steps": [step]}
    flags = ["--resilience.on_loss_spike", policy]
    result = harness.run(harness.fresh("case-30"), 2, flags, fault).wait()
    expect(result.code == 0, f"exited with {result.code}: {result.err[-300:]}")
    expect(f"step {step}: loss" in result.err, f"not reported: {result.err}")
    expect(("rolling back to step" in result.err) == (policy == "rollback"), f"not as configured: {result.err}")


def case_32(harness: FaultHarness, rng: SeededRandom) -> None:
    flags = mode_flags(rng.choice(MODES))
    name = harness.fresh("case-32")
    expect(harness.run(name, 2, flags).wait().code == 0, "the run failed")
    harness.assert_same_final_state(name, 2, flags)


def case_37(harness: FaultHarness, rng: SeededRandom) -> None:
    """Resume on another number of ranks several times; compare the losses up to rounding."""
    flags = ["--lr_schedule.min_lr_ratio", "1.0"]
    name = harness.fresh("case-37")
    for ranks, steps in ((4, 30), (2, 60), (1, 90), (2, STEPS)):
        result = harness.run(name, ranks, [*flags, "--training.steps", str(steps)]).wait()
        expect(result.code == 0, f"on {ranks} ranks it exited with {result.code}: {result.err[-300:]}")
    uninterrupted = harness.fresh("case-37-uninterrupted")
    expect(harness.run(uninterrupted, 2, flags).wait().code == 0, "the uninterrupted run failed")
    actual, reference = (losses(harness.folder / "runs" / folder) for folder in (name, uninterrupted))
    far = [step for step in reference if abs(actual[step] - reference[step]) > 1e-5 * reference[step]]
    expect(set(actual) == set(reference) and not far, f"other losses at steps {far[:5]}")


def losses(folder: Path) -> dict[int, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def with_typo(rng: SeededRandom, word: str) -> str:
    """Return the word with one letter removed, doubled, exchanged with the next, or replaced."""
    i = rng.randrange(len(word))
    typos = (
        word[:i] + word[i + 1 :],
        word[:i] + word[i] + word[i:],
        word[:i] + word[i : i + 2][::-1] + word[i + 2 :],
        word[:i] + rng.choice("abcdefghijklmnopqrstuvwxyz_") + word[i + 1 :],
    )
    return rng.choice(typos)


def case_40(harness: FaultHarness, rng: SeededRandom) -> None:
    """Misspell every setting, in a file and as a flag."""
    path = harness.folder / "typo.toml"
    for key in settings():
        section, _, name = key.partition(".")
        typo = with_typo(rng, name)
        if f"{section}.{typo}" in settings() or not typo:
            continue
        path.write_text(f"[{section}]\n{json.dumps(typo)} = 1\n")
        for argv in (["--config", str(path)], [f"--{section}.{typo}", "1"]):
            try:
                load_config(argv)
            except ConfigError as error:
                expect(typo in str(error), f"{section}.{typo}: {error}")
                too_short = len(name) <= 3  # the typo is not similar enough for a suggestion
                expect("did you mean" in str(error) or too_short, f"no suggestion for {section}.{typo}: {error}")
            else:
                raise Failed(f"{section}.{typo} was accepted")


VALUES = (
    *("0", "1", "-1", "2", "3", "7", "64", "1000000", "99999999999999999999", "1e400", "nan", "-inf", "0.5", "1e-9"),
    *("", " ", "true", "none", "off", "full", "llama3.2", "1b", "text", "/", "..", "\u202e", "😀", "a" * 5000),
    *("[1, 2", "{", "0x10", "1_0"),
)


def case_41(harness: FaultHarness, rng: SeededRandom) -> None:
    """Load 250 configurations with random values of up to three settings: each is accepted or a one-line error."""
    flags = [f"--{key}" for key, setting in settings().items() if not setting.is_table]
    for _ in range(250):
        chosen = rng.sample(flags, rng.randrange(1, 4))
        argv = [word for flag in chosen for word in (flag, rng.choice(VALUES))]
        start = time.monotonic()
        try:
            resolve(load_config(["--config", str(harness.config), *argv]), rng.choice((1, 2, 8, 64)))
        except ConfigError as error:
            expect("\n" not in str(error), f"{argv}: more than one line: {error}")
        except Exception as error:
            raise Failed(f"{argv}: {type(error).__name__}: {error}") from error
        expect(time.monotonic() - start < 2, f"{argv}: took {time.monotonic() - start:.1f} s")


def case_42(harness: FaultHarness, rng: SeededRandom) -> None:
    """Build meshes of many shapes on up to 64 ranks: a mesh of all ranks or a one-line error."""
    degrees = (1, 2, 3, 4, 5, 8, 16, 64)
    for world in rng.sample(range(1, 65), 8):
        for replicate, shard, cp, tp, pp in itertools.product(degrees, (-1, *degrees), degrees, degrees, degrees):
            config = ParallelConfig(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, pp=pp)
            others = replicate * cp * tp * pp
            fits = world % others == 0 if shard == -1 else others * shard == world
            try:
                dims = ParallelDims.from_config(config, world)
            except ConfigError as error:
                expect(not fits and "\n" not in str(error), f"{config} on {world} ranks was refused: {error}")
            else:
                product = dims.dp_replicate * dims.dp_shard * dims.cp * dims.tp * dims.pp
                expect(fits and product == world, f"{config} on {world} ranks was accepted")


def case_46(harness: FaultHarness, rng: SeededRandom) -> None:
    secret = f"s3cr3t{rng.randrange(10**9)}"
    variables = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY")
    name = harness.fresh("case-46")
    fault = {"kind": "raise", "rank": 1, "step": 12}
    result = harness.run(name, 2, (), fault, **dict.fromkeys(variables, secret)).wait()
    files = [p.read_bytes() for p in (harness.folder / "runs" / name).rglob("*") if p.is_file()]
    hits = sum(secret.encode() in content for content in [*files, result.out.encode(), result.err.encode()])
    expect(result.code == 1 and hits == 0, f"exited with {result.code}; the secret is in {hits} outputs")
