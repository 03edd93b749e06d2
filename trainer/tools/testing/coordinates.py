"""Sizes of activations over the width of a model. Those that grow show that rates tuned on a narrow model are too high for a wide
one (the coordinate check of Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466, appendix D.1).

scripts/coordinate_check.py prints them as a table.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.spec import SizeError
from trainer.base.config import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    CompileConfig,
    Config,
    ConfigError,
    EvaluationConfig,
    LrScheduleConfig,
    MetricsConfig,
    ParallelConfig,
    ProfilingConfig,
    SamplesConfig,
)
from trainer.batch import Batch
from trainer.build import build_trainer
from trainer.engine import Engine
from trainer.parallel.step import context_of
from trainer.run.resolve import ResolvedRun, resolve, resolve_model
from trainer.tools.testing.ranks import LocalRanks

ACTIVATIONS = ("embedding", "mixer", "feed-forward", "last norm", "logits")
"""Results of the embedding, of the layers of all blocks, of the last norm and of the output."""
BEFORE, AFTER, CHANGE = "before", "after", "change"
"""Sizes of an activation before the first step and after the last one, and of the difference."""
NUM_BLOCKS = 2
"""Number of blocks of the models, unless the user sets one."""


def measure(config: Config) -> dict[tuple[str, str], float]:
    """Train on this rank, the only one. Return (activation, BEFORE, AFTER or CHANGE) -> root mean square of its values in the
    first batch."""
    os.environ["LOG_RANK"] = ""  # the caller prints a table
    resolved = resolve(config, 1)
    trainer = build_trainer(config, resolved, torch.device("cpu"), None)
    batch = next(iter(trainer.data.batches(trainer.state)))
    before = _activations(trainer.engine, resolved, batch)
    trainer.train()
    after = _activations(trainer.engine, resolved, batch)
    measured = {}
    for name in ACTIVATIONS:
        values = {BEFORE: before[name], AFTER: after[name], CHANGE: after[name] - before[name]}
        measured |= {(name, when): x.square().mean().sqrt().item() for when, x in values.items()}
    return measured


@torch.no_grad()
def _activations(engine: Engine, resolved: ResolvedRun, batch: Batch) -> dict[str, Tensor]:
    """Return the activations of a batch by name. Those of several blocks are stacked."""
    (model,), structure = engine.model_parts.values(), resolved.structure
    modules = {
        "embedding": [model.get_submodule(structure.pre_blocks[0])],
        "last norm": [model.get_submodule(structure.post_blocks[0])],
    }
    blocks = list(model.get_submodule(structure.blocks_path).children())
    modules |= {"mixer": [b.mixer for b in blocks], "feed-forward": [b.feed_forward for b in blocks]}
    found: dict[str, list[Tensor]] = {name: [] for name in modules}
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, result, name=name: found[name].append(result.float()))
        for name, members in modules.items()
        for module in members
    ]
    logits = model(batch.tokens, context_of(batch))
    for hook in hooks:
        hook.remove()
    return {name: torch.stack(results) for name, results in found.items()} | {"logits": logits.float()}


def settings_of_runs(config: Config, widths: Sequence[int], steps: int, folder: Path) -> dict[int, Config]:
    """Return the settings of a short run of each width, in which what does not change the activations is switched off.

    Args:
        config: Settings of a run.
        widths: Of the models.
        steps: Number of steps.
        folder: Output folder.

    Raises:
        ConfigError: A width does not fit the model, or its run is impossible.
    """
    training = replace(
        config.training,
        steps=steps,
        epochs=None,
        global_batch_size=config.training.local_batch_size,
        batch_schedule={},
        compute_dtype="fp32",
        parameter_dtype="fp32",
    )
    common = replace(
        config,
        run=replace(config.run, output_folder=str(folder), name="run", device="cpu"),
        training=training,
        optimizer=replace(config.optimizer, state_dtype="fp32"),
        lr_schedule=LrScheduleConfig(name="constant"),
        parallel=ParallelConfig(),
        activation_checkpoint=ActivationCheckpointConfig(),
        compile=CompileConfig(),
        checkpoint=CheckpointConfig(enabled=False),
        evaluation=EvaluationConfig(),
        samples=SamplesConfig(),
        metrics=MetricsConfig(sinks=("console",)),
        profiling=ProfilingConfig(),
        resilience=replace(config.resilience, on_loss_spike="off", on_max_skips="stop"),
    )
    _, sizes = resolve_model(config.model)
    layers = sizes.n_layers if "n_layers" in config.model.overrides else min(sizes.n_layers, NUM_BLOCKS)
    runs = {}
    for width in widths:
        try:
            overrides = {**config.model.overrides, **sizes.of_width(width), "n_layers": layers}
            runs[width] = replace(common, model=replace(config.model, overrides=overrides))
            resolve(runs[width], 1)
        except (SizeError, ConfigError) as error:
            raise ConfigError("", f"width {width}: {error}") from None
    return runs


@dataclass(frozen=True)
class Curves:
    """Sizes of activations over the width."""

    widths: Sequence[int]
    sizes: Mapping[tuple[str, str], Sequence[float]]
    """(Activation, BEFORE, AFTER or CHANGE) -> size at each width."""

    @classmethod
    def measure(cls, configs: Mapping[int, Config]) -> "Curves":
        """Train one model after the other. configs: width -> settings of the run. Raises RankError."""
        measured = [LocalRanks(1).run(measure, config)[0] for config in configs.values()]
        return cls(list(configs), {key: [sizes[key] for sizes in measured] for key in measured[0]})

    def slope(self, key: tuple[str, str]) -> float:
        """Return the power of the width with which a size grows: the slope of a straight line through the logarithms."""
        x, y = np.log(self.widths), np.log(self.sizes[key])
        return (np.cov(x, y)[0, 1] / np.var(x, ddof=1)).item()

    def steepest(self) -> tuple[str, float]:
        """Return what grows most, and the power of the width with which it grows. NaN counts as the largest power."""
        slopes = {", ".join(key): self.slope(key) for key in self.sizes}
        return max(slopes.items(), key=lambda item: np.inf if np.isnan(item[1]) else item[1])
