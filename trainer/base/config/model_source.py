"""What a folder with a model provides: its checkpoint, its tokenizer as settings, its chat template."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.base.config.errors import ConfigError
from trainer.base.system.checkpoint_folder import MODEL_FILE, STATE_FILE, is_checkpoint, latest_per_step, step_of
from trainer.base.system.files import folder_error, read_json_object
from trainer.base.system.model_folder import folder_problem
from trainer.base.system.paths import split_best, unreadable

TOKENIZER_FILES = {"tokenizer.json": "huggingface", "tokenizer.model": "sentencepiece", "tekken.json": "tekken"}
"""Tokenizer file of a folder in Hugging Face's format, in order of precedence -> [tokenizer] backend."""
_LINE_BYTES = 1024
_BACKEND_OF_ENDING = {".json": "huggingface", ".tiktoken": "tiktoken", ".model": "sentencepiece"}
TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
"""Files that may define a chat template, in order of precedence."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Return one checkpoint per step, newest first. Raises ConfigError if the folder cannot be read. An unreadable
    folder is not treated as empty, because it may contain checkpoints."""
    try:
        return latest_per_step(folder)
    except OSError as error:
        raise ConfigError("", f"{folder} cannot be read ({error.strerror})") from None


def best_step(folder: Path) -> int:
    """Return the step of the best checkpoint according to the newest checkpoint that can be read, or 0 if there is none."""
    for path in list_checkpoints(folder):
        try:
            best = read_json_object(path / STATE_FILE)["best"]
        except (OSError, ValueError, KeyError):
            continue
        return best[1] if isinstance(best, list) and len(best) > 1 and type(best[1]) is int else 0
    return 0


def best_checkpoint(folder: Path) -> Path:
    """Return the best checkpoint. Raises ConfigError if the run has none."""
    checkpoints = {step_of(path): path for path in list_checkpoints(folder)}
    if not checkpoints:
        raise ConfigError("", f"{folder} contains no checkpoint")
    step = best_step(folder)
    if not step:
        message = "has no best checkpoint: the run had no [evaluation] keep_best_on, or no evaluation yet"
        raise ConfigError("", f"{folder} {message}")
    if step not in checkpoints:
        raise ConfigError("", f"{folder}: the best checkpoint, step {step}, does not exist anymore")
    return checkpoints[step]


def resolve_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint if `folder` is a run folder, its best one if the path ends in @best, otherwise `folder`.
    Raises ConfigError if it is not a folder, or if the run has no best checkpoint."""
    folder, is_best = split_best(folder)
    if problem := folder_error(folder):
        raise ConfigError("", f"{folder}: {problem}")
    if is_best:
        return best_checkpoint(folder / "checkpoints")
    steps = list_checkpoints(folder / "checkpoints")
    return steps[0] if steps else folder


def is_model(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, or a model in Hugging Face's format, as far as its names show it."""
    return is_checkpoint(folder) or (folder / "config.json").exists()


def not_a_model(folder: Path) -> ConfigError:
    """Return the error about a folder that contains no model."""
    message = "contains neither manifest.json of a checkpoint nor config.json of a Hugging Face model"
    return ConfigError("", f"{folder} {folder_problem(folder) or message}")


def saved_tokenizer(checkpoint: Path, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of [tokenizer] that load the tokenizer of a run's checkpoint. model: content of its model.json. Raises
    KeyError, IndexError, TypeError or ValueError if the content is invalid."""
    file, backend = model["tokenizer_files"][0], model["tokenizer"]
    if Path(file).name != file:
        raise ValueError
    return {
        # The default tokenizer is a tiktoken file too, and the shipped file may change.
        "backend": "tiktoken" if backend == "default" else backend,
        "path": str(checkpoint / file),
        "pattern": model.get("pattern", "llama3" if backend == "tiktoken" else ""),  # older checkpoints have none
        "reuse_reserved_tokens": dict(model["reuse_reserved_tokens"]),
        "extra_special_tokens": tuple(model["extra_special_tokens"]),
    }


def published_tokenizer(folder: Path) -> dict[str, Any]:
    """Return the settings of [tokenizer] that load the tokenizer files of Hugging Face's format, or {} if there are none."""
    files = (folder / name for name in TOKENIZER_FILES)
    return next((tokenizer_of(file) | {"path": str(file)} for file in files if file.exists() and not file.is_dir()), {})


def tokenizer_of(path: Path) -> dict[str, Any]:
    """Return the settings of [tokenizer] that load the tokenizer at a path: a folder with a model, or a tokenizer's file. Return
    {} if the kind of the tokenizer is unknown. If the path does not exist, its name decides alone. Raises ConfigError."""
    if path.is_dir():
        return tokenizer_settings(path)
    backend = TOKENIZER_FILES.get(path.name) or _BACKEND_OF_ENDING.get(
        path.suffix, "" if path.exists() else "huggingface"
    )
    if backend == "sentencepiece" and _is_tiktoken(path):  # Llama 3's file has the same name as Llama 2's
        backend = "tiktoken"
    return {"backend": backend} if backend else {}


def _is_tiktoken(file: Path) -> bool:
    """Return whether the first line of a file is that of a tiktoken file: a token's bytes in base64, a space and its id."""
    if not file.is_file():  # opening a named pipe would wait forever
        return False
    with suppress(OSError), file.open("rb") as lines:
        return re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\r?\n?", lines.readline(_LINE_BYTES)) is not None
    return False


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of [tokenizer] that load the tokenizer of a folder, or {} if it has none. Raises ConfigError."""
    if is_checkpoint(folder) and (model := read_model_file(folder)).get("tokenizer"):
        try:
            return saved_tokenizer(folder, model)
        except (KeyError, IndexError, TypeError, ValueError):
            raise ConfigError("", f"{folder}: {MODEL_FILE} does not describe a model") from None
    return published_tokenizer(folder)


def read_model_file(checkpoint: Path) -> dict[str, Any]:
    """Return the unchecked content of a checkpoint's model.json. Raises ConfigError if it is not a JSON object."""
    file = checkpoint / MODEL_FILE
    try:
        return read_json_object(file)
    except OSError as error:
        raise ConfigError("", unreadable(error, str(file))) from None
    except ValueError:
        raise ConfigError("", f"{checkpoint}: {MODEL_FILE} does not describe a model") from None


def template_file(folder: Path) -> Path | None:
    """Return the file of a folder that defines its chat template, or None. A file that cannot be read counts: what reads the
    template reports the reason."""
    return next((folder / name for name in TEMPLATE_FILES if _defines_template(folder / name)), None)


def _defines_template(file: Path) -> bool:
    if not file.is_file() or file.suffix != ".json":
        return file.is_file()
    try:
        return bool(read_json_object(file).get("chat_template"))
    except (OSError, ValueError):
        return True
