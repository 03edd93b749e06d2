"""Resolution of the optimizer's settings for a model: groups, width transfer, the bytes of the state."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from models.spec import Model, Structure, is_bias, styles_in_blocks
from models.width import width_role
from trainer.adapters.select import LORA_B, TrainedParameters, adaptable_weights, weight_of
from trainer.base.config import ConfigError, OptimizerConfig
from trainer.base.system.files import digest, short_digest
from trainer.optim import quantized_moments
from trainer.optim.parameter_groups import ParameterGroup, resolve_groups
from trainer.optim.rules import RULES
from trainer.parallel.tensor import shard_shape


@dataclass(frozen=True, kw_only=True)
class ResolvedOptimizer:
    """What follows from the optimizer's settings for a model."""

    groups: tuple[ParameterGroup, ...]
    """The parameter groups of the complete model."""
    width_ratio: float
    """Width at which rates were tuned, divided by that of the model."""
    state_bytes: float
    """Bytes of optimizer state and averaged weights per trained value: the mean of the complete model."""
    state_bytes_of: Callable[[str, Tensor], float]
    """Function (name of a parameter, itself or a shard of it) -> bytes of its state and its average."""
    fp32_moments: str
    """Part of the matrices to which 8-bit moments do not apply, and why. "": none."""
    fingerprint: Mapping[str, Any]
    """Part of the run's fingerprint: what decides which state a checkpoint contains, besides settings."""


def resolve_optimizer(
    config: OptimizerConfig, model: Model, trained: TrainedParameters, sizes: Any, name: str, tp: int
) -> ResolvedOptimizer:
    """Resolve the optimizer's settings.

    Args:
        config: The settings.
        model: The complete model, on the meta device.
        trained: Its trained parameters.
        sizes: Its dimensions.
        name: Of the model, for messages.
        tp: Degree of tensor parallelism.

    Raises:
        ConfigError: The model cannot be trained with these settings.
    """
    structure = model.structure()
    tensors = trained.tensors(model)
    num_trained = sum(p.numel() for p in tensors.values())
    biases = {n for n in trained.fully if is_bias(model, n)}
    matrices_in_blocks = _matrices_in_blocks(model, structure)
    width_ratio = _width_ratio(config, sizes, name)
    width_roles = {n: width_role(model, n) for n in tensors if width_ratio != 1}
    others = _untrained(model, trained)
    groups = resolve_groups(config, tensors, biases, matrices_in_blocks, others, width_roles, width_ratio)
    rules = {n: RULES[group.rule] for group in groups for n in group.names}
    average_bytes = 0 if config.ema_decay is None else 4

    def state_bytes_of(name: str, p: Tensor) -> float:
        return rules[name].state_bytes(p, name in biases, config) + average_bytes * p.numel()

    fp32_moments = ""
    if config.state_dtype == "8bit":
        matrices = {n: p for n, p in tensors.items() if p.dim() >= 2 and n not in biases}
        fp32_moments = _fp32_moments(matrices, num_trained, name)
        _require_complete_blocks(matrices, trained, styles_in_blocks(model, structure.blocks_path), tp)
    return ResolvedOptimizer(
        groups=groups,
        width_ratio=width_ratio,
        state_bytes=sum(state_bytes_of(n, p) for n, p in tensors.items()) / num_trained,
        state_bytes_of=state_bytes_of,
        fp32_moments=fp32_moments,
        fingerprint=_fingerprint(config, groups, matrices_in_blocks),
    )


def _require_complete_blocks(
    matrices: Mapping[str, Tensor], trained: TrainedParameters, styles: Mapping[str, str], tp: int
) -> None:
    """Raise ConfigError if tp splits blocks of 8-bit moments.

    Args:
        matrices: Trained matrices by name.
        trained: The trained parameters.
        styles: See styles_in_blocks.
        tp: Degree of tensor parallelism.
    """
    for name, matrix in matrices.items():
        weight = weight_of(name) if name in trained.shapes else name
        # The columns of an adapter's second matrix are its rank, which no style splits.
        style = "" if name.endswith(LORA_B) else styles.get(weight.removesuffix(".weight"), "")
        if quantized_moments.is_quantizable(matrix):
            quantized_moments.require_complete_blocks(name, shard_shape(matrix.shape[-2:], style, tp)[1])


def _fingerprint(
    config: OptimizerConfig, groups: Collection[ParameterGroup], matrices_in_blocks: Collection[str]
) -> dict[str, Any]:
    """Return what a checkpoint must agree with: state that it lacks cannot be continued."""
    fingerprint: dict[str, Any] = {}
    if config.ema_decay is not None:
        fingerprint["average of the weights, which a resumed run cannot begin ([optimizer] ema_decay)"] = True
    if RULES[config.name].only_matrices:
        given = [
            name for group in groups if group.rule == "adamw" for name in group.names if name in matrices_in_blocks
        ]
        key = "number of matrices that [optimizer] groups gives to adamw"
        names = short_digest(digest(" ".join(sorted(given)).encode()))
        fingerprint[key] = f"{len(given)}, such as {given[0]} ({names})" if given else "0"
    return fingerprint


def _width_ratio(config: OptimizerConfig, sizes: Any, name: str) -> float:
    """Return the width at which rates were tuned, divided by that of the model `name`. Raises ConfigError if it is too small."""
    if config.base_width is None:
        return 1.0
    least = -(-sizes.dim // sizes.n_heads)
    if config.base_width < least:
        message = f"must be at least {least}, the width of {name} with one head instead of {sizes.n_heads}"
        raise ConfigError("optimizer.base_width", f"{message}: heads keep their width")
    return config.base_width / sizes.dim


def _matrices_in_blocks(model: Model, structure: Structure) -> set[str]:
    """Return the names of the matrices by which the blocks multiply hidden states: a rule for matrices may update them."""
    return {name for name in adaptable_weights(model) if name.startswith(f"{structure.blocks_path}.")}


def _untrained(model: Model, trained: TrainedParameters) -> dict[str, str]:
    """Return name -> what it is, for each name of a parameter that a run does not update under this name."""
    names = {id(p): name for name, p in model.named_parameters()}
    untrained = {name: "is frozen" for name in names.values() if name not in trained.fully}
    every = model.named_parameters(remove_duplicate=False)
    return untrained | {name: f"is {names[id(p)]}" for name, p in every if names[id(p)] != name}


def _fp32_moments(matrices: Mapping[str, Tensor], num_trained: int, name: str) -> str:
    """Return a note if not all matrices have 8-bit moments.

    Args:
        matrices: Trained matrices by name, on the meta device.
        num_trained: Number of trained values.
        name: Of the model.

    Raises:
        ConfigError: No matrix can have 8-bit moments.
    """
    quantized = {n: p for n, p in matrices.items() if quantized_moments.is_quantizable(p)}
    if not quantized:
        message = (
            f"8bit needs matrices with row lengths divisible by {quantized_moments.BLOCK_SIZE}, but {name} has none"
        )
        raise ConfigError("optimizer.state_dtype", message)
    others = {n: p for n, p in matrices.items() if n not in quantized}
    return quantized_moments.note_of_fp32_moments(others, num_trained)
