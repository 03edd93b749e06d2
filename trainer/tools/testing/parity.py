"""Comparison of training under a parallel layout with training on one rank: losses, gradient norms and each parameter's gradient.

scripts/parity.py prints the comparisons as a table.
"""

import itertools
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.mixture_sizes import MixtureSizes
from trainer.base.config import Config, ConfigError, compatibility
from trainer.base.config.fields import settings
from trainer.base.config.load import load_config
from trainer.base.config.schema.condition import Known
from trainer.base.config.schema.facts import GRADIENTS_COMPARED, TRANSFORMERS
from trainer.base.config.toml_text import toml_value
from trainer.base.system.files import read_json_lines
from trainer.base.system.run_files import METRICS_FILE
from trainer.build import build_trainer
from trainer.parallel import parallelize
from trainer.run.resolve import resolve, resolve_model
from trainer.tools.testing.bugs import BUGS, Bug
from trainer.tools.testing.double import double_precision
from trainer.tools.testing.layouts import (
    LAYOUT_SECTIONS,
    Layout,
    Table,
    batch_settings,
    flags,
    load_layout,
    num_ranks,
    settings_of,
)
from trainer.tools.testing.ranks import LocalRanks, RankError
from trainer.tools.testing.routing import Decisions, RouterLog
from trainer.tools.testing.transformers_model import transformers_step

LIMITS = {
    "fp32": {"loss": 1e-5, "grad_norm": 1e-4, "gradient": 1e-4},
    "bf16": {"loss": 1e-2, "grad_norm": 3e-2, "gradient": 3e-2},
}
"""compute_dtype -> metric -> maximum relative deviation that is accepted as rounding error. In bf16, the gradient norm of the
debug run on one rank deviates from that in fp32 by 0.1 % in most steps, but by up to 2 % in a single step."""
ROUTING_LIMITS = {"fp32": 1e-4, "bf16": 5e-2}
"""compute_dtype -> maximum share of a router's decisions that a rounding error is accepted to change."""

NEGLIGIBLE = 1e-4
"""Fraction of the gradient norm below which the gradient of a parameter is rounding error. The deviations of smaller gradients
are relative to this fraction. For example, the gradient of the bias of keys without positional encoding is zero."""


@dataclass(frozen=True)
class Trained:
    """Results of a training run."""

    records: list[dict]
    """Metrics of each step."""
    gradients: tuple[dict[str, Tensor], dict[str, Tensor]]
    """Name of a parameter -> its full gradient before clipping, in the first and in the last step."""
    decisions: dict[int, Decisions] = field(default_factory=dict)
    """Layer -> decisions of its router. Empty without experts, or if they were replayed."""
    num_decisions: int = 0
    num_different: int = 0
    """See RouterLog."""

    @classmethod
    def of_ranks(cls, records: list[dict], parts: Sequence["TrainedPart"]) -> "Trained":
        """parts: result of `train` on each rank."""
        first, last = (
            {k: g for gradients in step for k, g in gradients.items()}
            for step in zip(*(p.gradients for p in parts), strict=True)
        )
        layers = {layer for p in parts for layer in p.decisions}
        decisions = {i: Decisions.join(p.decisions[i] for p in parts if i in p.decisions) for i in layers}
        counts = (sum(p.num_decisions for p in parts), sum(p.num_different for p in parts))
        return cls(records, (first, last), decisions, *counts)

    @property
    def routed_differently(self) -> float:
        """Share of the replayed decisions that the run would have made differently."""
        return self.num_different / max(1, self.num_decisions)


class TrainedPart(NamedTuple):
    """Results of a training run on one rank."""

    gradients: tuple[dict[str, Tensor], dict[str, Tensor]]
    """Those of the parameters of which this rank is the first to have them, see Trained."""
    decisions: dict[int, Decisions]
    num_decisions: int
    num_different: int
    """See Trained."""


@dataclass(frozen=True)
class GradientDeviation:
    """Comparison of a parameter's gradient with that of the reference run."""

    name: str
    ratio: float
    """Norm of the gradient divided by the reference's."""
    cosine: float
    deviation: float
    """Norm of the difference, relative to the reference."""


def gradient_deviations(reference: Trained, run: Trained) -> list[GradientDeviation]:
    """Return the comparisons of all gradients in the first and in the last step, the worst first."""
    comparisons = []
    of_steps = list(zip(reference.gradients, run.gradients, strict=True))[: len(reference.records)]
    for expected, actual in of_steps:
        assert expected.keys() == actual.keys()
        total = torch.stack([g.norm() for g in expected.values()]).norm()
        for name, a in expected.items():
            b, size = actual[name], a.norm().clamp(min=torch.finfo(a.dtype).tiny)
            deviation = (b - a).norm() / size.clamp(min=NEGLIGIBLE * total.item())
            cosine = F.cosine_similarity(a.flatten(), b.flatten(), dim=0)
            comparisons.append(GradientDeviation(name, (b.norm() / size).item(), cosine.item(), deviation.item()))
    return sorted(comparisons, key=lambda c: -math.inf if math.isnan(c.deviation) else -c.deviation)


def deviations(reference: Trained, run: Trained) -> dict[str, float]:
    """Return the largest relative deviations of loss (and of the other losses of the run) and gradient norm over all steps, and
    of a parameter's gradient; NaN if a value is NaN."""
    assert [r["step"] for r in reference.records] == [r["step"] for r in run.records]
    metrics = ["loss", "grad_norm", *(name for name in ("z_loss", "prediction_loss") if name in run.records[0])]
    a, b = (np.array([[record[name] for name in metrics] for record in r.records]) for r in (reference, run))
    loss, grad_norm, *others = (abs(a - b) / abs(a)).max(axis=0)
    gradient = gradient_deviations(reference, run)[0].deviation
    return {"loss": float(np.max([loss, *others])), "grad_norm": float(grad_norm), "gradient": gradient}


def within(deviation: dict[str, float], limits: dict[str, float]) -> bool:
    return all(deviation[name] <= limit for name, limit in limits.items())


def train(argv: Sequence[str], decisions: Mapping[int, Decisions] = {}, bug: str = "") -> TrainedPart:
    """Train on this rank.

    Args:
        argv: Command line of the run.
        decisions: Layer -> decisions that its router must repeat. Empty: routers decide.
        bug: Key of BUGS, or "" for a correct run.
    """
    os.environ["LOG_RANK"] = ""  # only the table is printed
    config, cpu = load_config(argv), torch.device("cpu")
    resolved = resolve(config, dist.get_world_size())
    steps, gradients = itertools.count(1), []
    # In fp32, correct layouts deviate: products in float8 for the reason in double.py, and recurrences because their gradients
    # are ill-conditioned. The first results of a sequence are small, and are divided by their norm.
    deviates = bool(resolved.float8.modules) or resolved.structure.is_recurrent
    # Graphs break where decisions are recorded, so those of experts are compiled as in layouts where they break anyway.
    with (
        BUGS[bug].inject() if bug else nullcontext(),
        patch.object(parallelize, "experts_are_one_graph", lambda *args: False),
        double_precision() if deviates and config.training.compute_dtype == "fp32" else nullcontext(),
    ):
        trainer = build_trainer(config, resolved, cpu, None)
        engine, clip = trainer.engine, trainer.engine.optimizer.clip
        log = RouterLog(decisions)
        if engine.expert_load is not None:
            log.watch(engine.expert_load.layers)

        def record_and_clip(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if next(steps) in (1, config.training.steps):
                trained = {name: p for name, p in engine.parameters.items() if p.requires_grad}
                gradients.append({name: full(p.grad).float().clone() for name, p in trained.items()})
            return clip(*args, **kwargs)

        with patch.object(engine.optimizer, "clip", record_and_clip):
            trainer.train()
    is_first_of_stage = dist.get_rank() % resolved.dims.ranks_per_stage == 0
    kept = (gradients[0], gradients[-1]) if is_first_of_stage else ({}, {})
    return TrainedPart(kept, log.decisions(), log.num_decisions, log.num_different)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Runs:
    """Training runs of one configuration. The output folder of each run is deleted when the run ends."""

    def __init__(self, argv: Sequence[str], steps: int, folder: Path, with_transformers: bool = False):
        """with_transformers: whether the reference is the first step computed by transformers, instead of a run on one rank."""
        self.with_transformers = with_transformers
        self.given = settings_of(argv)
        for key, value in self.given.items():
            section = key.partition(".")[0]
            if section in LAYOUT_SECTIONS:
                raise ConfigError("", f"--{key} {value}: only --layout 'name=value ...' can set [{section}]")
        self.folder = folder
        config = load_config(argv)
        with config.explained_errors():
            compatibility.check(config, {TRANSFORMERS: Known(with_transformers)})
        defaults = {
            key: toml_value(setting.default).strip('"')
            for key, setting in settings().items()
            if setting.section in LAYOUT_SECTIONS and config.value(key) != setting.default
        }
        self.common = defaults | {
            "run.device": "cpu",
            "run.output_folder": str(folder),
            "run.name": "run",
            "training.steps": "1" if with_transformers else str(steps),
            "metrics.interval_steps": "1",
            "metrics.sinks": "console,jsonl",
            "evaluation.interval_steps": "0",
            "evaluation.tasks": "{}",
            "checkpoint.interval_steps": "0",
        }
        _, sizes = resolve_model(config.model)
        self.has_experts = isinstance(sizes, MixtureSizes)
        self.single_rank_runs: dict[tuple, Trained] = {}

    def flags(self, settings: dict[str, str]) -> list[str]:
        """Return the command line of a run. The settings of the comparison override the user's settings."""
        return flags(self.given | self.common | settings)

    def run(
        self, settings: dict[str, str], ranks: int, decisions: Mapping[int, Decisions] = {}, bug: str = ""
    ) -> Trained:
        """Train and return the results.

        Args:
            settings: Those in which the run differs from others of the comparison.
            ranks: Number of ranks.
            decisions: See `train`.
            bug: See `train`.

        Raises:
            RankError: A rank fails.
        """
        try:
            parts = LocalRanks(ranks).run(train, self.flags(settings), decisions, bug)
            records = [r for r in read_json_lines(self.folder / "run" / METRICS_FILE) if r["kind"] == "train"]
            return Trained.of_ranks(records, parts)
        finally:
            shutil.rmtree(self.folder / "run", ignore_errors=True)

    def reference(self, layout: Layout, decisions: Mapping[int, Decisions] = {}, **overrides: str) -> Trained:
        """Return the results of the reference run on one rank. It uses `overrides`, and the layout's settings that change the
        result of training.

        Args:
            layout: Of the run that is compared.
            decisions: See `train`.
            **overrides: Other settings.
        """
        settings = layout.single_rank_settings | overrides
        key = tuple(sorted(settings.items()))
        if key not in self.single_rank_runs:
            compute = (
                self._run_transformers if self.with_transformers else partial(self.run, ranks=1, decisions=decisions)
            )
            self.single_rank_runs[key] = compute(settings)
        return self.single_rank_runs[key]

    def _run_transformers(self, settings: dict[str, str]) -> Trained:
        ((losses, gradients),) = LocalRanks(1).run(transformers_step, self.flags(settings))
        norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
        return Trained([{"step": 1, "grad_norm": norm} | losses], (gradients, gradients))

    def limits(self, layout: Layout, dtype: str) -> dict[str, float]:
        """Return the limits of a layout. In bf16, the reference run has rounding errors too, so each limit is at least twice the
        deviation between the reference runs in bf16 and fp32."""
        limits = LIMITS[dtype]
        if dtype == "fp32":
            return limits
        rounded = self.reference(layout)
        exact = self.reference(layout, rounded.decisions, **{"training.compute_dtype": "fp32"})
        rounding = deviations(exact, rounded)
        return {name: max(limit, 2 * rounding[name]) for name, limit in limits.items()}


@dataclass(frozen=True)
class Row:
    """A row of the table: one combination of a layout and a number of microbatches."""

    layout: Layout
    config: Config
    settings: dict[str, str]
    microbatches: int

    @classmethod
    def build(cls, runs: Runs, layout: Layout, factor: int) -> "Row":
        """factor: number of microbatches as a multiple of the layout's minimum. Raises ConfigError if the layout does not fit."""
        batch, microbatches = batch_settings(load_config(runs.flags(layout.settings)), factor)
        settings = layout.settings | batch
        config = load_layout(runs.flags(settings))
        with config.explained_errors():
            compatibility.check(config, {GRADIENTS_COMPARED: Known(True)})
        reference = load_config(runs.flags(layout.single_rank_settings))
        with reference.explained_errors():
            resolve(reference, 1)
        return cls(layout, config, settings, microbatches)

    def measure(self, runs: Runs, bug: str = "") -> "Comparison":
        """Train. Raises RankError."""
        dtype, reference = self.config.training.compute_dtype, runs.reference(self.layout)
        run = runs.run(self.settings, num_ranks(self.config.parallel), reference.decisions, bug)
        return Comparison(dtype, deviations(reference, run), runs.limits(self.layout, dtype), reference, run)

    def run(self, runs: Runs, table: Table, num_gradients: int, bug: str = "") -> bool:
        """Print the row, and the parameters whose gradients deviate most. Return whether the deviations are within the limits."""
        start, ranks = time.perf_counter(), num_ranks(self.config.parallel)
        name = f"negative control: {bug}" if bug else self.layout.text
        try:
            found = self.measure(runs, bug)
        except RankError as error:
            table.row(name, ranks, self.microbatches, f"FAIL: {str(error).strip().splitlines()[-1]}")
            return bool(bug)  # the layout fails; the negative control counts as not caught
        verdict = ("NOT CAUGHT" if found.passed else "caught") if bug else ("pass" if found.passed else "FAIL")
        columns = (*(f"{value:.1e}" for value in found.deviation.values()), f"{time.perf_counter() - start:.0f} s")
        table.row(name, ranks, self.microbatches, *columns, " ".join([verdict, *found.remarks()]))
        gradients = gradient_deviations(found.reference, found.run)
        for g in gradients[: num_gradients if found.passed else max(1, num_gradients)]:
            print(f"    {g.name}: norm x {g.ratio:.6f}, cosine {g.cosine:.6f}, deviation {g.deviation:.1e}", flush=True)
        return found.passed


@dataclass(frozen=True)
class Comparison:
    """Results of a run and of its reference."""

    dtype: str
    """compute_dtype of the run."""
    deviation: dict[str, float]
    limits: dict[str, float]
    reference: Trained
    run: Trained

    @property
    def passed(self) -> bool:
        return within(self.deviation, self.limits) and self.run.routed_differently <= ROUTING_LIMITS[self.dtype]

    def remarks(self) -> list[str]:
        """Return what the table says behind the verdict."""
        remarks = []
        if self.limits != LIMITS[self.dtype]:
            remarks.append(f"(limits {' '.join(f'{limit:.1e}' for limit in self.limits.values())})")
        if self.run.num_decisions:
            remarks.append(f"({self.run.num_different} of {self.run.num_decisions} tokens routed differently)")
        return remarks


def control_row(runs: Runs, bug: Bug) -> Row | None:
    """Return the row of a negative control, or None if no run of the configuration can show the bug."""
    for text in bug.layouts if runs.with_transformers or not bug.needs_transformers else ():
        with suppress(ConfigError):
            row = Row.build(runs, Layout.parse(text), bug.microbatches)
            if bug.applies(row.config, resolve(row.config, num_ranks(row.config.parallel))):
                return row
    return None


def build_rows(
    runs: Runs, given: Sequence[str] | None, default: Sequence[str], factors: Sequence[int]
) -> tuple[list[Row], list[tuple[str, ConfigError]]]:
    """Return the row of each layout and number of microbatches, and the other layouts with the reason why they do not fit. given:
    layouts of the command line, or None for `default`. Raises ConfigError if a given layout does not fit, or if none fits."""
    rows, misfits = [], []
    for text, factor in itertools.product(given or default, factors):
        layout = Layout.parse(text)
        try:
            rows.append(Row.build(runs, layout, factor))
        except ConfigError as error:
            if given:
                raise ConfigError("", f"--layout {text!r}: {error}") from None
            misfits.append((text, error))
    if not rows:
        raise misfits[0][1]
    return rows, misfits
