"""A checkpoint as a model of Hugging Face's format, by what the checkpoint itself says of it."""

from pathlib import Path

import torch

from models import MODELS
from models.spec import SizeError
from trainer.config import ConfigError, TokenizerConfig
from trainer.data.tokenizers import load_tokenizer
from trainer.huggingface import Export, Model
from trainer.manifest import Damaged


def export_of(checkpoint: Path, dtype: torch.dtype) -> Export:
    """Raises ConfigError for what is no checkpoint of a model."""
    try:
        model = Model.read(checkpoint)
        if model.family not in MODELS:
            raise Damaged(f"is a {model.family}, which is none of {', '.join(MODELS)}")
        spec = MODELS[model.family]
        sizes = type(next(iter(spec.sizes.values())))(**model.sizes)
        files = {name: (checkpoint / name).read_bytes() for name in model.tokenizer_files}
    except (Damaged, SizeError, TypeError) as error:
        raise ConfigError("", f"{checkpoint}: {error}") from None
    if model.tokenizer:
        path = checkpoint / model.tokenizer_files[0]
        files = load_tokenizer(TokenizerConfig(kind=model.tokenizer, path=str(path))).huggingface_files()
    return Export(checkpoint, spec, sizes, model.seq_len, dtype, files, model.special)
