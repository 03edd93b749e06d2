"""How far the work on data has come."""

from tqdm import tqdm

from trainer.system import logging


def progress(total: int | None, unit: str, what: str) -> tqdm:
    """A bar for people at a terminal. total: None where it is not known."""
    return tqdm(total=total, unit=unit, unit_scale=True, desc=what, disable=not logging.on_terminal(), leave=False)
