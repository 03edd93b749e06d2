"""Show that every layout gives the same training run: python scripts/parity.py --config FILE.toml [--steps 20] [...]

Runs the configuration on one rank and then under each layout, as gloo ranks on this machine's CPU, and prints the largest
relative deviation of the loss and of the gradient norm over all steps. Exit code 1 if a layout fails.

--layout "tp=2 pp=2"    settings of a layout, those of [parallel] by their bare names, others as section.key=value; may be
                        given several times (default: a matrix of all kinds, as far as the configuration fits them)
--steps N               optimizer steps of each run (default: 20)
--microbatches N ...    microbatches of a step on each rank, in multiples of what a pipeline needs at least (default: 1 2)
--section.key VALUE     any other setting, for all runs

What the file says in [parallel], [activation_checkpoint] and [compile] is left out: the layouts take its place.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from trainer.build import build_trainer
from trainer.config import Config, ConfigError, ParallelConfig
from trainer.config.command_line import Arguments, die, positive_int
from trainer.config.fields import did_you_mean, settings
from trainer.config.load import load_config, parse_argv
from trainer.config.schema import toml_value
from trainer.parallel.pipeline import SCHEDULES, min_microbatches
from trainer.run.resolve import resolve
from trainer.testing.ranks import LocalRanks, RankError

LIMITS = {"fp32": {"loss": 1e-5, "grad_norm": 1e-4}, "bf16": {"loss": 1e-2, "grad_norm": 1e-2}}
"""Largest relative deviation that is rounding."""

MATRIX = [
    *(f"dp_shard={n}" for n in (2, 4, 8)),
    "dp_replicate=2",
    "dp_replicate=2 dp_shard=2",
    "dp_replicate=2 dp_shard=4",
    *(f"tp={n}" for n in (2, 4)),
    "tp=2 sequence_parallel=false",
    "dp_shard=2 tp=2",
    "dp_replicate=2 dp_shard=2 tp=2",
    *(f"cp={n}" for n in (2, 4)),
    "dp_shard=2 cp=2",
    "cp=2 tp=2",
    "dp_shard=2 cp=2 tp=2",
    *(f"pp={n} pipeline_schedule={schedule}" for n in (2, 4) for schedule in SCHEDULES),
    "dp_shard=2 pp=2",
    "tp=2 pp=2",
    "cp=2 pp=2",
    "dp_shard=2 tp=2 pp=2",
    "dp_shard=2 pp=2 pipeline_schedule=ZBVZeroBubble",
    "dp_shard=2 pp=2 reshard_after_forward=always",
    "dp_shard=2 pp=2 pipeline_schedule=Interleaved1F1B reshard_after_forward=always",
    *(f"dp_shard=2 reshard_after_forward={choice}" for choice in ("always", "never")),
    "dp_shard=4 reshard_after_forward=2",
    "dp_shard=2 fsdp_prefetch=2",
    "dp_shard=2 cpu_offload=true",
    "dp_shard=2 training.reduce_every_microbatch=true",
    *(
        f"{layout} activation_checkpoint.{setting}"
        for layout in ("dp_shard=2", "tp=2", "cp=2", "tp=2 pp=2")
        for setting in ("mode=full", "mode=selective", "recompute_all_gather=false")
        if not (layout == "dp_shard=2" and setting == "recompute_all_gather=false")
    ),
    "dp_shard=2 tp=2 activation_checkpoint.mode=full activation_checkpoint.every_n_blocks=2",
    "tp=2 activation_checkpoint.mode=selective activation_checkpoint.save_every_nth_matmul=2",
    "pp=2 pipeline_schedule=ZBVZeroBubble activation_checkpoint.mode=full",
    *(f"{layout} model.overrides.tied_embeddings=true" for layout in ("dp_shard=2", "tp=2", "dp_shard=2 cp=2 tp=2")),
    *(f"{layout} model.overrides.n_kv_heads=2" for layout in ("tp=2", "cp=2")),
    *(f"{layout} training.compute_dtype=bf16" for layout in ("dp_shard=2", "tp=2", "cp=2", "pp=2", "dp_shard=2 tp=2 pp=2")),
    "pp=2 pipeline_schedule=ZBVZeroBubble training.compute_dtype=bf16",
    *(f"{layout} compile.enabled=true" for layout in ("dp_shard=1", "dp_shard=2", "tp=2", "cp=2", "pp=2")),
    "dp_shard=2 tp=2 compile.enabled=true activation_checkpoint.mode=selective",
    "dp_shard=2 tp=2 compile.enabled=true activation_checkpoint.mode=full",
    "tp=2 compile.enabled=true activation_checkpoint.mode=budget",
]  # fmt: skip

WIDTH = 84
"""Of the column of layouts."""

LAYOUT_SECTIONS = ("parallel", "activation_checkpoint", "compile")
"""What may differ from the run on one rank without changing what is computed."""


@dataclass(frozen=True)
class Layout:
    text: str
    settings: dict[str, str]
    """ "section.key" -> value, as on a command line."""

    @classmethod
    def parse(cls, text: str) -> "Layout":
        parallel = {field.name for field in fields(ParallelConfig)}
        given: dict[str, str] = {}
        for word in text.split():
            key, equals, value = word.partition("=")
            if not equals or not key:
                die(f"--layout {text!r}: {word}: expected name=value")
            if "." not in key and key not in parallel:
                die(f"--layout {text!r}: {key}: no setting of [parallel]{did_you_mean(key, parallel)}")
            if key == "dp_shard" and value == "-1":
                die(f"--layout {text!r}: dp_shard must be a number of ranks here (1 unless given)")
            full_key = f"parallel.{key}" if key in parallel else key
            if full_key in given:
                die(f"--layout {text!r}: {word}: given twice")
            given[full_key] = value
        return cls(text, {"parallel.dp_shard": "1"} | given)

    @property
    def of_one_rank(self) -> dict[str, str]:
        """What of it the run on one rank shares."""
        return {k: v for k, v in self.settings.items() if k.split(".")[0] not in LAYOUT_SECTIONS}


def flags(settings: dict[str, str]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


@dataclass(frozen=True)
class Deviation:
    loss: float
    grad_norm: float

    @classmethod
    def between(cls, one: Sequence[dict], other: Sequence[dict]) -> "Deviation":
        """Largest over all steps, relative to the first run; nan where there is one."""
        assert [r["step"] for r in one] == [r["step"] for r in other]

        def largest(key: str) -> float:
            a, b = (np.array([record[key] for record in run]) for run in (one, other))
            return float((abs(a - b) / abs(a)).max())

        return cls(largest("loss"), largest("grad_norm"))

    def __str__(self) -> str:
        return f"{self.loss:>8.1e} {self.grad_norm:>9.1e}"

    def within(self, limits: dict[str, float]) -> bool:
        return self.loss <= limits["loss"] and self.grad_norm <= limits["grad_norm"]


def train(argv: Sequence[str], wrong: bool) -> None:
    """On each rank: a whole run. wrong: with gradients that are averaged over the shards, not summed."""
    os.environ["LOG_RANK"] = ""  # the table is what is printed
    config, cpu = load_config(argv), torch.device("cpu")
    trainer = build_trainer(config, resolve(config, dist.get_world_size()), cpu, None)
    for part in trainer.engine.model_parts.values() if wrong else ():
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)
    trainer.train()


class Runs:
    """Runs of one configuration, in a folder that is removed at the end."""

    def __init__(self, argv: Sequence[str], steps: int, folder: Path):
        given = dict(parse_argv(argv))
        for flag in given:
            if flag.startswith(tuple(f"--{section}." for section in LAYOUT_SECTIONS)):
                raise ConfigError("", f"{flag}: is said by a layout, --layout 'name=value'")
        self.given = {flag.removeprefix("--"): value for flag, value in given.items()}
        self.folder = folder
        config = load_config(argv)
        layout_settings = {
            f"{section}.{name}": setting for section in LAYOUT_SECTIONS for name, setting in settings()[section].items()
        }
        self.common = {
            key: toml_value(setting.default).strip('"')
            for key, setting in layout_settings.items()
            if config.value(key) != setting.default
        } | {
            "run.device": "cpu",
            "run.output_folder": str(folder),
            "training.steps": str(steps),
            "metrics.interval_steps": "1",
            "metrics.tensorboard": "false",
            "evaluation.interval_steps": "0",
            "checkpoint.interval_steps": "0",
        }
        self.number = 0
        self.on_one_rank: dict[tuple, list[dict]] = {}

    def config(self, settings: dict[str, str]) -> Config:
        return load_config(self.arguments(settings))

    def arguments(self, settings: dict[str, str]) -> list[str]:
        """What must be so for a comparison goes before what the user gave."""
        return flags(self.given | self.common | settings)

    def run(self, settings: dict[str, str], ranks: int, wrong: bool = False) -> list[dict]:
        """The records of all steps. Raises RankError."""
        self.number += 1
        name = str(self.number)
        argv = self.arguments(settings | {"run.name": name})
        LocalRanks(ranks).run(train, argv, wrong)
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        shutil.rmtree(self.folder / name)
        return [record for record in map(json.loads, lines) if record["kind"] == "train"]

    def reference(self, layout: Layout, **more: str) -> list[dict]:
        """The run of one rank; more: settings over those of the layout."""
        settings = layout.of_one_rank | more
        key = tuple(sorted(settings.items()))
        if key not in self.on_one_rank:
            self.on_one_rank[key] = self.run(settings, 1)
        return self.on_one_rank[key]

    def limits(self, layout: Layout, dtype: str) -> dict[str, float]:
        """How far a layout may be from one rank. In a coarser precision than fp32, both are runs with errors of their own: where
        one rank is further from itself in fp32 than the limit, the two may be as far apart as both are from there."""
        limits = LIMITS[dtype]
        if dtype == "fp32":
            return limits
        exact = self.reference(layout, **{"training.compute_dtype": "fp32"})
        own = Deviation.between(exact, self.reference(layout))
        return {key: max(limit, 2 * getattr(own, key)) for key, limit in limits.items()}


@dataclass(frozen=True)
class Row:
    """One layout with one number of microbatches, or why it does not fit."""

    layout: Layout
    settings: dict[str, str]
    microbatches: int
    ranks: int
    dtype: str
    refusal: str = ""

    def print(self, *columns: str) -> None:
        print(f"{self.layout.text:<{WIDTH}} {self.ranks:>5} {self.microbatches:>5}", *columns, flush=True)

    def run(self, runs: Runs) -> bool:
        """Whether the layout gives the run of one rank."""
        start = time.perf_counter()
        try:
            deviation = Deviation.between(runs.reference(self.layout), runs.run(self.settings, self.ranks))
            limits = runs.limits(self.layout, self.dtype)
        except RankError as error:
            self.print(f"FAIL: {str(error).strip().splitlines()[-1]}")
            return False
        passed = deviation.within(limits)
        other = "" if limits == LIMITS[self.dtype] else f" (limits {limits['loss']:.1e} {limits['grad_norm']:.1e})"
        self.print(str(deviation), f"{time.perf_counter() - start:>5.0f} s", ("pass" if passed else "FAIL") + other)
        return passed


def settings_of(layout: Layout, config: Config, times: int) -> tuple[dict[str, str], int, int]:
    """The layout with so many times the microbatches it needs; their number, and the number of ranks. Raises ConfigError
    where it does not fit."""
    parallel = config.parallel
    ranks = parallel.dp_replicate * parallel.dp_shard * parallel.cp * parallel.tp * parallel.pp
    microbatches = times * min_microbatches(parallel)
    together = parallel.dp_replicate * parallel.dp_shard * microbatches
    if config.training.global_batch_size % together:
        raise ConfigError(
            "training.global_batch_size",
            f"{config.training.global_batch_size} cannot be cut into {together} microbatches",
        )
    local = config.training.global_batch_size // together
    return layout.settings | {"training.local_batch_size": str(local)}, microbatches, ranks


def plan_row(runs: Runs, layout: Layout, times: int) -> Row:
    try:
        settings, microbatches, ranks = settings_of(layout, runs.config(layout.settings), times)
        config = runs.config(settings)
    except ConfigError as error:
        return Row(layout, {}, 0, 0, "", str(error))
    try:
        resolve(config, ranks)
    except ConfigError as error:
        return Row(layout, {}, 0, 0, "", config.explain(error))
    return Row(layout, settings, microbatches, ranks, config.training.compute_dtype)


def control_row(runs: Runs) -> Row:
    """A layout with a reduction of gradients between two ranks that fits the configuration."""
    tried = [plan_row(runs, Layout.parse(text), 1) for text in ("dp_shard=2", "cp=2")]
    fitting = [row for row in tried if not row.refusal]
    if not fitting:
        raise ConfigError("", f"no layout for the negative control fits: {tried[0].refusal}")
    return fitting[0]


def negative_control(runs: Runs, row: Row) -> bool:
    """Whether a reduction that is wrong on purpose is told from a right one."""
    deviation = Deviation.between(runs.reference(row.layout), runs.run(row.settings, row.ranks, wrong=True))
    caught = not deviation.within(runs.limits(row.layout, row.dtype))
    text = "control: gradients averaged instead of summed, which must be caught"
    print(
        f"{text:<{WIDTH}} {row.ranks:>5} {row.microbatches:>5} {deviation} {'':>7} {'caught' if caught else 'NOT CAUGHT'}"
    )
    return caught


def compare(runs: Runs, layouts: Sequence[Layout], times: Sequence[int], must_fit: bool) -> bool:
    """Print the table; returns whether all rows are as they should be. Raises ConfigError before anything runs."""
    control = control_row(runs)
    table = [plan_row(runs, layout, factor) for layout in layouts for factor in times]
    refused = next((row for row in table if row.refusal), None)
    if must_fit and refused is not None:
        raise ConfigError("", f"--layout {refused.layout.text!r}: {refused.refusal}")
    print(f"{'layout':<{WIDTH}} {'ranks':>5} {'micro':>5} {'loss':>8} {'grad norm':>9}", flush=True)
    passed = []
    for row in table:
        if row.refusal:
            print(f"{row.layout.text:<{WIDTH}} does not fit: {row.refusal}", flush=True)
        else:
            passed.append(row.run(runs))
    caught = negative_control(runs, control)
    within = "; ".join(f"{dtype} {limit['loss']:.0e} and {limit['grad_norm']:.0e}" for dtype, limit in LIMITS.items())
    print(f"{sum(passed)} of {len(passed)} pass (limits of loss and gradient norm: {within})")
    return bool(passed) and all(passed) and caught


def main() -> None:
    parser = Arguments(__doc__, settings=True)
    parser.add_argument("--layout", action="append")
    parser.add_argument("--steps", type=positive_int, default=20)
    parser.add_argument("--microbatches", type=positive_int, nargs="+", default=[1, 2])
    chosen, argv = parser.parse_known_args()
    layouts = [Layout.parse(text) for text in chosen.layout or MATRIX]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended too
    with tempfile.TemporaryDirectory(prefix="parity-", ignore_cleanup_errors=True) as folder:
        try:
            runs = Runs(argv, chosen.steps, Path(folder))
            passed = compare(runs, layouts, chosen.microbatches, must_fit=chosen.layout is not None)
        except ConfigError as error:
            die(str(error))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
