"""Loading of a model with its tokenizer."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.spec import saved_weights
from trainer.base.config import ConfigError
from trainer.base.config.checkpoints import resolve_checkpoint, why_chosen
from trainer.base.config.remote_paths import local_path_of, readable_error
from trainer.base.system.paths import BEST
from trainer.base.system.streams import print_error
from trainer.checkpoint.formats.folders import open_weights
from trainer.checkpoint.formats.tokenizer_files import load_model_tokenizer
from trainer.checkpoint.formats.weights import Weights
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.parallel.init_weights import allocate
from trainer.runtime.device import existing_device


def load_model(
    path: str | Path,
    *,
    base: str | Path | None = None,
    averaged: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    max_seq_len: int = 0,
) -> tuple[nn.Module, Tokenizer]:
    """Load a complete model and its tokenizer into this process. It needs no process group, and no other rank if there is one.

    Args:
        path: Checkpoint, run folder (its newest checkpoint is loaded; with "@best" at the end of the path, its best one), or
            model folder in Hugging Face's format; or the URL of one in an object store. A checkpoint that contains only an
            adapter is merged with its base model.
        base: Folder of the base model, if the checkpoint contains only an adapter and the base has moved since the training.
        averaged: Whether to load the averaged weights of the run ([optimizer] ema_decay) instead of its last ones.
        dtype: Type of the parameters.
        device: Device of the parameters.
        max_seq_len: Length of the sequences, on which LongRoPE depends. 0: the sequence length used in training.

    Returns:
        The model and the tokenizer. model(tokens) returns logits (batch, seq, vocab) for tokens (batch, seq). It raises
        ValueError for other tokens.

    Raises:
        ConfigError: The folder is damaged or contains no model, or an argument cannot be used.
    """
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError("", f"dtype {dtype!r}: must be a floating-point dtype, such as torch.bfloat16")
    if not isinstance(path, str | Path) or not str(path):
        raise ConfigError("", f"path {path!r}: must be the path of a checkpoint, a run folder or a model folder")
    if problem := readable_error(str(path)):
        raise ConfigError("", f"path {path}: {problem}")
    path = local_path_of(str(path))
    if max_seq_len < 0:
        raise ConfigError(
            "", f"max_seq_len {max_seq_len}: must be at least 1, or 0 for the sequence length of training"
        )
    chosen = existing_device(device)
    checkpoint = resolve_checkpoint(Path(path))
    if BEST in (why := why_chosen(Path(path), checkpoint)):  # another one is better
        print_error(f"{checkpoint}: {why}")
    weights = open_weights(checkpoint, None if base is None else Path(base), True, averaged)
    tokenizer = load_model_tokenizer(weights)
    sizes = weights.sizes.without_prediction().for_seq_len(max_seq_len or weights.model.seq_len)
    model = build_model(weights, sizes, dtype, chosen)
    model.register_forward_pre_hook(partial(_require_tokens, sizes.vocab_size))
    return model, tokenizer


def _require_tokens(vocab_size: int, model: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Raise ValueError if the argument of model(tokens) is not what the model reads."""
    tokens = arguments[0] if arguments else None
    if not isinstance(tokens, Tensor):
        raise ValueError(f"tokens must be a tensor of the shape (batch, seq), not {type(tokens).__name__}")
    if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
        given = f"{tuple(tokens.shape)} and the dtype {tokens.dtype}"
        raise ValueError(f"tokens must have the shape (batch, seq) and an integer dtype, not the shape {given}")
    # On a GPU the check would wait for the device.
    if tokens.is_cpu and tokens.numel() and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(f"tokens must be from 0 to {vocab_size - 1}, not {tokens.min()} to {tokens.max()}")


def build_model(
    weights: Weights,
    sizes: Any,
    dtype: torch.dtype,
    device: torch.device,
    shard: Callable[[nn.Module], None] = lambda model: None,
) -> nn.Module:
    """Return a model with its weights, in evaluation mode.

    Args:
        weights: Source of its parameters.
        sizes: Dimensions of the model.
        dtype: Type of the parameters.
        device: Device of the parameters.
        shard: Called with the model on the meta device, before its weights are allocated.
    """
    with torch.device("meta"):
        model = weights.spec.model(sizes).to(dtype)
    shard(model)
    allocate(model, device)
    weights.load_into(saved_weights(model))
    return model.eval()
