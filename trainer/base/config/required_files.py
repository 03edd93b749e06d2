"""Files and packages that must exist before a run starts."""

import glob
import os
from collections.abc import Collection

from trainer.base.config.errors import ConfigError
from trainer.base.config.hub import is_dataset_name
from trainer.base.config.packages import require_installed
from trainer.base.config.schema.config import Config
from trainer.base.config.schema.data import CHAT_DATASETS
from trainer.base.config.schema.tasks import PYTHON_IDIOMS
from trainer.base.system.files import folder_error
from trainer.base.system.paths import exists, split_best
from trainer.base.system.spelling import similar_path

DATA_SECTIONS = ("data", "evaluation", "tokenizer")
"""Sections whose files the preparation of data needs."""
FILE_SECTIONS = (*DATA_SECTIONS, "checkpoint", "lora", "metrics")
"""Sections with files, or packages, that must exist before a run starts."""


def require_files(config: Config, sections: Collection[str]) -> None:
    """Raise ConfigError if a file or package of one of these sections does not exist."""
    for section, key in (("checkpoint", "checkpoint.init_from"), ("lora", "lora.init_from")):
        if section in sections and config.value(key) and (message := folder_error(split_best(config.value(key))[0])):
            raise ConfigError(key, message)
    tokenizer = config.tokenizer
    is_folder = tokenizer.backend == "huggingface" and os.path.isdir(tokenizer.path)
    if "tokenizer" in sections and tokenizer.path and not os.path.isfile(tokenizer.path) and not is_folder:
        raise ConfigError("tokenizer.path", f"no such file{similar_path(tokenizer.path)}")
    for sink in config.metrics.sinks if "metrics" in sections else ():
        if sink in ("wandb", "mlflow", "trackio"):  # packages of these names
            require_installed(sink, "metrics.sinks")
    for name, task in config.evaluation.tasks.items() if "evaluation" in sections else ():
        if task.path != PYTHON_IDIOMS and not os.path.isfile(task.path):
            problem = (
                "is a folder, not a file" if os.path.isdir(task.path) else f"no such file{similar_path(task.path)}"
            )
            raise ConfigError(f"evaluation.tasks.{name}.path", problem)
    for key, type_, path in config.datasets():
        by_name = type_ == "huggingface" or (type_ in CHAT_DATASETS and is_dataset_name(path))
        if path and key.partition(".")[0] in sections and not by_name and not exists(path):
            message = "no file matches the pattern" if glob.has_magic(path) else "no such file or folder"
            raise ConfigError(key, f"{message}{similar_path(path)}")
