"""Loading of built-in chat templates, and of template files in Hugging Face's formats."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.base.config import ConfigError
from trainer.base.config.recognition import pointer_problem, recognise
from trainer.base.config.tokenizer_and_template import (
    TEMPLATE_FILES,
    TOOL_TEMPLATE,
    combined_templates,
    template_file,
    template_of_list,
)
from trainer.base.system.files import TooLarge, parse_json_object, read_json_object, read_limited
from trainer.base.system.paths import unreadable
from trainer.base.system.spelling import did_you_mean, similar_path
from trainer.data.tokenizer.special_tokens import SPECIAL_LOOKING, name_of

SETTING = "data.chat_template"
_FOLDER = Path(__file__).with_name("templates")
_SHIPPED = [
    "llama2",
    "llama3",
    "chatml",
    "qwen3",
    "smollm3",
    "olmo3",
    "qwen2.5",
    "llama3.1",
    "ministral3",
    "mistral-nemo",
    "mistral-v0.3",
    "olmo2",
    "granite3",
    "gemma2",
    "gemma3",
    "phi3",
    "phi4",
    "phi4-mini",
]
"""Names of the shipped templates. Where several fit, the first is named."""
BUILT_IN = {name: _FOLDER / f"{name}.jinja" for name in _SHIPPED}
_OF_TEXTS = ("bos_token", "eos_token")
_TAG = r"\[/?[A-Z]+\]"
"""Pattern of tags that are plain text, such as [INST]."""
_MAX_BYTES = 2**24
"""Maximum size of a file with a template. The largest published one, Gemma 3's tokenizer_config.json, has 1.16 MB."""


def read_template(choice: str) -> tuple[str, dict[str, str] | None]:
    """Return the Jinja text of a template, and its variables (name -> text), or None if no tokenizer_config.json defines them.

    choice: a name of BUILT_IN; a .jinja file; a tokenizer_config.json or chat_template.json; or a folder, of which the first file
    of TEMPLATE_FILES with a template is read. Raises ConfigError if the template cannot be read.
    """
    if choice in BUILT_IN:
        return _read(BUILT_IN[choice]), None
    path = Path(choice)
    if path.is_dir():
        file = template_file(path) or path / "tokenizer_config.json"  # the message names the file without a template
        if not file.is_file():
            names = "neither chat_template.jinja nor tokenizer_config.json"
            raise ConfigError(SETTING, f"{path} {recognise(path, 'text').problem or f'holds {names}'}")
        path = file
    if not path.exists():
        names = f"expected one of {', '.join(BUILT_IN)}, or an existing file or folder"
        raise ConfigError(SETTING, f"{names}{did_you_mean(choice, BUILT_IN) or similar_path(path)}")
    if path.suffix != ".json":
        for_tools = path.parent / TOOL_TEMPLATE
        tool_use = _read(for_tools) if path.name == TEMPLATE_FILES[0] and for_tools.is_file() else None
        return combined_templates(_read(path), tool_use), _variables(path.parent)
    return _template(_json(path), path), _variables(path.parent)


def tags_are_text(template: str, files: Mapping[str, bytes]) -> bool:
    """Return whether names in a template that only look like special tokens are plain text, as in transformers: in a tokenizer's
    own template, and in OLMo 2's. files: name -> content of the tokenizer's files."""
    return template in (own_template(files), _read(BUILT_IN["olmo2"]))


def own_template(files: Mapping[str, bytes]) -> str:
    """Return the chat template among the files of a tokenizer, or "" if there is none. files: name -> content."""
    for name in TEMPLATE_FILES:
        try:
            text = files.get(name, b"").decode()
            found = (
                text
                if name == TEMPLATE_FILES[0]
                else parse_json_object(text.encode()).get("chat_template")
                if text
                else ""
            )
        except ValueError:
            continue
        found = template_of_list(found) if isinstance(found, list) else found
        if isinstance(found, str) and found:
            return found
    return ""


def fitting_templates(template: str, special_tokens: Collection[str], names: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of the shipped templates that can replace a template: all their special tokens and tags, such as
    [INST], occur in it, and the tokenizer has the special tokens.

    Args:
        template: Jinja text of the template to replace.
        special_tokens: Special tokens of the tokenizer.
        names: Text of each variable such as bos_token.
    """
    for name, path in BUILT_IN.items():
        text = _read(path)
        special, tags = set(re.findall(SPECIAL_LOOKING, text)), set(re.findall(_TAG, text))
        variables = {names.get(variable) for variable in _OF_TEXTS if variable in text}
        if (
            text != template
            and special | variables <= set(special_tokens)
            and all(n in template for n in special | tags)
        ):
            yield name


def usable_templates(special_tokens: Collection[str]) -> list[str]:
    """Return the names of the shipped templates that write special tokens of a tokenizer, and no others, most tokens first."""
    counts = {}
    for name, path in BUILT_IN.items():
        text = _read(path)
        written = {*re.findall(SPECIAL_LOOKING, text), *re.findall(_TAG, text)}
        if written and written <= set(special_tokens):
            counts[name] = len(written)
    return sorted(counts, key=lambda name: -counts[name])


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    if problem := pointer_problem(path):
        raise ConfigError(SETTING, problem)
    try:
        yield
    except OSError as error:
        raise ConfigError(SETTING, unreadable(error, str(path))) from None
    except TooLarge as problem:
        raise ConfigError(SETTING, f"{path} {problem}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(SETTING, f"{path} is not UTF-8 text (byte {error.start})") from None
    except ValueError:
        raise ConfigError(SETTING, f"{path} is not a JSON object") from None


def _read(path: Path) -> str:
    with _one_line_errors(path):
        return read_limited(path, _MAX_BYTES).decode()


def _json(path: Path) -> dict[str, Any]:
    with _one_line_errors(path):
        return read_json_object(path, _MAX_BYTES)


def _template(config: dict[str, Any], path: Path) -> str:
    """Return the template of a tokenizer configuration. It may be a list of named templates."""
    template = config.get("chat_template")
    if isinstance(template, list):
        if (found := template_of_list(template)) is None:
            raise ConfigError(SETTING, f'{path} has several templates, but none is named "default"')
        return found
    if not isinstance(template, str):
        raise ConfigError(SETTING, f"{path} has no chat_template")
    return template


def _variables(folder: Path) -> dict[str, str] | None:
    """Return the special tokens that transformers passes to a template as variables, such as bos_token (name -> text), or None if
    the folder has no tokenizer_config.json."""
    files = {name: folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")}
    objects = {name: _json(file) for name, file in files.items() if file.is_file()}
    config = objects.get("tokenizer_config.json")
    if config is None:
        return None
    if "added_tokens_decoder" not in config:  # the format of older versions, in which the other file counts
        config = config | objects.get("special_tokens_map.json", {})
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    for field in ("extra_special_tokens", "model_specific_special_tokens"):
        tokens |= config[field] if isinstance(config.get(field), dict) else {}
    texts = {name: name_of(value) for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if text is not None}
