"""The health of a run: whether its loss falls, and whether there are gradients."""

import math
import statistics
import sys
from dataclasses import dataclass

from trainer.base.system import console
from trainer.state import TrainState

MANY_STEPS = 100
"""Number of steps in a row with a loss far above the start, after which a run is said to diverge."""
_FIRST_STEPS = 10
"""Number of first steps, whose median loss is the start, unless the loss has risen during them."""
_NOISE = 0.05
"""Share of the first loss by which others differ without having risen."""
_FAR_ABOVE = 0.5
"""A loss is far above the start if it is more than 0.5 above it, and more than 50 % of it."""
_SHARE, _FEWEST_STEPS = 0.25, 10
"""Share of the steps of a run, and the smallest number of them, that a fault must last up to the end."""
_NO_GRADIENT = 1e-10
"""Gradient norm up to which there is no gradient."""


@dataclass
class Health:
    """What `TrainState.health` counts, so that a resume or a rollback restores it."""

    first: list[float]
    """Losses of the first steps."""
    far_above: int = 0
    """Number of steps in a row, up to the latest, whose loss is far above the start."""
    not_below: int = 0
    """Number of steps in a row, up to the latest, whose loss is at or above the start."""
    no_gradient: int = 0
    """Number of steps in a row, up to the latest, without a gradient."""

    @classmethod
    def of(cls, state: TrainState) -> "Health":
        """Return what a state has counted. Where the losses of the first steps are unknown, none counts as above them."""
        match state.health:
            case ["unknown"]:
                return cls([sys.float_info.max] * _FIRST_STEPS)
            case [list() as first, int() as far_above, int() as not_below, int() as no_gradient]:
                return cls(first, far_above, not_below, no_gradient)
        return cls([])

    @property
    def start(self) -> float:
        return min(statistics.median(self.first), self.first[0] + _NOISE * abs(self.first[0]))

    @property
    def limit(self) -> float:
        """Loss above which a loss is far above the start."""
        return self.start + max(_FAR_ABOVE * abs(self.start), _FAR_ABOVE)

    def observe(self, loss: float, grad_norm: float) -> None:
        """Count a step."""
        self.no_gradient = self.no_gradient + 1 if grad_norm <= _NO_GRADIENT else 0
        if len(self.first) < _FIRST_STEPS:
            self.first.append(loss)
            return
        self.far_above = self.far_above + 1 if loss > self.limit else 0
        self.not_below = self.not_below + 1 if loss >= self.start else 0


def observe(state: TrainState, step: int, loss: float, grad_norm: float) -> None:
    """Count a step in the state of a run, and warn if the run diverges. A step that was skipped, because a value is not finite,
    does not count."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return
    health = Health.of(state)
    health.observe(loss, grad_norm)
    state.health = [health.first, health.far_above, health.not_below, health.no_gradient]
    if health.far_above == MANY_STEPS:
        console.warning(
            f"step {step}: the loss was {health.start:.4g} at the start and has been above {health.limit:.4g} for {MANY_STEPS} "
            "steps: the run diverges; a lower learning rate or a longer warm-up may prevent it"
        )


def problem_at_end(state: TrainState) -> str:
    """Return why the model of a run that ends has probably not learned, or ""."""
    health, enough = Health.of(state), max(_FEWEST_STEPS, math.ceil(_SHARE * state.step))
    advice = "; a lower learning rate or a longer warm-up may help"
    if health.no_gradient >= enough:
        return f"the gradient was 0 in the last {health.no_gradient} steps, so that the model no longer learns{advice}"
    if health.not_below >= enough:
        return f"the loss was {health.start:.4g} at the start, and not below it in the last {health.not_below} steps{advice}"
    return ""
