"""Progress bars."""

from tqdm import tqdm

from trainer.system import logging


def progress(total: int | None, unit: str, desc: str) -> tqdm:
    """Return a progress bar, which is shown only on a terminal. total: number of units, or None if unknown."""
    return tqdm(total=total, unit=unit, unit_scale=True, desc=desc, disable=not logging.on_terminal(), leave=False)
