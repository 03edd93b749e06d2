"""Learning-rate schedules. They are functions of the step, so there is no state to save."""

import math

from trainer.config import LrScheduleConfig


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def _linear(progress: float) -> float:
    return 1 - progress


# Name -> position between the minimum (0) and the peak (1), which falls from 1 to 0 while progress rises from 0 to 1.
DECAYS = {"cosine": _cosine, "linear": _linear, "warmup_stable_decay": _linear}


def learning_rate(config: LrScheduleConfig, peak: float, step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 1, in a run of `steps`.

    It rises linearly to the peak at step warmup_steps, so the first step is not wasted at 0. Then it decays to
    min_lr_ratio * peak in the last step. warmup_stable_decay stays at the peak until the last decay_steps.
    """
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    start = config.warmup_steps
    if config.name == "warmup_stable_decay":
        start = max(start, steps - config.decay_steps)
    progress = min(1.0, max(0, step - start) / max(1, steps - start))
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * DECAYS[config.name](progress))
