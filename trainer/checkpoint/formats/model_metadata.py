"""What a checkpoint, or another folder with a model, says about it: the content of model.json."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from models import MODELS
from models.spec import ModelSpec, SizeError
from trainer.base.system.files import LARGEST_JSON, parse_json_object
from trainer.base.system.run_files import MODEL_FILE
from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import CorruptError
from trainer.data.tokenizer.backends import TOKENIZERS

CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
SPECIAL_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of the special tokens in Hugging Face's configuration files."""


def ids_of_ends(config: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text according to a configuration file of Hugging Face, which names none, one or a list."""
    ids = config.get("eos_token_id")
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


@dataclass(frozen=True)
class ModelMetadata:
    """Content of model.json."""

    family: str
    sizes: Mapping[str, Any]
    seq_len: int
    context_window: int
    """Longest sequence in the training of this model, or of the model from which it was initialized."""
    tokenizer: str
    """Tokenizer backend of the run, or "" for a model in Hugging Face's format, or imported from it, with that format's files."""
    tokenizer_files: tuple[str, ...]
    special_token_ids: Mapping[str, Any]
    """Key of SPECIAL_TOKEN_IDS -> value."""
    reuse_reserved_tokens: Mapping[str, str]
    """Setting [tokenizer] reuse_reserved_tokens of the run."""
    extra_special_tokens: tuple[str, ...]
    """Setting [tokenizer] extra_special_tokens of the run."""
    pattern: str = ""
    """Setting [tokenizer] pattern, if the tokenizer is a tiktoken file."""
    other_config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the initial model's config.json that an export keeps."""
    lora: Mapping[str, Any] = field(default_factory=dict)
    """If the checkpoint contains an adapter: its settings rank, alpha, rslora and base_dtype, its base_format, and path and hash
    of its base model."""

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, checkpoint: Path) -> "ModelMetadata":
        """Read model.json of a checkpoint. Raises CorruptError."""
        try:
            values = parse_json_object(manifest.read_text(checkpoint / MODEL_FILE, LARGEST_JSON))
            for setting in ("tokenizer_files", "extra_special_tokens"):
                values[setting] = tuple(values[setting])
            for name in values["tokenizer_files"]:
                manifest.require_plain_filename(name, MODEL_FILE)
            values.setdefault("pattern", "llama3" if values["tokenizer"] == "tiktoken" else "")  # as older checkpoints
            values.setdefault("other_config", {})  # older checkpoints lost them
            values.setdefault("lora", {})  # older checkpoints contain complete models
            values.setdefault("context_window", values["seq_len"])
            types = {name: get_origin(hint) or hint for name, hint in get_type_hints(cls).items()}
            if not all(isinstance(values[name], type_) for name, type_ in types.items()):
                raise ValueError
            if min(values["seq_len"], values["context_window"]) < 1:
                raise ValueError
            names = (*values["extra_special_tokens"], *values["reuse_reserved_tokens"].values())
            if not all(isinstance(name, str) for name in names):
                raise ValueError
            if values["tokenizer"] and not (values["tokenizer"] in TOKENIZERS and values["tokenizer_files"]):
                raise ValueError
            return cls(**values)
        except (ValueError, TypeError, KeyError):
            raise CorruptError(f"{MODEL_FILE} does not describe a model") from None

    def with_sizes(self, sizes: Any) -> "ModelMetadata":
        return replace(self, sizes=asdict(sizes))

    def spec_and_sizes(self) -> tuple[ModelSpec, Any]:
        """Return the model's family and sizes. Raises CorruptError."""
        if self.family not in MODELS:
            raise CorruptError(f"unknown model family {self.family}; available: {', '.join(MODELS)}")
        spec = MODELS[self.family]
        try:
            return spec, spec.huggingface.sizes_type(**self.sizes)
        except SizeError as error:
            raise CorruptError(f"{MODEL_FILE}: {error}") from None
        except TypeError:  # a name is missing or unknown
            raise CorruptError(f"{MODEL_FILE} does not list the sizes of {self.family}") from None
