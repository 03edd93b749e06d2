"""Learning-rate schedules, which are functions of the step and therefore have no state to save."""

import math

from trainer.base.config import LrScheduleConfig

# Name -> decay: its value is 1 at the peak and 0 at the minimum. It does not rise while progress rises from 0 to 1.
DECAYS = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "warmup_stable_decay": lambda progress: 1 - progress,
    "constant": lambda progress: 1,
}


def lr_factor(config: LrScheduleConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step, as a fraction of the peak.

    The learning rate rises linearly and reaches the peak at step `warmup_steps`. In step 1 it is above 0, so that this step is
    not wasted. After the peak it decays, and the last step has min_lr_ratio * peak. With the schedule "warmup_stable_decay", it
    stays at the peak and decays only during the last `decay_steps` steps. With "constant", it stays at the peak. With
    "range_test", it rises exponentially from min_lr_ratio * peak in the first step to the peak in the last one.

    Args:
        step: Number of the step, from 1.
        steps: Total number of steps in the run.
    """
    if config.name == "range_test":
        return config.min_lr_ratio ** (1 - (step - 1) / max(1, steps - 1))
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    start = config.warmup_steps
    if config.name == "warmup_stable_decay":
        start = max(start, steps - config.decay_steps)
    progress = min(1.0, max(0, step - start) / max(1, steps - start))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * DECAYS[config.name](progress)
