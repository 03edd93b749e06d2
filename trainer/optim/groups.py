"""Parameter groups: the rule that updates each parameter, its learning rate and its weight decay."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from trainer.base.config import ConfigError, OptimizerConfig
from trainer.base.config.fields import matching
from trainer.base.system.spelling import counted, did_you_mean
from trainer.optim.rules import RULES

_EXPECTED = "expected lr=FACTOR, decay=NUMBER or optimizer=NAME, separated by spaces"
_OTHER_NAMES = {"weight_decay": "decay", "wd": "decay", "learning_rate": "lr", "rule": "optimizer"}
_LIMITS = {"lr": (1e-6, 1e6), "decay": (0.0, 1e3)}
"""Option with a number -> its smallest and its largest value."""


@dataclass(frozen=True, kw_only=True)
class Group:
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
    kinds: Mapping[str, str] = {},
    width_ratio: float = 1.0,
) -> tuple[Group, ...]:
    """Return the groups of the trained parameters: each parameter is in one, and none is empty.

    The first matching pattern of [optimizer] groups gives a parameter its options. Matrices that no pattern gives a decay have
    that of the setting; norms and biases have none. Muon updates the matrices that it may update, unless a pattern says
    otherwise; AdamW updates all other parameters. Where a rate follows the width of the model, the decay does so inversely: a
    step's decay is the product of both.

    Args:
        config: Settings of the optimizer.
        trained: Trained parameters by name. They may be on the meta device.
        biases: Names of biases, which may be stacked.
        matrices: Names of the parameters that Muon may update.
        others: Name that a pattern may mean but that is not in `trained` -> what it is.
        kinds: Name of each trained parameter -> its kind, see width_kind in models/width.py. It may be empty if width_ratio is 1.
        width_ratio: Width at which rates were tuned, divided by that of the model.

    Raises:
        ConfigError: Options are wrong or have no effect, or a pattern selects no parameter.
    """
    options = {pattern: _options(config, pattern, text) for pattern, text in config.groups.items()}
    chosen = {name: next((p for p in options if fnmatchcase(name, p)), "") for name in trained}
    for pattern in options:
        _require_effect(pattern, chosen, others)
    members: dict[tuple[str, str, float, float, float], list[str]] = {}
    for name, parameter in trained.items():
        given = options.get(chosen[name], {})
        is_matrix = parameter.dim() >= 2 and name not in biases
        decay = given.get("decay", config.weight_decay if is_matrix else 0.0)
        rule = given.get("optimizer", config.name if name in matrices else "adamw")
        if rule == "muon" and name not in matrices:
            message = f"optimizer=muon: {name} is no matrix of a linear module in the blocks, or of experts"
            raise ConfigError(f"optimizer.groups.{chosen[name]}", message)
        lr = given.get("lr", 1.0) * (config.muon_lr / config.lr if rule == "muon" and config.muon_lr else 1.0)
        width = width_ratio ** RULES[rule].width_powers(config).get(kinds.get(name, ""), 0.0)
        key = chosen[name], rule, lr * width, width, decay / width
        if not (math.isfinite(lr * width) and math.isfinite(decay / width)):
            raise ConfigError("optimizer.lr", f"the rate or the weight decay of {name} would be infinite")
        members.setdefault(key, []).append(name)
    _require_effects(config, options, chosen, matrices, members)
    order = [*options, ""]
    return tuple(
        Group(
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


def _require_effects(
    config: OptimizerConfig,
    options: Mapping[str, Mapping],
    chosen: Mapping[str, str],
    matrices: Collection[str],
    members: Iterable[tuple[str, str, float, float, float]],
) -> None:
    """Raise ConfigError if a setting or an option has no effect.

    Args:
        config: See resolve_groups.
        options: Pattern -> its options.
        chosen: Name of each trained parameter -> the pattern that selects it.
        matrices: See resolve_groups.
        members: Pattern, rule, rate, factor of the width and decay of each group.
    """
    for pattern, given in options.items():
        defaults = {config.name if name in matrices else "adamw" for name, own in chosen.items() if own == pattern}
        if given.get("optimizer") is not None and defaults == {given["optimizer"]}:
            message = f"optimizer={given['optimizer']} has no effect: it updates these parameters anyway"
            raise ConfigError(f"optimizer.groups.{pattern}", message)


def _require_effect(pattern: str, chosen: Mapping[str, str], others: Mapping[str, str]) -> None:
    """Raise ConfigError if a pattern selects no parameter.

    Args:
        pattern: A pattern of [optimizer] groups.
        chosen: Name of each trained parameter -> the pattern that selects it.
        others: See resolve_groups.
    """
    if pattern in chosen.values():
        return
    key = f"optimizer.groups.{pattern}"
    if earlier := {first: name for name, first in chosen.items() if fnmatchcase(name, pattern)}:
        first, name = next(iter(earlier.items()))
        raise ConfigError(key, f"has no effect: earlier patterns select all of its parameters, such as {first} {name}")
    if name := next((name for name in others if fnmatchcase(name, pattern)), ""):
        raise ConfigError(key, f"matches no trained parameter: {name} {others[name]}")
    matching(key, (pattern,), chosen, "trained parameter")


def _options(config: OptimizerConfig, pattern: str, text: str) -> dict:
    """Parse the options of a pattern: option -> value. Raises ConfigError."""
    key = f"optimizer.groups.{pattern}"
    words = text.split()
    if not words:
        raise ConfigError(key, _EXPECTED)
    options: dict[str, float | str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in (*_LIMITS, "optimizer"):
            hint = (
                ""
                if name in (*_LIMITS, "optimizer")
                else did_you_mean(_OTHER_NAMES.get(name, name), [*_LIMITS, "optimizer"])
            )
            raise ConfigError(key, f"{word}: {_EXPECTED}{hint}")
        if name in options:
            raise ConfigError(key, f"{name} is given twice")
        options[name] = _rule(key, value) if name == "optimizer" else _number(key, name, value)
    return options


def _rule(key: str, value: str) -> str:
    if value not in RULES:
        raise ConfigError(key, f"optimizer={value}: expected one of {', '.join(RULES)}{did_you_mean(value, RULES)}")
    return value


def _number(key: str, name: str, value: str) -> float:
    low, high = _LIMITS[name]
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not low <= number <= high:
        raise ConfigError(key, f"{name}={value}: expected a number from {low:g} to {high:g}")
    return number
