"""The context window of a run's model: the longest sequence for which it is trained, as exports state it."""

import dataclasses
from typing import Any

from models.sizes import ROPES
from trainer.base.config import Config
from trainer.checkpoint.formats.weights import Weights


def extension_of_window(config: Config) -> list[str]:
    """Return the names of the sizes by which a run may extend the context window of its initial weights. An adapter cannot: it is
    merged with the sizes of its base model."""
    extending = {"rope_type", *(f"rope_{field.name}" for rope in ROPES.values() for field in dataclasses.fields(rope))}
    return [name for name in config.model.overrides if name in extending and config.lora.rank is None]


def window_of_new_run(config: Config, sizes: Any, weights: Weights | None) -> int:
    """Return the context window of a run that begins with these weights. sizes: of its model."""
    seq_len = config.training.seq_len
    if config.model.context_window or weights is None:
        return config.model.context_window or seq_len
    own = weights.model.context_window
    is_extended = any(getattr(weights.sizes, name) != getattr(sizes, name) for name in extension_of_window(config))
    return max(own, seq_len) if is_extended else own


def window_warning(config: Config, sizes: Any, weights: Weights | None) -> str:
    """Return a line about samples that are longer than the context window of a run that begins with these weights, or ""."""
    seq_len, window = config.training.seq_len, window_of_new_run(config, sizes, weights)
    if seq_len <= window or config.model.context_window:
        return ""
    return (
        f"training.seq_len = {seq_len} exceeds the {window} tokens for which {weights.folder} was trained, and its RoPE is not "
        f"extended (model.overrides, such as rope_theta or rope_type); exports state {window}, or what model.context_window says"
    )
