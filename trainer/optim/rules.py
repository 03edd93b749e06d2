"""The rules that update parameters. A new one is one entry of RULES."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trainer.base.config import OptimizerConfig
from trainer.optim.adamw import adamw, adamw_bytes, adamw_width_powers
from trainer.optim.exchange import Sharding
from trainer.optim.muon import Muon, muon_bytes, muon_width_powers


class Updater(Protocol):
    """torch's optimizer of some parameters, with a step that may be skipped on the device."""

    param_groups: Sequence[dict]
    state: Mapping[Tensor, dict[str, Tensor]]
    """Parameter -> name -> state, which is allocated from the start. Each dim of a state equals that of the parameter, or is
    smaller by an integer factor; or the state is a scalar."""

    def update(self, skip: Tensor, grad_scale: Tensor | None = None) -> None:
        """Update all parameters that have a gradient, and free their gradients. The host does not wait.

        Args:
            skip: fp32 scalar on the parameters' device. Parameters and state do not change if it is 1.
            grad_scale: fp32 scalar by which the gradients are divided, or None.
        """


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule that updates parameters."""

    only_matrices: bool
    """Whether it updates only matrices of linear modules in the blocks and of experts, each of which one rank gets as a whole.
    AdamW updates the other parameters. Otherwise the rule updates every parameter, each rank its own shard."""
    build: Callable[[Sequence[dict], OptimizerConfig, Collection[Tensor], Sharding], Updater]
    """Function (torch's parameter groups of local tensors, settings, the biases among them, who holds them) -> Updater."""
    state_bytes: Callable[[Tensor, bool, OptimizerConfig], float]
    """Function (parameter, which may be on the meta device; whether it is a bias; settings) -> bytes of its state."""
    width_powers: Callable[[OptimizerConfig], Mapping[str, float]]
    """Function (settings) -> role of a parameter (models/width.py) -> power of base width / dim that multiplies its rate. Without
    a power, the rate is that of the base width."""


RULES = {
    "adamw": Rule(
        only_matrices=False,
        build=lambda groups, config, biases, sharding: adamw(groups, config, biases),
        state_bytes=adamw_bytes,
        width_powers=adamw_width_powers,
    ),
    "muon": Rule(
        only_matrices=True,
        build=lambda groups, config, biases, sharding: Muon(groups, config, sharding),
        state_bytes=muon_bytes,
        width_powers=muon_width_powers,
    ),
}
"""Value of [optimizer] name, and of the option `optimizer` of a group -> rule. A rank updates parameters in this order."""
