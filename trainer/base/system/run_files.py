"""Names of the folders and files of a run and of its checkpoints, by which they are recognized."""

import os
import re
from pathlib import Path

CHECKPOINTS = "checkpoints"
"""Name of the folder of a run's checkpoints."""
CONFIG_FILE = "config.toml"
"""Name of the file with the settings of a run, and with those of the run that saved a checkpoint."""
ENVIRONMENT_FILE = "environment.json"
"""Name of the file with what else a run depends on."""
METRICS_FILE = "metrics.jsonl"
"""Name of the file with the records of a run."""
MANIFEST = "manifest.json"
"""Name of the file that every checkpoint has. It is written last."""
MIRROR_FILE = "mirrored.json"
"""Name of the file beside the checkpoints of a mirrored run that says where the mirror is."""
MODEL_FILE = "model.json"
"""Name of the file in a checkpoint that describes the model and lists the tokenizer files."""
TASKS = "tasks"
"""Name of the folder with the results of single requests of tasks."""
STATE_FILE = "train_state.json"
"""Name of the file in a checkpoint with the step and the values that a resumed run continues."""
LARGEST_CONFIG = 2**24
"""Maximum size in bytes of the config.toml of a run or a checkpoint. A larger one is not read."""

_NAME = re.compile(r"step-(\d{8,15})(\.old)?")


def parse_step(name: str) -> int | None:
    """Return the step in the folder name of a checkpoint, or None if the name is not that of a checkpoint."""
    match = _NAME.fullmatch(name)
    return match and int(match[1])


def step_of(checkpoint: Path) -> int:
    step = parse_step(checkpoint.name)
    assert step is not None, checkpoint
    return step


def committed(folder: Path) -> list[Path]:
    """Return the folders of committed checkpoints without verifying them, newest step first. A replaced checkpoint
    (.old) follows the new checkpoint of the same step. Raises OSError if the folder exists but cannot be read."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    paths = [folder / name for name in names if parse_step(name) is not None and (folder / name).is_dir()]
    return sorted(paths, key=lambda path: (-step_of(path), path.name))


def latest_per_step(folder: Path) -> list[Path]:
    """Return the folder of one committed checkpoint per step, newest step first."""
    return list({step_of(path): path for path in reversed(committed(folder))}.values())[::-1]
