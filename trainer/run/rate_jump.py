"""The learning rate of a run that is extended after it has decayed."""

import tomli

from trainer.base.config import Config, LrScheduleConfig
from trainer.base.system.run_files import CONFIG_FILE
from trainer.checkpoint.resume import ResumePoint
from trainer.optim.lr_schedule import lr_factor

_JUMP = 1.5
"""Ratio of the learning rates of two steps above which a run says that the rate rises."""


def rate_jump(config: Config, point: ResumePoint) -> str:
    """Return a line about a learning rate that has decayed before the checkpoint and rises after it, because the run was
    extended, or ""."""
    try:
        saved = tomli.loads((point.path / CONFIG_FILE).read_text())
        schedule, steps, lr = (
            LrScheduleConfig(**saved["lr_schedule"]),
            saved["training"]["steps"],
            saved["optimizer"]["lr"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    step = point.state.step
    if config.training.epochs is not None or "range_test" in (schedule.name, config.lr_schedule.name):
        return ""
    decayed = lr_factor(schedule, step, steps)
    before = lr * decayed
    now = config.optimizer.lr * lr_factor(config.lr_schedule, step + 1, config.training.steps)
    if step < schedule.warmup_steps or decayed >= 1 or now < _JUMP * before:
        return ""
    line = f"the learning rate had decayed to {before:.2e} in step {step}, and rises to {now:.2e} in step {step + 1}"
    start = max(schedule.warmup_steps, steps - schedule.decay_steps)
    if schedule.name != "warmup_stable_decay" or not start:
        return f"{line}; a new run that begins with these weights (--from) and a lower optimizer.lr would have no such rise"
    return f"{line}; checkpoint.load_step = {start}, or an earlier checkpoint before the decay, would avoid it"
