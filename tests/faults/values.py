"""Faults of numbers and settings."""

import itertools
import json
import time
from pathlib import Path

from tests.faults.harness import STEPS, Failed, FaultHarness, SeededRandom, expect
from tests.faults.processes import MODES, mode_flags
from trainer.checkpoint.commit import latest_per_step
from trainer.config import ConfigError, ParallelConfig
from trainer.config.fields import is_table, settings
from trainer.config.load import load_config
from trainer.parallel.mesh import ParallelDims
from trainer.run.resolve import resolve


def case_29(harness: FaultHarness, rng: SeededRandom) -> None:
    """Numbers that are none, on one rank: once (the update is left out), and several times in a row (rolled back)."""
    step = rng.randrange(15, 100)
    fault = {"kind": "gradient", "rank": rng.randrange(2), "scale": rng.choice(("nan", "inf")), "steps": [step]}
    ended = harness.run(harness.fresh("case-29"), 2, fault=fault).wait()
    expect(ended.code == 0, f"ended with {ended.code}: {ended.err[-300:]}")
    expect(ended.err.count("update skipped (1 in a row, 1 in total)") == 1, f"not told once: {ended.err}")
    more = ["--resilience.max_consecutive_skips", "2", "--resilience.on_max_skips", "rollback"]
    fault |= {"steps": [step, step + 1]}
    ended = harness.run(harness.fresh("case-29"), 2, more, fault).wait()
    expect(ended.code == 0 and "rolling back to step" in ended.err, f"ended with {ended.code}: {ended.err[-300:]}")
    state = json.loads(
        (latest_per_step(harness.folder / "runs/case-29/checkpoints")[0] / "train_state.json").read_text()
    )
    expect(state["skipped_samples"] == [[(step - 1) * 8, (step + 1) * 8]], f"passed over {state['skipped_samples']}")


def case_30(harness: FaultHarness, rng: SeededRandom) -> None:
    policy = rng.choice(("skip", "rollback"))
    step = rng.randrange(60, 110)
    fault = {"kind": "gradient", "rank": rng.randrange(2), "scale": "1e4", "steps": [step]}
    more = ["--resilience.on_loss_spike", policy]
    ended = harness.run(harness.fresh("case-30"), 2, more, fault).wait()
    expect(ended.code == 0, f"ended with {ended.code}: {ended.err[-300:]}")
    expect(f"step {step}: loss" in ended.err, f"not told: {ended.err}")
    expect(("rolling back to step" in ended.err) == (policy == "rollback"), f"not as set: {ended.err}")


def case_32(harness: FaultHarness, rng: SeededRandom) -> None:
    more = mode_flags(rng.choice(MODES))
    name = harness.fresh("case-32")
    expect(harness.run(name, 2, more).wait().code == 0, "the run failed")
    harness.assert_same_final_state(name, 2, more)


def case_37(harness: FaultHarness, rng: SeededRandom) -> None:
    """Stopped and gone on with another number of ranks, several times: the same losses, to rounding."""
    name = harness.fresh("case-37")
    for ranks, steps in ((4, 30), (2, 60), (1, 90), (2, STEPS)):
        ended = harness.run(name, ranks, ["--training.steps", str(steps), "--lr_schedule.min_lr_ratio", "1.0"]).wait()
        expect(ended.code == 0, f"on {ranks} ranks it ended with {ended.code}: {ended.err[-300:]}")
    plain = harness.fresh("case-37-plain")
    expect(harness.run(plain, 2, ["--lr_schedule.min_lr_ratio", "1.0"]).wait().code == 0, "the plain run failed")
    mine, reference = (losses(harness.folder / "runs" / folder) for folder in (name, plain))
    far = [step for step in reference if abs(mine[step] - reference[step]) > 1e-5 * reference[step]]
    expect(set(mine) == set(reference) and not far, f"other losses at steps {far[:5]}")


def losses(folder: Path) -> dict[int, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def edited(rng: SeededRandom, word: str) -> str:
    """One letter left out, doubled, exchanged with the next, or replaced."""
    at = rng.randrange(len(word))
    kinds = (
        word[:at] + word[at + 1 :],
        word[:at] + word[at] + word[at:],
        word[:at] + word[at : at + 2][::-1] + word[at + 2 :],
        word[:at] + rng.choice("abcdefghijklmnopqrstuvwxyz_") + word[at + 1 :],
    )
    return rng.choice(kinds)


def case_40(harness: FaultHarness, rng: SeededRandom) -> None:
    """Every setting with a typo, in the file and as a flag."""
    for section, members in settings().items():
        for name in members:
            wrong = edited(rng, name)
            if wrong in members or not wrong:
                continue
            for argv in (["--config", str(harness.folder / "typo.toml")], [f"--{section}.{wrong}", "1"]):
                (harness.folder / "typo.toml").write_text(f"[{section}]\n{json.dumps(wrong)} = 1\n")
                try:
                    load_config(argv)
                except ConfigError as error:
                    expect(wrong in str(error), f"{section}.{wrong}: {error}")
                    short = len(name) <= 3  # of so few letters, one is much
                    expect("did you mean" in str(error) or short, f"no suggestion for {section}.{wrong}: {error}")
                else:
                    raise Failed(f"{section}.{wrong} was taken")


VALUES = (
    *(
        "0",
        "1",
        "-1",
        "2",
        "3",
        "7",
        "64",
        "1000000",
        "99999999999999999999",
        "1e400",
        "nan",
        "-inf",
        "0.5",
        "1e-9",
        "",
        " ",
    ),
    *(
        "true",
        "none",
        "off",
        "full",
        "llama3.2",
        "1b",
        "text",
        "/",
        "..",
        "\u202e",
        "😀",
        "a" * 5000,
        "[1, 2",
        "{",
        "0x10",
        "1_0",
    ),
)


def case_41(harness: FaultHarness, rng: SeededRandom) -> None:
    """250 configurations with up to three settings of any value: a plan, or one line."""
    flags = [
        setting.flag for members in settings().values() for setting in members.values() if not is_table(setting.type)
    ]
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
    """Every mesh of up to 64 ranks: one that makes up the world, or a line."""
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
                expect(fits and product == world, f"{config} on {world} ranks was taken")


def case_46(harness: FaultHarness, rng: SeededRandom) -> None:
    secret = f"s3cr3t{rng.randrange(10**9)}"
    names = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY")
    name = harness.fresh("case-46")
    fault = {"kind": "raise", "rank": 1, "step": 12}
    ended = harness.run(name, 2, (), fault, **dict.fromkeys(names, secret)).wait()
    written = [p.read_bytes() for p in (harness.folder / "runs" / name).rglob("*") if p.is_file()]
    hits = sum(secret.encode() in text for text in [*written, ended.out.encode(), ended.err.encode()])
    expect(ended.code == 1 and hits == 0, f"the secret is in {hits} outputs")
