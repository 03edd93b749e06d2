"""The setting [model] pretrained (--from): one folder, or a name on the Hugging Face Hub, that gives several settings."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import tomli

from trainer.base.config import hub
from trainer.base.config.checkpoints import resolve_checkpoint
from trainer.base.config.errors import ConfigError, errors_about
from trainer.base.config.fields import Layer, Value
from trainer.base.config.recognition import require
from trainer.base.config.remote_paths import is_remote, local_path_of
from trainer.base.config.schema.config import Config
from trainer.base.config.schema.data import CHAT_DATASETS
from trainer.base.config.schema.model import TokenizerConfig
from trainer.base.config.tokenizer_and_template import (
    TOKENIZER_FILES,
    no_tokenizer,
    template_file,
    tokenizer_of,
    tokenizer_settings,
)
from trainer.base.system.paths import split_best
from trainer.base.system.run_files import CONFIG_FILE
from trainer.base.system.spelling import similar_path

SETTING = "model.pretrained"
SHORT_FLAGS = {"--from": f"--{SETTING}"}
"""Short form of a flag -> the flag."""
_PARTS: Mapping[str, tuple[str, ...]] = {
    "model": ("model.huggingface", "model.name", "model.size"),
    "weights": ("checkpoint.init_from",),
    "tokenizer": ("tokenizer.path", "tokenizer.backend"),
    "chat template": ("data.chat_template",),
}
"""What a model folder provides -> settings that replace it."""


def layer_of_pretrained(config: Config, given: Collection[str], sections: Collection[str], with_weights: bool) -> Layer:
    """Return the values of the parts that [model] pretrained gives.

    Args:
        config: The settings without them.
        given: Keys that the layer of [model] pretrained and those above it contain. A part is given as a whole: if one of its
            settings is among them, the folder does not provide the part.
        sections: Those whose files the command reads. What other sections would read need not exist.
        with_weights: Whether a model of the Hub is downloaded with its weights.

    Raises:
        ConfigError: There is no such model, or it lacks what the command needs.
    """
    source = config.model.pretrained
    explicit = {key for key in given if not _is_recorded(config, key)}
    parts = [part for part, keys in _PARTS.items() if explicit.isdisjoint(keys)]
    if not has_chats(config):
        parts = [part for part in parts if part != "chat template"]
    section_of = {"model": "model", "weights": "checkpoint", "tokenizer": "tokenizer", "chat template": "data"}
    read = [part for part in parts if part == "model" or section_of[part] in sections]
    found: dict[str, Any] = {}
    if not read:  # such as a plan of a model with a given size, for which no folder must exist
        folder = Path(source)
    elif is_remote(source):
        folder = _folder_of(local_path_of(source, SETTING, with_weights and "weights" in read))
    elif hub.names_a_folder(source):
        _require_local(config)
        folder = _folder_of(source)
    else:
        contents = "config" if read == ["model"] else "weights" if with_weights and "weights" in read else "text"
        folder = hub.fetch(source, _revision(config), contents)
        found["model.revision"] = folder.name
    if "model" in read:
        found["model.huggingface"] = str(folder)
    if "weights" in parts:
        found["checkpoint.init_from"] = str(folder) if "model.revision" in found or is_remote(source) else source
    if "tokenizer" in read:
        found |= _tokenizer(config, folder)
    if "chat template" in read and template_file(folder):
        # A folder may have the name of a shipped template.
        found["data.chat_template"] = os.path.join(os.curdir, folder) if folder.parent == Path() else str(folder)
    return _layer_of(found, SETTING, config)


def layer_of_tokenizer(config: Config) -> Layer:
    """Return the file, the backend and the tokens of the tokenizer at [tokenizer] path, if only the path is given. Raises
    ConfigError if the kind of the tokenizer cannot be seen."""
    key, path = "tokenizer.path", config.tokenizer.path
    if not path or "tokenizer.backend" in config.origins:
        return {}
    with errors_about(key):
        found = tokenizer_of(Path(path))
    if not found and os.path.isdir(path):
        raise ConfigError(key, no_tokenizer("this folder"))
    if not found:
        backends = ", ".join(sorted({*TOKENIZER_FILES.values(), "tiktoken"}))
        message = f"the kind of this tokenizer is not clear from its name; set tokenizer.backend to {backends}"
        raise ConfigError(key, message)
    return _layer_of(_with_own_tokens(found, config.tokenizer), key, config)


def _layer_of(values: Mapping[str, Any], setting: str, config: Config) -> Layer:
    """Return values as a layer. setting: the one that gives them, which their origins name."""
    origin = config.origins[setting]
    layer = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        layer[key] = Value(value, origin if key == setting else f"{origin} ([{section}] {name})")
    return layer


def is_from_pretrained(config: Config, key: str) -> bool:
    """Return whether [model] pretrained gave the value of a setting."""
    return config.origins.get(key, "").startswith(f"{config.origins.get(SETTING)} ([")


def provenance(config: Config) -> str:
    """Return a line that says which parts of the model come from [model] pretrained, and from where the others come, or "" if it
    is not set."""
    if not config.model.pretrained:
        return ""
    commit = f" (commit {config.model.revision})" if config.model.revision else ""
    given, others = [], []
    for part, keys in _PARTS.items():
        if any(is_from_pretrained(config, key) for key in keys):
            given.append(part)
        elif part != "chat template" or has_chats(config):
            origins = [config.origins[key] for key in keys if key in config.origins]
            origin = max(origins, key=lambda text: text.startswith("--"), default="")
            shown = f"[data] chat_template = {config.data.chat_template} (default)"
            others.append(f"{part} from {origin or shown}")
    return "; ".join([f"{config.origins.get(SETTING)}{commit}: {', '.join(given) or 'nothing'}", *others])


def has_chats(config: Config) -> bool:
    """Return whether a dataset consists of conversations."""
    return any(type_ in CHAT_DATASETS for _, type_, _ in config.datasets())


def _is_recorded(config: Config, key: str) -> bool:
    """Return whether a value is a path of the commit in the cache of the Hub, which an earlier start has recorded or printed."""
    commit = config.model.revision
    return hub.is_commit(commit) and f"snapshots/{commit}" in str(config.value(key))


def _require_local(config: Config) -> None:
    source = config.model.pretrained
    if os.path.isfile(source):
        raise ConfigError(SETTING, "is a file, not a folder; name the folder that contains it")
    if not os.path.exists(path := split_best(source)[0]):
        hint = similar_path(path) or "; a model of the Hub is named OWNER/NAME, such as Qwen/Qwen3-0.6B"
        raise ConfigError(SETTING, f"no such folder{hint}")


def _folder_of(source: str) -> Path:
    """Return the checkpoint or the folder in Hugging Face's format to which a path leads. Raises ConfigError."""
    with errors_about(SETTING):
        folder = resolve_checkpoint(Path(source))
        require(folder, "pretrained")
    return folder


def _revision(config: Config) -> str:
    """Return the revision of a model of the Hub to load: the given commit, that of the launcher of this rank, the given branch or
    tag, or the commit that the run has recorded."""
    name, given = config.model.pretrained, config.model.revision
    of_launcher, _, commit = os.environ.get(hub.COMMIT, "").rpartition("@")
    if hub.is_commit(given):
        return given
    if of_launcher == name:
        return commit
    return given or _recorded_commit(config.run.folder, name)


def _recorded_commit(run_folder: Path, name: str) -> str:
    try:
        model = tomli.loads((run_folder / CONFIG_FILE).read_text())["model"]
        return model["revision"] if model["pretrained"] == name else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _tokenizer(config: Config, folder: Path) -> dict[str, Any]:
    """Return the settings of the folder's tokenizer, with the tokens that the user adds. Raises ConfigError if there is none."""
    with errors_about(SETTING):
        found = tokenizer_settings(folder)
    if not found and any(key in config.origins for key in _PARTS["tokenizer"]):
        return {}
    if not found:
        raise ConfigError(
            SETTING, f"{no_tokenizer(folder)}; set tokenizer.path, or tokenizer.backend = default (the shipped one)"
        )
    return _with_own_tokens(found, config.tokenizer)


def _with_own_tokens(found: Mapping[str, Any], own: TokenizerConfig) -> dict[str, Any]:
    """Return the settings of a tokenizer that was found, with the tokens that the user adds. own: as the user has given them."""
    names = (*found.get("extra_special_tokens", ()), *own.extra_special_tokens)
    added = {
        "pattern": own.pattern or found.get("pattern", ""),
        "extra_special_tokens": tuple(dict.fromkeys(names)),
        "reuse_reserved_tokens": found.get("reuse_reserved_tokens", {}) | dict(own.reuse_reserved_tokens),
    }
    added = {name: value for name, value in added.items() if value != getattr(own, name)}
    settings = {"backend": found["backend"], "path": found.get("path", own.path)} | added
    return {f"tokenizer.{name}": value for name, value in settings.items()}
