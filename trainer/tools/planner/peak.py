"""The peak of memory in words: where in the step it is, what takes the memory, and which settings reduce it."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from trainer.base.config import ConfigError
from trainer.base.system.units import GIB
from trainer.run.resolve import resolve
from trainer.tools.planner.estimate import RunEstimate
from trainer.tools.planner.recorded import ExecutionPoint
from trainer.tools.planner.simulate import Simulation, without_compiler

_NAMED_FRACTION = 0.15
"""Fraction of the peak from which a category is named as a reason."""

_MODULES = {"output": "the output with its loss", "tok_embeddings": "the embedding", "norm": "the last norm"}
"""Module of the model -> its description. All other modules are blocks."""


def place(point: ExecutionPoint) -> str:
    """Return the description of an execution point: "backward of block 3", "the update"."""
    if not point.module:
        return str(point)
    first, _, rest = point.module.partition(".")
    module = f"block {rest.partition('.')[0]}" if first == "layers" else _MODULES.get(first, point.module)
    return f"{'backward' if point.in_backward else 'forward'} of {module}"


def explain(estimate: RunEstimate) -> str:
    """Return where the rank with the largest peak has it, and what takes the memory there."""
    simulation = estimate.largest
    sizes = dict(simulation.by_category)
    sizes["state"] = sizes.pop("parameters") + sizes.pop("optimizer")
    by_size = sorted(sizes, key=lambda category: -sizes[category])
    named = [c for c in by_size if sizes[c] >= _NAMED_FRACTION * simulation.peak]
    reasons = [f"{_describe(c, estimate, simulation)} ({sizes[c] / GIB:,.2f} GiB)" for c in named]
    listed = " and ".join(filter(None, (", ".join(reasons[:-1]), reasons[-1])))
    return f"rank {simulation.rank} has its peak in {place(simulation.peak_at)}, because of {listed}"


def _describe(category: str, estimate: RunEstimate, simulation: Simulation) -> str:
    config, point, dims = estimate.config, simulation.peak_at, estimate.resolved.dims
    recomputes = config.activation_checkpoint.mode in ("selective", "full")
    in_block = point.module.startswith("layers.")
    if category == "state":
        return "parameters and optimizer state"
    if category == "activations":
        saved = "saved inputs of blocks" if config.activation_checkpoint.mode == "full" else "saved activations"
        return f"{saved} of several microbatches" if dims.pp > 1 else saved
    if category == "gradients":
        microbatches = f"the unsharded sum of gradients over {estimate.resolved.grad_accum} microbatches"
        return microbatches if _accumulates_unsharded(estimate) else "gradients"
    if category == "unsharded parameters":
        return "parameters gathered for use"
    if category == "communication":
        return "receive buffers of the pipeline" if dims.pp > 1 else "buffers of collectives"
    if in_block and point.in_backward and recomputes:
        return "recomputed activations of the block"
    return "logits and other temporary tensors" if point.module.startswith("output") else "temporary tensors"


def _accumulates_unsharded(estimate: RunEstimate) -> bool:
    """Return whether FSDP sums gradients over microbatches before it reduces and shards them."""
    resolved, training = estimate.resolved, estimate.config.training
    return resolved.grad_accum > 1 and resolved.dims.fsdp > 1 and not training.reduce_every_microbatch


def remedies(estimate: RunEstimate) -> list[str]:
    """Return flags that reduce the largest categories at the peak, the most effective first. The run can start with each."""
    sizes = estimate.largest.by_category
    found = []
    for category in sorted(sizes, key=lambda name: -sizes[name]):
        if sizes[category] >= _NAMED_FRACTION * estimate.largest.peak:
            found += [flag for flag in _remedies_of(category, estimate) if _can_run(estimate, *flag)]
    return [f"--{setting} {str(value).lower()}" for setting, value in dict(found).items()]


def _remedies_of(category: str, estimate: RunEstimate) -> Iterator[tuple[str, bool | int | str]]:
    """Yield (setting, value)."""
    config = estimate.config
    mode, optimizer = config.activation_checkpoint.mode, config.optimizer
    if category == "gradients" and _accumulates_unsharded(estimate):
        yield "training.reduce_every_microbatch", True
    if category == "activations":
        if mode in ("none", "selective"):
            yield "activation_checkpoint.mode", "selective" if mode == "none" else "full"
        elif not config.activation_checkpoint.offload_inputs:
            yield "activation_checkpoint.offload_inputs", True
    if category in ("activations", "temporaries") and config.training.local_batch_size > 1:
        yield "training.local_batch_size", config.training.local_batch_size // 2
    if category == "optimizer" and optimizer.offload == "none" and optimizer.state_dtype != "8bit":
        yield "optimizer.state_dtype", "8bit"


def _can_run(estimate: RunEstimate, key: str, value: bool | int | str) -> bool:
    section, name = key.split(".")
    config = without_compiler(estimate.config)
    changed = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    with suppress(ConfigError):
        resolve(changed, estimate.hardware.world_size)
        return True
    return False
