"""Hints about settings that do not exist."""

from trainer.base.config.fields import settings
from trainer.base.config.foreign import normalized, replacement

REMOVED = {
    "data.num_workers": "[data] prefetch replaces it, the number of microbatches that a thread loads ahead",
    "metrics.tensorboard": '[metrics] sinks replaces it, a list with or without "tensorboard"',
}
"""Settings of earlier versions, and what replaces them."""
WITHOUT_EFFECT = {"data.num_workers"}
"""Removed settings that a file may still contain, because earlier versions wrote them to the config.toml of every run."""

IN_FILE, AS_FLAG = "[{}] {}", "'--{}.{}'"
"""Formats of a setting in the messages about a file and about the command line."""


def hint(name: str, show: str) -> str:
    """Return a hint with what replaces a setting of an earlier version or of another trainer, or with the settings of the same
    name in other sections, or "" if there is none.

    Args:
        name: With or without a section, in the spelling of a file or a flag.
        show: IN_FILE or AS_FLAG.
    """
    key = normalized(name)
    if removed := REMOVED.get(key):
        return f"; {removed}"
    last = key.rpartition(".")[2]
    same = [show.format(setting.section, setting.name) for setting in settings().values() if setting.name == last]
    return replacement(name, show) or (f"; did you mean {' or '.join(same)}?" if same else "")
