"""Files of datasets that Hugging Face's package `datasets` has written to a folder, or loads by name."""

import os
from typing import Any

from trainer.base.config import ConfigError, DataConfig
from trainer.base.config.packages import require_package
from trainer.base.system.files import read_json_object
from trainer.base.system.spelling import did_you_mean, first_line, similar_path
from trainer.data.sources.files import describe_folder


def is_saved(path: str) -> bool:
    """Return whether a path is a folder that was written by save_to_disk."""
    names = set(os.listdir(path)) if os.path.isdir(path) else set()
    return "dataset_dict.json" in names or {"state.json", "dataset_info.json"} <= names


def saved_files(config: DataConfig) -> list[str]:
    """Return the paths of the Arrow files in a folder that was written by save_to_disk."""
    folder = config.path
    if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        splits = _json(os.path.join(folder, "dataset_dict.json")).get("splits", [])
        if config.split not in splits:
            names = list(map(str, splits))
            hint = did_you_mean(config.split, names)
            raise ConfigError("data.split", f"{folder} has no such split; available: {', '.join(names)}{hint}")
        folder = os.path.join(folder, config.split)
    state = os.path.join(folder, "state.json")
    if not os.path.isfile(state):
        held = describe_folder(folder, config.dataset)
        raise ConfigError("data.path", f"{folder} has no state.json, so it was not written by save_to_disk{held}")
    try:
        content = _json(state)
        names = [entry["filename"] for entry in content["_data_files"]]
        if not names or any(os.path.basename(name) != name for name in names):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ConfigError("data.path", f"{state} does not list the dataset's files") from None
    if content.get("_indices_data_files"):
        message = f"{folder} holds a selection of rows; write it again after flatten_indices() of the package datasets"
        raise ConfigError("data.path", message)
    files = [os.path.join(folder, name) for name in names]
    missing = next((file for file in files if not os.path.isfile(file)), None)
    if missing is not None:
        raise ConfigError("data.path", f"{missing} is missing")
    return files


def _json(path: str) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except ValueError:
        raise ConfigError("data.path", f"{path} is not a JSON object") from None


def cached_files(config: DataConfig) -> list[str]:
    """Load a dataset by name with the package `datasets`, and return the paths of its cached Arrow files."""
    datasets = require_package("datasets", "data.dataset")
    try:
        dataset = datasets.load_dataset(config.path, config.subset or None, split=config.split)
        files = [entry["filename"] for entry in dataset.cache_files]
        has_row_selection = getattr(dataset, "_indices", None) is not None
    except Exception as error:  # the package raises exceptions of many types
        message = (
            f"this path is not a folder, and the package datasets cannot load it: {first_line(error)[:200].rstrip('.')}"
        )
        raise ConfigError("data.path", message + similar_path(config.path)) from None
    if has_row_selection or any(character in config.split for character in "[]+"):
        message = 'slices such as "train[:10%]" and combined splits are not supported: name one full split'
        raise ConfigError("data.split", message)
    if not files:
        message = "this dataset is only in memory; write it with save_to_disk and name that folder"
        raise ConfigError("data.path", message)
    return files
