"""Tokenizers of checkpoints, and the files of exports with which transformers and other readers encode text as in training."""

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.huggingface import HuggingFace
from trainer.base.config import ConfigError, TokenizerConfig
from trainer.base.config.tokenizer_and_template import no_tokenizer, published_tokenizer, saved_tokenizer
from trainer.base.system.files import parse_json_object
from trainer.base.system.run_files import MODEL_FILE
from trainer.checkpoint import manifest
from trainer.checkpoint.formats.model_metadata import CHAT_TEMPLATE, GENERATION_CONFIG
from trainer.checkpoint.formats.weights import Weights
from trainer.checkpoint.manifest import CorruptError
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.data.tokenizer.byte_pair import PATTERNS
from trainer.data.tokenizer.hf_json import is_byte_level, json_bytes
from trainer.data.tokenizer.huggingface import LLAMA_LIKE
from trainer.data.tokenizer.protocol import Tokenizer

_CLASS = "PreTrainedTokenizerFast"
"""The only class that all versions of transformers load from tokenizer.json alone. Others change parts of it: transformers 5
rebuilds the tokenizer of the class LlamaTokenizer from its vocabulary, for example."""

_CODE_FILE = "tokenizer_from_file.py"
_CODE = b'''"""A tokenizer that is loaded from tokenizer.json without changes. Only trust_remote_code=True runs this file."""

from transformers import PreTrainedTokenizerFast


class TokenizerFromFile(PreTrainedTokenizerFast):
    pass
'''


def load_model_tokenizer(weights: Weights) -> Tokenizer:
    """Load the tokenizer beside the weights of a model. Raises ConfigError if there is none."""
    if not weights.model.tokenizer:
        return load_hf_tokenizer(weights.folder)
    return load_tokenizer(TokenizerConfig(**saved_tokenizer(weights.folder, asdict(weights.model))))


def load_hf_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a folder in Hugging Face's format. Raises ConfigError if there is none."""
    settings = published_tokenizer(folder)
    if not settings:
        raise ConfigError("", no_tokenizer(folder))
    return load_tokenizer(TokenizerConfig(**settings))


def exported_files(weights: Weights) -> dict[str, bytes]:
    """Return name -> content of the files of an export that do not depend on the weights: tokenizer, chat template and
    generation_config.json of a checkpoint. Raises ConfigError if a file is damaged."""
    folder, model = weights.folder, weights.model
    with manifest.damage_as_config_error(folder):
        if unlisted := set(model.tokenizer_files) - set(manifest.read(folder).files):
            raise CorruptError(f"{MODEL_FILE} names {min(unlisted)}, which is not in the manifest")
    if model.tokenizer:
        return files_of_tokenizer(weights, load_model_tokenizer(weights))
    return _with_others(weights, {name: (folder / name).read_bytes() for name in model.tokenizer_files})


def files_of_tokenizer(weights: Weights, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return exported_files with those of a loaded tokenizer, which list all tokens. Raises ConfigError."""
    return _with_others(weights, tokenizer.huggingface_files())


def _with_others(weights: Weights, files: Mapping[str, bytes]) -> dict[str, bytes]:
    folder = weights.folder
    others = {n: (folder / n).read_bytes() for n in (CHAT_TEMPLATE, GENERATION_CONFIG) if (folder / n).exists()}
    return exported_tokenizer({**files, **others}, weights.spec.huggingface)


def exported_tokenizer(files: Mapping[str, bytes], hf: HuggingFace) -> dict[str, bytes]:
    """Return name -> content of the tokenizer files of an export. files: those of the tokenizer, the chat template, and others,
    which are returned as they are."""
    files = dict(files)
    if "chat_template.json" in files:  # only the processors of models of several modalities read it
        template = _object(files, "chat_template.json").get("chat_template")
        del files["chat_template.json"]
        files = {CHAT_TEMPLATE: template.encode()} | files if isinstance(template, str) else files
    config = _object(files, "tokenizer_config.json")
    if CHAT_TEMPLATE in files:
        config.pop("chat_template", None)  # the file takes precedence, but not in all readers
        try:
            files[CHAT_TEMPLATE] = without_generation_tags(files[CHAT_TEMPLATE].decode()).encode()
        except UnicodeDecodeError as error:
            raise ConfigError("", f"{CHAT_TEMPLATE} is not UTF-8 text (byte {error.start})") from None
    elif isinstance(config.get("chat_template"), str):
        config["chat_template"] = without_generation_tags(config["chat_template"])
    elif isinstance(config.get("chat_template"), list):
        config["chat_template"] = [_without_generation_tags(entry) for entry in config["chat_template"]]
    if "tokenizer.json" in files:
        config.pop("auto_map", None)  # the code that it names is not exported
        content = _object(files, "tokenizer.json")
        # Without this list, transformers also returns token_type_ids, which generate() does not accept.
        config.setdefault("model_input_names", ["input_ids", "attention_mask"])
        if str(config.get("tokenizer_class")).removesuffix("Fast") in LLAMA_LIKE:
            config.setdefault("padding_side", "left")  # the default of the class that is replaced
        config["tokenizer_class"] = _CLASS
        if hf.byte_level_class and is_byte_level(content):
            # This class would add its default special tokens to the vocabulary.
            config = {"unk_token": None} | config | {"tokenizer_class": hf.byte_level_class}
        if hf.forced_class == "Qwen2Tokenizer":
            if _is_qwen2(content, config):
                config["tokenizer_class"] = hf.forced_class
            else:
                # transformers 5 ignores tokenizer_class for this type of model, unless auto_map names another class.
                config["auto_map"] = {"AutoTokenizer": [f"{_CODE_FILE.removesuffix('.py')}.TokenizerFromFile"] * 2}
                files[_CODE_FILE] = _CODE
    if config:
        files["tokenizer_config.json"] = json_bytes(config)
    return files


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object in a file of a tokenizer, or {} if there is no such file. Raises ConfigError."""
    try:
        return parse_json_object(files.get(name, b"{}"))
    except ValueError:
        raise ConfigError("", f"{name} of the tokenizer is not a JSON object, so that it cannot be exported") from None


def _without_generation_tags(entry: Any) -> dict[str, Any]:
    """Return an entry of a list of named templates without {% generation %} tags. Raises ConfigError."""
    if not isinstance(entry, dict) or not isinstance(entry.get("template"), str):
        message = "tokenizer_config.json lists a chat_template that is not an object with name and template"
        raise ConfigError("", f"{message}, so that it cannot be exported")
    return {**entry, "template": without_generation_tags(entry["template"])}


def _is_qwen2(content: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether transformers' Qwen2Tokenizer encodes text like this tokenizer.json."""
    pre_tokenizers, model = (content.get("pre_tokenizer") or {}).get("pretokenizers", [{}]), content.get("model") or {}
    flags = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    names = {entry["content"] for entry in content.get("added_tokens") or []}
    return (
        model.get("type") == "BPE"
        and not any(model.get(flag) for flag in (*flags, "fuse_unk", "ignore_merges"))
        and content.get("normalizer") == {"type": "NFC"}
        and [p.get("type") for p in pre_tokenizers] == ["Split", "ByteLevel"]
        and pre_tokenizers[0].get("pattern") == {"Regex": PATTERNS["qwen2"]}
        and not config.get("add_prefix_space")
        and "<|endoftext|>" in names  # otherwise the class adds it to the vocabulary
    )


_TEMPLATE_PART = re.compile(
    r"\{#.*?#\}"
    r"|\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}"
    r"|\{%(?P<before>[-+]?)\s*(?P<end>end)?generation\s*(?P<after>[-+]?)%\}"
    r"|\{%(?:\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|.)*?%\}"
    r"|\{\{(?:\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|.)*?\}\}",
    re.DOTALL,
)
"""A comment, raw text, a tag of a generation block, another tag, or an expression of a Jinja template."""


def without_generation_tags(template: str) -> str:
    """Return a template that renders the same text without {% generation %} tags, which most readers do not know."""
    # A comment has the same effect on the white space around it. Variables that a generation block sets end with the block.
    parts = [*_TEMPLATE_PART.finditer(template)]
    is_tag = [part["before"] is not None for part in parts]
    if not any(is_tag):
        return template
    inside, sets = False, False
    for part, tag in zip(parts, is_tag, strict=True):
        inside = (part["end"] is None) if tag else inside
        sets |= inside and bool(re.match(r"\{%[-+]?\s*set\b", part[0]))

    def replace(part: re.Match[str]) -> str:
        if part["before"] is None:
            return part[0]
        if sets:
            return f"{{%{part['before']} {part['end'] or ''}with {part['after']}%}}"
        return f"{{#{part['before']} {part['end'] or ''}generation {part['after']}#}}"

    return _TEMPLATE_PART.sub(replace, template)
