"""Parameter groups: the rule that updates each parameter, its learning rate and its weight decay."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from trainer.base.config import ConfigError, GroupOptions, OptimizerConfig
from trainer.base.config.patterns import matching
from trainer.base.system.spelling import counted
from trainer.optim.rules import RULES


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that are updated alike."""

    pattern: str
    """Pattern of [optimizer] groups that selects the parameters. "": none does."""
    rule: str
    """Key of RULES."""
    lr: float
    """Factor of the step's learning rate."""
    width: float = 1.0
    """Part of this factor that follows from the width of the model (Rule.width_powers)."""
    weight_decay: float
    names: tuple[str, ...]
    num_values: int
    """Number of values of all these parameters."""

    def __str__(self) -> str:
        width = f" (x {self.width:g} for the width)" if self.width != 1 else ""
        options = f"{self.rule}, lr x {self.lr:g}{width}, decay {self.weight_decay:g}"
        selected = f"{self.pattern}, " if self.pattern else ""
        size = f"{counted(len(self.names), 'parameter')}, {self.num_values:,} values"
        return f"{options}: {selected}{size}, such as {self.names[0]}"


def resolve_groups(
    config: OptimizerConfig,
    trained: Mapping[str, Tensor],
    biases: Collection[str] = (),
    matrices: Collection[str] = (),
    others: Mapping[str, str] = {},
    width_roles: Mapping[str, str] = {},
    width_ratio: float = 1.0,
) -> tuple[ParameterGroup, ...]:
    """Return the groups of the trained parameters: each parameter is in one, and none is empty.

    The first matching pattern of [optimizer] groups gives a parameter its options. Matrices that no pattern gives a decay have
    that of the setting; norms and biases have none. The rule of the setting updates the parameters that it may update, unless a
    pattern says otherwise; AdamW updates all others. Where a rate follows the width of the model, the decay does so inversely: a
    step's decay is the product of both.

    Args:
        config: Settings of the optimizer.
        trained: Trained parameters by name. They may be on the meta device.
        biases: Names of biases, which may be stacked.
        matrices: Names of the matrices that a rule for matrices may update.
        others: Name that a pattern may mean but that is not in `trained` -> what it is.
        width_roles: Name of each trained parameter -> its role (width_role in models/width.py). May be empty if width_ratio is 1.
        width_ratio: Width at which rates were tuned, divided by that of the model.

    Raises:
        ConfigError: Options have no effect, or a pattern selects no parameter.
    """
    chosen = {name: next((p for p in config.groups if fnmatchcase(name, p)), "") for name in trained}
    for pattern in config.groups:
        _require_effect(config, pattern, chosen, matrices, others)
    members: dict[tuple[str, str, float, float, float], list[str]] = {}
    for name, parameter in trained.items():
        given: GroupOptions = config.groups.get(chosen[name], {})
        is_matrix = parameter.dim() >= 2 and name not in biases
        decay = given.get("decay", config.weight_decay if is_matrix else 0.0)
        rule = given.get("optimizer", _default_rule(config, name, matrices))
        if RULES[rule].only_matrices and name not in matrices:
            message = f"optimizer = {rule}: {name} is no matrix of a linear module in the blocks, or of experts"
            raise ConfigError(f"optimizer.groups.{chosen[name]}", message)
        lr = given.get("lr", 1.0) * (config.muon_lr / config.lr if rule == "muon" and config.muon_lr else 1.0)
        width = width_ratio ** RULES[rule].width_powers(config).get(width_roles.get(name, ""), 0.0)
        key = chosen[name], rule, lr * width, width, decay / width
        if not (math.isfinite(lr * width) and math.isfinite(decay / width)):
            raise ConfigError("optimizer.lr", f"the rate or the weight decay of {name} would be infinite")
        members.setdefault(key, []).append(name)
    order = [*config.groups, ""]
    return tuple(
        ParameterGroup(
            pattern=pattern,
            rule=rule,
            lr=lr,
            width=width,
            weight_decay=decay,
            names=tuple(names),
            num_values=sum(trained[name].numel() for name in names),
        )
        for (pattern, rule, lr, width, decay), names in sorted(
            members.items(), key=lambda item: order.index(item[0][0])
        )
    )


def _default_rule(config: OptimizerConfig, name: str, matrices: Collection[str]) -> str:
    """Return the rule of a parameter for which no pattern names one. matrices: as in resolve_groups."""
    return "adamw" if RULES[config.name].only_matrices and name not in matrices else config.name


def _require_effect(
    config: OptimizerConfig,
    pattern: str,
    chosen: Mapping[str, str],
    matrices: Collection[str],
    others: Mapping[str, str],
) -> None:
    """Raise ConfigError if a pattern selects no parameter, or if its rule is that of its parameters anyway.

    Args:
        config: See resolve_groups.
        pattern: A pattern of [optimizer] groups.
        chosen: Name of each trained parameter -> the pattern that selects it.
        matrices: See resolve_groups.
        others: See resolve_groups.
    """
    key, selected = f"optimizer.groups.{pattern}", [name for name, own in chosen.items() if own == pattern]
    if selected:
        rule = config.groups[pattern].get("optimizer")
        if {_default_rule(config, name, matrices) for name in selected} == {rule}:
            raise ConfigError(key, f"optimizer = {rule} has no effect: it updates these parameters anyway")
        return
    if earlier := {first: name for name, first in chosen.items() if fnmatchcase(name, pattern)}:
        first, name = next(iter(earlier.items()))
        raise ConfigError(key, f"has no effect: earlier patterns select all of its parameters, such as {first} {name}")
    matching(key, (pattern,), chosen, "trained parameter", others)
