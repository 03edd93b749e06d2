"""The adapter that a run continues with."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from models.spec import ModelSpec
from trainer.adapters.select import SCALE_SETTINGS
from trainer.base.config import ConfigError, LoraConfig
from trainer.base.config.model_source import resolve_checkpoint
from trainer.base.config.toml_text import toml_value
from trainer.base.system import console
from trainer.base.system.files import digest_of
from trainer.base.system.model_folder import adapter_problem
from trainer.base.system.paths import split_best
from trainer.checkpoint import manifest
from trainer.checkpoint.commit import Tensors, load_into
from trainer.checkpoint.formats.adapter import AdapterCheckpoint, is_adapter
from trainer.checkpoint.formats.peft import PEFT_CONFIG, PEFT_TENSORS, PeftNames, load_peft, peft_settings
from trainer.checkpoint.manifest import CorruptError
from trainer.runtime.distributed import run_on_rank_0


def load_adapter(
    config: LoraConfig, spec: ModelSpec, sizes: Any, parameters: Tensors, trained: Tensors, base_digest: str
) -> str:
    """Load this rank's trained parameters from lora.init_from, collectively, and return a hash of the source.

    Args:
        parameters: Those of this rank.
        trained: The complete model's trained parameters.
        base_digest: Hash of the base model's weights.

    Raises:
        ConfigError: The source is damaged, or contains another adapter.
    """
    own = {name: p for name, p in parameters.items() if name in trained}
    other_base = ""
    folder = Path(config.init_from)
    try:
        run_folder, is_best = split_best(folder)
        is_own = is_best or (folder / manifest.NAME).exists() or (run_folder / "checkpoints").exists()
        if not is_own and (problem := adapter_problem(folder)):
            raise ConfigError("", f"{folder} {problem}")
        if (folder / PEFT_CONFIG).exists():
            _require_settings(config, peft_settings(folder), folder)
            load_peft(folder, PeftNames(spec, sizes), own, trained)
            source = folder / PEFT_TENSORS
        else:
            folder = run_on_rank_0(partial(resolve_checkpoint, folder))
            if not is_adapter(folder):
                raise ConfigError("", f"{folder} contains neither {PEFT_CONFIG} nor a checkpoint of an adapter")
            adapter = AdapterCheckpoint.open(folder)
            if adapter.base_digest != base_digest:
                raise ConfigError("", f"{folder} was trained with another base model, {adapter.base}")
            _require_settings(config, {name: getattr(adapter.config, name) for name in SCALE_SETTINGS}, folder)
            wanted = {f"model/{name}": p for name, p in own.items()}
            unknown = [
                f"{key} is not trained by this run" for key in adapter.index if key[len("model/") :] not in trained
            ]
            load_into(folder, adapter.index, wanted, cast=True, problems=unknown)
            source = folder / manifest.NAME
            if adapter.config.base_dtype != config.base_dtype:
                other_base = (
                    f", which was trained with [lora] base_dtype = {adapter.config.base_dtype}, not {config.base_dtype}"
                )
    except CorruptError as damage:
        raise ConfigError("lora.init_from", f"{folder}: {damage}") from None
    except ConfigError as error:
        raise error if error.key else ConfigError("lora.init_from", error.message) from None
    console.info(f"loaded the adapter {folder}{other_base}")
    return run_on_rank_0(partial(digest_of, source))


def _require_settings(config: LoraConfig, saved: Mapping[str, Any], folder: Path) -> None:
    for name, value in saved.items():
        if getattr(config, name) != value:
            raise ConfigError(f"lora.{name}", f"must be {toml_value(value)}, as in the adapter {folder}")
