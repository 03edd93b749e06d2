"""A run as its folder describes it: records, configuration, environment, and the command that repeats it."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from trainer.base.config import ConfigError
from trainer.base.config.checkpoints import best_checkpoint
from trainer.base.config.fields import settings
from trainer.base.config.recognition import is_checkpoint
from trainer.base.config.render import setting_texts
from trainer.base.config.toml_text import toml_value
from trainer.base.system.files import describe, file_error, folder_error, read_json_object, read_limited
from trainer.base.system.paths import split_best
from trainer.base.system.run_files import (
    CHECKPOINTS,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    LARGEST_CONFIG,
    METRICS_FILE,
    parse_step,
    step_of,
)
from trainer.base.system.streams import without_credentials
from trainer.base.system.urls import with_urls
from trainer.tools.report.records import Records, read_records

FILES = (METRICS_FILE, CONFIG_FILE, ENVIRONMENT_FILE)
MAX_RUNS = 32
"""Number of lines that eight colours and four dash patterns distinguish."""


@dataclass
class Run:
    folder: Path
    label: str
    """Name that no other run of the page has."""
    records: Records = field(default_factory=Records)
    settings: dict[str, str] = field(default_factory=dict)
    """Setting -> value as TOML."""
    environment: dict[str, Any] = field(default_factory=dict)
    marked: int = 0
    """Step of the checkpoint that the figures mark. 0: none."""
    problems: list[str] = field(default_factory=list)
    """Sentences about files that are missing or damaged."""

    @property
    def num_steps(self) -> str:
        """Steps after which the run ends, as text, or "" if its configuration is missing. If the user has set training.epochs,
        the config.toml of a run has the resulting steps."""
        return self.settings.get("training.steps", "")

    @property
    def world_size(self) -> int:
        size = self.environment.get("world_size")
        return size if type(size) is int and size > 0 else 1

    def commands(self) -> list[str]:
        """Return the shell commands that train this run again, under another name."""
        lines = []
        commit = self.environment.get("git_commit")
        if isinstance(commit, str) and commit:
            is_changed = self.environment.get("git_clean") is False
            note = "  # the run had uncommitted changes" if is_changed else ""
            lines.append(f"git checkout {shlex.quote(commit)}{note}")
        name = f"{self.folder.resolve().name}-again"
        words = ["./run_llama_train.sh", "--config", str(self.folder / CONFIG_FILE), "--run.name", name]
        lines.append(f"NGPU={self.world_size} {shlex.join(words)}")
        return lines

    def original_command(self) -> str:
        """Return the command line that started the run's first rank, or ""."""
        words = self.environment.get("command")
        is_list = isinstance(words, list) and all(isinstance(word, str) for word in words)
        return without_credentials(shlex.join(words)) if is_list else ""

    def changed_settings(self) -> list[tuple[str, str, str]]:
        """Return (setting, default, value) of the settings that differ from the defaults of this version."""
        defaults = default_settings()
        return [(k, defaults.get(k, "unknown"), v) for k, v in self.settings.items() if defaults.get(k) != v]


def default_settings() -> dict[str, str]:
    return {key: toml_value(setting.default) for key, setting in settings().items()}


def differing(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return (setting, its value in each run) of the settings in which the runs differ, without names of runs and folders.
    A run whose settings are unknown differs in none."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = [(key, [run.settings.get(key, "") for run in runs]) for key in keys]
    known = [i for i, run in enumerate(runs) if run.settings]
    return [
        (key, row)
        for key, row in rows
        if len({row[i] for i in known}) > 1 and key not in ("run.name", "run.output_folder")
    ]


def read_run(folder: Path, label: str, marked: int = 0) -> Run:
    """Read what the folder of a run contains. Files that are missing or damaged become `problems`. marked: see Run."""
    run = Run(folder, label, marked=marked)
    try:
        run.records = read_records(folder / METRICS_FILE)
    except OSError as error:
        run.problems.append(f"{METRICS_FILE} cannot be read ({error.strerror})")
    try:
        text = read_limited(folder / CONFIG_FILE, LARGEST_CONFIG).decode()
        run.settings = setting_texts(text, folder / CONFIG_FILE)
    except (OSError, ValueError, ConfigError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no configuration"
        run.problems.append(f"{CONFIG_FILE} cannot be read ({reason})")
    try:
        run.environment = read_json_object(folder / ENVIRONMENT_FILE)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no JSON object"
        run.problems.append(f"{ENVIRONMENT_FILE} cannot be read ({reason})")
    run.problems += _problems_of(run.records)
    return run


def _problems_of(records: Records) -> list[str]:
    ends = [event for event in records.events[-1:] if event["kind"] == "end"]
    problems = [f"it ended, but {event['problem']}" for event in ends if isinstance(event.get("problem"), str)]
    if damaged := records.damaged:
        shown = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        what = "line of {} is not a record and is" if len(damaged) == 1 else "lines of {} are not records and are"
        problems.append(f"{len(damaged)} {what.format(METRICS_FILE)} not shown: {shown}")
    if records.incomplete:
        problems.append(
            f"the last line of {METRICS_FILE} is incomplete: it is being written, or its process was killed"
        )
    if records.replaced:
        problems.append(f"records of steps that were trained again are not shown: {records.replaced}")
    if not records.train_steps:
        problems.append(f"{METRICS_FILE} contains no training record yet")
    return problems


def find_run(path: Path) -> tuple[Path, int]:
    """Return the run folder of a path: of a run, of one of its checkpoints, or RUN@best; and the step of the checkpoint, which is
    0 if the path is that of a run. Raises ConfigError if the folder does not exist, or the run has no best checkpoint."""
    folder, is_best = split_best(path)
    if problem := folder_error(folder):
        raise ConfigError("", f"{path}: {problem}")
    if is_best:
        return folder, step_of(best_checkpoint(folder / CHECKPOINTS))
    step = parse_step(folder.resolve().name)
    return (Path(os.path.normpath(folder / "../..")), step) if step and is_checkpoint(folder) else (folder, 0)


def require_run(folder: Path) -> None:
    """Raise ConfigError if a folder is not that of a run."""
    if any(os.path.lexists(folder / name) for name in (METRICS_FILE, CONFIG_FILE)):
        for name in FILES:
            if problem := file_error(folder / name):
                raise ConfigError("", f"{folder / name} {problem}")
        return
    try:
        inner = sorted(path.name for path in folder.iterdir() if (path / METRICS_FILE).is_file())
    except OSError as error:
        raise ConfigError("", describe(error)) from None
    hint = f"; runs in it: {', '.join(inner[:5])}{', ...' if len(inner) > 5 else ''}" if inner else ""
    raise ConfigError("", f"{folder} is not the folder of a run: it has no {METRICS_FILE}{hint}")


def labels(folders: Sequence[Path]) -> list[str]:
    """Return a short, distinct name for each folder: its own name, or its path if two have the same. A local copy has the name of
    its URL."""
    names = [PurePath(with_urls(str(folder.resolve()))).name for folder in folders]
    return [
        with_urls(str(folder)) if names.count(name) > 1 else name for folder, name in zip(folders, names, strict=True)
    ]


def require_runs(folders: Sequence[Path]) -> None:
    """Raise ConfigError if the folders are not those of different runs, or if there are too many."""
    if len(folders) > MAX_RUNS:
        raise ConfigError("", f"{len(folders)} runs: a page shows at most {MAX_RUNS}")
    seen: set[Path] = set()
    for folder in folders:
        require_run(folder)
        if folder.resolve() in seen:
            raise ConfigError("", f"{folder}: the same run is given twice")
        seen.add(folder.resolve())
