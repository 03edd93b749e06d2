"""The exports of a finished run."""

from collections.abc import Callable
from functools import partial
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
from trainer.checkpoint.formats.gguf_writer import GgufExport, is_gguf_of
from trainer.checkpoint.formats.huggingface_writer import write_huggingface
from trainer.checkpoint.formats.peft_writer import write_peft
from trainer.checkpoint.formats.weights import checkpoint_origin
from trainer.checkpoint.manifest import CorruptError

_IsWritten = Callable[[Path, Path, bool], bool]
"""Function (export, checkpoint, averaged) -> whether the export is that of this checkpoint."""
_Write = Callable[[Path, bool, Path], None]
"""Function (checkpoint, averaged, out) that writes an export."""


def is_export_of(folder: Path, checkpoint: Path, averaged: bool) -> bool:
    """Return whether the folder contains an export of this checkpoint. averaged: of its averaged weights."""
    try:
        with safe_open(min(folder.glob("*model*.safetensors")), framework="pt") as tensors:
            return tensors.metadata() == checkpoint_origin(checkpoint, averaged)
    except (SafetensorError, OSError, ValueError):
        return False


def export_run(run_folder: Path, config: CheckpointConfig, skip_existing: bool = False) -> None:
    """Export a checkpoint of a finished run, on rank 0: in bf16 to RUN_FOLDER/huggingface, and to RUN_FOLDER/model-TYPE.gguf.

    Args:
        run_folder: Folder of the run.
        config: Which exports to write, and of which weights.
        skip_existing: Whether to keep an existing export of the same checkpoint.

    Raises:
        ConfigError: An export cannot be written, or there is no such checkpoint.
    """
    if dist.get_rank() != 0 or not (config.export_huggingface or config.export_gguf != "none"):
        return
    averaged = config.export_averaged
    chosen, why = _chosen_checkpoint(run_folder / CHECKPOINTS, config)

    def export(setting: str, out: Path, is_written: _IsWritten, write: _Write) -> None:
        if skip_existing and is_written(out, chosen, averaged):
            return
        try:
            write(chosen, averaged, out)
        except (OSError, CorruptError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            message = f"{out} could not be written ({reason}); rerun the same command to retry"
            raise ConfigError(f"checkpoint.{setting}", message) from None
        suffix = " (averaged weights)" if averaged else ""
        console.info(f"exported {chosen.name}{suffix} to {out}{why}")

    if config.export_huggingface:
        export("export_huggingface", run_folder / "huggingface", is_export_of, _write_folder)
    if config.export_gguf != "none":
        write = partial(_write_gguf, config.export_gguf, run_folder.name)
        export("export_gguf", run_folder / f"model-{config.export_gguf}.gguf", is_gguf_of, write)


def _chosen_checkpoint(checkpoints: Path, config: CheckpointConfig) -> tuple[Path, str]:
    """Return the checkpoint to export, and why it is this one. Raises ConfigError if it does not exist."""
    with errors_about("checkpoint.export_checkpoint"):
        last, best = latest_per_step(checkpoints)[0], best_step(checkpoints)
        is_best = config.export_checkpoint == "best" or (config.export_checkpoint == "auto" and best > 0)
        chosen = best_checkpoint(checkpoints) if is_best else last
    if best in (0, step_of(last)):
        return chosen, ""
    other = f"; the last is step {step_of(last)}" if is_best else f"; the best is step {best}"
    what = f", the {'best' if is_best else 'last'} checkpoint{other}"
    return chosen, f"{what} (checkpoint.export_checkpoint = {config.export_checkpoint})"


def _write_folder(checkpoint: Path, averaged: bool, out: Path) -> None:
    if is_adapter(checkpoint):
        write_peft(Adapter.open(checkpoint, alone=True, averaged=averaged), out)
    else:
        write_huggingface(open_weights(checkpoint, alone=True, averaged=averaged), out, torch.bfloat16)


def _write_gguf(type: str, name: str, checkpoint: Path, averaged: bool, out: Path) -> None:
    GgufExport.of(open_weights(checkpoint, alone=True, averaged=averaged), type).write(out, name)
