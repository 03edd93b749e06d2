"""The tokenizer and the chat template in a folder with a model: the tokenizer as settings of [tokenizer]."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.base.config.errors import ConfigError
from trainer.base.config.recognition import is_checkpoint
from trainer.base.system.files import read_json_object
from trainer.base.system.paths import unreadable
from trainer.base.system.run_files import MODEL_FILE

TOKENIZER_FILES = {"tokenizer.json": "huggingface", "tokenizer.model": "sentencepiece", "tekken.json": "tekken"}
"""Tokenizer file of a folder in Hugging Face's format, in order of precedence -> [tokenizer] backend."""
_LINE_BYTES = 1024
_BACKEND_OF_ENDING = {".json": "huggingface", ".tiktoken": "tiktoken", ".model": "sentencepiece"}
TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
"""Files that may define a chat template, in order of precedence."""
BESIDE_TOKENIZER = (
    *TEMPLATE_FILES, "tokenizer.json", "config.json", "generation_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "additional_chat_templates/tool_use.jinja",
)  # fmt: skip
"""Files that may be read beside that of a tokenizer."""
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""File beside chat_template.jinja with the template for conversations that have tools."""


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


def no_tokenizer(folder: Path | str) -> str:
    """Return the message that a folder has no tokenizer."""
    return f"{folder} contains none of {', '.join(TOKENIZER_FILES)}"


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


def combined_templates(default: str, tool_use: str | None) -> str:
    """Return a template that renders as transformers does with two: `tool_use` if there are tools, otherwise `default`."""
    if tool_use in (None, default):
        return default
    # Jinja omits a line end at the end of a template, and after or before a tag. An empty output protects the others.
    first, second = (f'{{{{ "" }}}}{text.removesuffix(chr(10))}{{{{ "" }}}}' for text in (tool_use, default))
    return f"{{% if tools %}}{first}{{% else %}}{second}{{% endif %}}"


def template_of_list(entries: Any) -> str | None:
    """Return the combined template of a list of named ones in tokenizer_config.json, or None if none is named "default"."""
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    texts = {name: text for name, text in named.items() if isinstance(text, str)}
    return combined_templates(texts["default"], texts.get("tool_use")) if "default" in texts else None
