"""The export of a finished run."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from trainer.base.config import CheckpointConfig, ConfigError, errors_about
from trainer.base.config.checkpoints import best_checkpoint, best_step
from trainer.base.config.recognition import is_adapter
from trainer.base.system import console
from trainer.base.system.run_files import CHECKPOINTS, latest_per_step, step_of
from trainer.checkpoint.formats.adapter import Adapter
from trainer.checkpoint.formats.folders import open_weights
from trainer.checkpoint.formats.huggingface_writer import write_huggingface
from trainer.checkpoint.formats.peft_writer import write_peft
from trainer.checkpoint.formats.weights import checkpoint_origin
from trainer.checkpoint.manifest import CorruptError


def is_export_of(folder: Path, checkpoint: Path, averaged: bool) -> bool:
    """Return whether the folder contains an export of this checkpoint. averaged: of its averaged weights."""
    try:
        with safe_open(min(folder.glob("*model*.safetensors")), framework="pt") as tensors:
            return tensors.metadata() == checkpoint_origin(checkpoint, averaged)
    except (SafetensorError, OSError, ValueError):
        return False


def export_run(run_folder: Path, config: CheckpointConfig, skip_existing: bool = False) -> None:
    """Export a checkpoint of a finished run in bf16 to RUN_FOLDER/huggingface, on rank 0.

    Args:
        run_folder: Folder of the run.
        config: Which weights to export.
        skip_existing: Whether to keep an existing export of the same checkpoint.

    Raises:
        ConfigError: The folder cannot be written, or there is no such checkpoint.
    """
    if dist.get_rank() != 0:
        return
    out, averaged = run_folder / "huggingface", config.export_averaged
    try:
        checkpoints = run_folder / CHECKPOINTS
        with errors_about("checkpoint.export_checkpoint"):
            last, best = latest_per_step(checkpoints)[0], best_step(checkpoints)
            is_best = config.export_checkpoint == "best" or (config.export_checkpoint == "auto" and best > 0)
            chosen = best_checkpoint(checkpoints) if is_best else last
        if skip_existing and is_export_of(out, chosen, averaged):
            return
        if is_adapter(chosen):
            write_peft(Adapter.open(chosen, alone=True, averaged=averaged), out)
        else:
            write_huggingface(open_weights(chosen, alone=True, averaged=averaged), out, torch.bfloat16)
    except (OSError, CorruptError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"{out} could not be written ({reason}); rerun the same command to retry"
        raise ConfigError("checkpoint.export_huggingface", message) from None
    suffix = " (averaged weights)" if averaged else ""
    why = ""
    if best not in (0, step_of(last)):
        why = f"; the last is step {step_of(last)}" if is_best else f"; the best is step {best}"
        why = f", the {'best' if is_best else 'last'} checkpoint{why} (checkpoint.export_checkpoint = {config.export_checkpoint})"
    console.info(f"exported {chosen.name}{suffix} to {out}{why}")
