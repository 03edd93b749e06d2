"""Files of a folder in Hugging Face's format: safe paths, JSON and safetensors files, and what config.json says."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from models import MODELS
from models.config_json import text_config
from models.huggingface_config import other_fields, read_seq_len, read_sizes
from models.sizes import text_of
from models.spec import ModelSpec
from trainer.base.config import ConfigError
from trainer.base.system.files import TooLarge, read_json_object
from trainer.base.system.paths import unreadable
from trainer.checkpoint import manifest
from trainer.checkpoint.formats.model_metadata import SPECIAL_TOKEN_IDS, ModelMetadata
from trainer.checkpoint.manifest import CorruptError
from trainer.data.tokenizer.huggingface import COMPANION_FILES

_TOKENIZER_FILES = ("tokenizer.json", "tekken.json", *COMPANION_FILES)


def file_inside(folder: Path, name: Any) -> Path:
    """Return the path of a file in the folder. Raises CorruptError if the name is not a plain file name, or if the file is
    a symbolic link to a path outside the folder. Links to the blobs of Hugging Face's cache are allowed."""
    path = folder / manifest.require_plain_filename(name, "the index")
    # Path.resolve raises RuntimeError for a loop of links (Python 3.11). A loop ends in an error when the file is opened.
    target, home = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    blobs = home.parent.parent / "blobs"
    if not (target.is_relative_to(home) or (home.parent.name == "snapshots" and target.is_relative_to(blobs))):
        raise CorruptError(f"{name} is a symbolic link to a path outside the folder")
    return path


def read_object(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a folder in Hugging Face's format. Raises ConfigError."""
    with manifest.damage_as_config_error(file.parent):
        path = file_inside(file.parent, file.name)
    try:
        return read_json_object(path)
    except OSError as error:
        raise ConfigError("", unreadable(error, str(path))) from None
    except TooLarge as problem:
        raise ConfigError("", f"{file} {problem}") from None
    except ValueError:
        raise ConfigError("", f"{file} is not a JSON object") from None


def open_tensors(path: Path) -> Any:
    """Open a safetensors file. Raises ConfigError."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError("", f"{path}: {error}") from None


@dataclass(frozen=True)
class DescribedModel:
    """The text model that a config.json describes."""

    config: Mapping[str, Any]
    """The fields about this model."""
    spec: ModelSpec
    """The first family with the model's type."""
    sizes: Any
    seq_len: int
    """Context window."""

    def metadata(self, folder: Path) -> ModelMetadata:
        """Return what the folder of the config.json says about its model."""
        return ModelMetadata(
            family=family_of(self.spec, self.sizes),
            sizes=asdict(self.sizes),
            seq_len=self.seq_len,
            context_window=self.seq_len,
            tokenizer="",
            tokenizer_files=tuple(name for name in _TOKENIZER_FILES if (folder / name).exists()),
            special_token_ids={key: self.config[key] for key in SPECIAL_TOKEN_IDS if key in self.config},
            reuse_reserved_tokens={},
            extra_special_tokens=(),
            other_config=other_fields(self.spec.huggingface, self.config, self.sizes),
        )


def read_config(file: Path, expected: ModelSpec | None = None) -> DescribedModel:
    """Read a config.json. expected: the only accepted family. Raises ConfigError."""
    config = text_config(read_object(file))
    families = reversed(MODELS.values()) if expected is None else (expected,)
    types = {name: s for s in families for name in (s.huggingface.model_type, *s.huggingface.other_model_types)}
    model_type = config.get("model_type", None if expected is None else expected.huggingface.model_type)
    try:
        if not isinstance(model_type, str) or model_type not in types:
            only = f"this model supports only {text_of(next(iter(types)))}"
            supported = only if expected else f"expected one of {', '.join(types)}"
            raise ValueError(f"model_type {text_of(model_type)}: {supported}")
        spec, hf = types[model_type], types[model_type].huggingface
        sizes = read_sizes(hf, config)
        return DescribedModel(config, spec, sizes, read_seq_len(hf, config))
    except ValueError as error:
        raise ConfigError("", f"{file}: {error}") from None


def family_of(spec: ModelSpec, sizes: Any) -> str:
    """Return the name of the first family with these sizes among those that share the format of `spec`, or of the first such
    family."""
    families = [name for name, other in MODELS.items() if other.huggingface is spec.huggingface]
    return next((name for name in families if sizes in MODELS[name].by_size.values()), families[0])
