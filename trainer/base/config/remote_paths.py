"""Settings that may be URLs of object stores: the path of a local copy replaces each of them when the configuration is loaded.
The URL stands in what is recorded and in messages (`with_urls`)."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from trainer.base.config.errors import ConfigError
from trainer.base.config.fields import Layer
from trainer.base.config.schema.data import split_dataset
from trainer.base.config.tokenizer_and_template import BESIDE_TOKENIZER
from trainer.base.system.files import describe
from trainer.base.system.object_store import is_url, url_error
from trainer.base.system.paths import path_error
from trainer.base.system.remote_files import local_copy
from trainer.base.system.remote_objects import has_pattern
from trainer.base.system.store_errors import StoreError

_DATASETS = ("data.datasets", "evaluation.datasets")
"""Tables of TYPE:PATH."""
_SECTION_OF_TASKS = "evaluation.tasks"
_BESIDE = {
    "model.huggingface": (),
    "checkpoint.init_from": (),
    "lora.init_from": (),
    "data.chat_template": (),
    "tokenizer.path": BESIDE_TOKENIZER,
    "data.path": ("*.idx",),
    **dict.fromkeys(_DATASETS, ("*.idx",)),
    _SECTION_OF_TASKS: ("config.json",),
}
"""Setting or table that may be a URL, beside model.pretrained -> files that are read beside a file that it names."""
_WITH_WEIGHTS = ("checkpoint.init_from", "lora.init_from", "data.path", *_DATASETS)


def is_remote(path: str) -> bool:
    """Return whether a path names an object store. A folder has no need of a copy."""
    return is_url(path) and not path.startswith("file://")


def readable_error(path: str, allows_pattern: bool = False) -> str:
    """Return the reason why a text can be meant neither as a local path nor as the URL of an object store, or "". allows_pattern:
    whether a pattern may be meant."""
    if not is_remote(path):
        return path_error(path)
    if has_pattern(path):
        return "" if allows_pattern else "is a pattern, but one file or folder is read"
    return url_error(path)


def local_path_of(path: str, setting: str = "", with_weights: bool = True, beside: Sequence[str] = ()) -> str:
    """Return a path, or that of the local copy if it is a URL.

    Args:
        path: A path or a URL.
        setting: The setting that errors are about.
        with_weights: See `local_copy`.
        beside: See `local_copy`.

    Raises:
        ConfigError: The URL cannot be read.
    """
    if not is_remote(path):
        return path
    try:
        return local_copy(path, beside=beside, with_weights=with_weights)
    except StoreError as error:
        message = str(error).removeprefix(f"{path}: ") if setting else str(error)
        raise ConfigError(setting, message) from None
    except OSError as error:
        raise ConfigError(setting, describe(error)) from None


def with_local_copies(layers: Sequence[Layer], sections: Collection[str], with_weights: bool) -> list[Layer]:
    """Return the layers with paths of local copies for URLs. See `load_config` for the other arguments. Raises ConfigError."""
    last = {key: i for i, layer in enumerate(layers) for key in layer}  # the layer that gives the value
    changed = [dict(layer) for layer in layers]
    for key, i in last.items():
        table, value = ".".join(key.split(".")[:2]), layers[i][key].value
        is_read = table in _BESIDE and (table == "model.huggingface" or table.partition(".")[0] in sections)
        if not is_read or not isinstance(value, str) or (table == _SECTION_OF_TASKS and not key.endswith(".path")):
            continue
        type_, path = split_dataset(value) if table in _DATASETS else ("", value)
        if readable_error(path, allows_pattern=table in ("data.path", *_DATASETS)):
            continue  # `check_values` says so
        local = local_path_of(path, key, with_weights and table in _WITH_WEIGHTS, _BESIDE[table])
        changed[i][key] = replace(layers[i][key], value=f"{type_}:{local}" if table in _DATASETS else local)
    return changed
