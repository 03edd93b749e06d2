"""Hints about settings that do not exist, beside those about other trainers' (foreign.py)."""

from trainer.base.config.fields import settings

REMOVED = {
    "data.num_workers": "[data] prefetch replaces it, the number of microbatches that a thread loads ahead",
    "metrics.tensorboard": '[metrics] sinks replaces it, a list with or without "tensorboard"',
}
"""Settings of earlier versions, and what replaces them."""
WITHOUT_EFFECT = {"data.num_workers"}
"""Removed settings that a file may still contain, because earlier versions wrote them to the config.toml of every run."""

IN_FILE, AS_FLAG = "[{}] {}", "'--{}.{}'"
"""Formats of a setting in the messages about a file and about the command line."""


def elsewhere(name: str, show: str = IN_FILE) -> str:
    """Return a hint that suggests the settings with exactly this name, or "" if there is none."""
    same = [show.format(setting.section, setting.name) for setting in settings().values() if setting.name == name]
    return f"; did you mean {' or '.join(same)}?" if same else ""
