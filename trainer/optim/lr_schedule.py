"""Learning rates as functions of the step: there is no state to save."""

import math

from trainer.config import LrScheduleConfig


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def _linear(progress: float) -> float:
    return 1 - progress


# name -> share of the way from the lowest to the peak rate, falling from 1 to 0 while progress rises from 0 to 1
DECAYS = {"cosine": _cosine, "linear": _linear, "warmup_stable_decay": _linear}


def learning_rate(config: LrScheduleConfig, peak: float, step: int, steps: int) -> float:
    """Rate of the optimizer step number `step` (counted from 1) of a run of `steps`.

    Rises linearly to the peak at step warmup_steps (so the first step is not lost at rate 0), then decays so that the
    last step has min_lr_ratio * peak; warmup_stable_decay holds the peak until decay_steps are left.
    """
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    start = config.warmup_steps
    if config.name == "warmup_stable_decay":
        start = max(start, steps - config.decay_steps)
    progress = min(1.0, max(0, step - start) / max(1, steps - start))
    share = DECAYS[config.name](progress)
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)
