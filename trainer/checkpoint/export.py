"""A checkpoint as a model of Hugging Face's format, by what the checkpoint itself says of it."""

from pathlib import Path

import torch
import torch.distributed as dist

from trainer.checkpoint import commit as checkpoints
from trainer.checkpoint import manifest
from trainer.checkpoint.huggingface import CHAT_TEMPLATE, MODEL_FILE, Export, ModelMetadata, is_export_of
from trainer.checkpoint.manifest import CorruptError
from trainer.config import ConfigError, TokenizerConfig
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.system import logging
from trainer.system.units import GIB

_SHARD_BYTES = 5 * GIB


def export_from_checkpoint(checkpoint: Path, dtype: torch.dtype) -> Export:
    """Raises ConfigError for what is damaged, or no checkpoint of a model."""
    try:
        if problem := manifest.find_damage(checkpoint):
            raise CorruptError(problem)
        model = ModelMetadata.read(checkpoint)
        if others := set(model.tokenizer_files) - set(manifest.read(checkpoint).files):
            raise CorruptError(f"{MODEL_FILE} names {min(others)}, which is none of its files")
        spec, sizes = model.spec_and_sizes()
        files = {name: (checkpoint / name).read_bytes() for name in model.tokenizer_files}
    except CorruptError as damage:
        raise ConfigError("", f"{checkpoint}: {damage}") from None
    if model.tokenizer:
        files = load_checkpoint_tokenizer(checkpoint, model).huggingface_files()
    if (checkpoint / CHAT_TEMPLATE).exists():
        files[CHAT_TEMPLATE] = (checkpoint / CHAT_TEMPLATE).read_bytes()
    return Export(checkpoint, spec, sizes, model.seq_len, dtype, files, model.special_token_ids)


def load_checkpoint_tokenizer(checkpoint: Path, model: ModelMetadata) -> Tokenizer:
    """Raises ConfigError where there is none."""
    if not model.tokenizer:
        return load_hf_tokenizer(checkpoint)  # what came from Hugging Face is there as it was
    path = str(checkpoint / model.tokenizer_files[0])
    return load_tokenizer(
        TokenizerConfig(
            backend=model.tokenizer,
            path=path,
            reuse_reserved_tokens=model.reuse_reserved_tokens,
            extra_special_tokens=model.extra_special_tokens,
        )
    )


def load_hf_tokenizer(folder: Path) -> Tokenizer:
    """Of a folder that holds Hugging Face's files. Raises ConfigError where it has none."""
    for file, kind in (("tokenizer.json", "huggingface"), ("tokenizer.model", "sentencepiece")):
        if (folder / file).exists():
            return load_tokenizer(TokenizerConfig(backend=kind, path=str(folder / file)))
    raise ConfigError("", f"{folder}: has neither of tokenizer.json, tokenizer.model")


def export_run(run_folder: Path, unless_there: bool = False) -> None:
    """Write the newest checkpoint of a finished run to its folder huggingface/, in bf16, by the first rank; the others wait at
    the end of the run. Raises ConfigError where it cannot be written. unless_there: not over the same."""
    if dist.get_rank() != 0:
        return
    out = run_folder / "huggingface"
    try:
        newest = checkpoints.latest_per_step(run_folder / "checkpoints")[0]
        if unless_there and is_export_of(out, newest):
            return
        export_from_checkpoint(newest, torch.bfloat16).write(out, _SHARD_BYTES, lambda written: None, replace=True)
    except (OSError, CorruptError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        rule = f"{out} could not be written ({why}); the same command tries it again"
        raise ConfigError("checkpoint.export_huggingface", rule) from None
    logging.info(f"exported {out}")
