"""The checkpoints of a run: which there are, which is the best, and which one a path means."""

from pathlib import Path

from trainer.base.config.errors import ConfigError
from trainer.base.system import remote_run
from trainer.base.system.files import folder_error, read_json_object
from trainer.base.system.object_store import ObjectStore
from trainer.base.system.paths import BEST, split_best
from trainer.base.system.remote_run import Lineage
from trainer.base.system.run_files import CHECKPOINTS, MIRROR_FILE, STATE_FILE, latest_per_step, step_of
from trainer.base.system.store_errors import StoreError


def list_checkpoints(folder: Path) -> list[Path]:
    """Return one checkpoint per step, newest first. Raises ConfigError if the folder cannot be read. An unreadable
    folder is not treated as empty, because it may contain checkpoints."""
    try:
        return latest_per_step(folder)
    except OSError as error:
        raise ConfigError("", f"{folder} cannot be read ({error.strerror})") from None


def best_step(folder: Path) -> int:
    """Return the step of the best checkpoint according to the newest checkpoint that can be read, or 0 if there is none."""
    for path in list_checkpoints(folder):
        try:
            best = read_json_object(path / STATE_FILE)["best"]
        except (OSError, ValueError, KeyError):
            continue
        return best[1] if isinstance(best, list) and len(best) > 1 and type(best[1]) is int else 0
    return 0


def best_checkpoint(folder: Path) -> Path:
    """Return the best checkpoint, which is fetched if only the mirror of the run has it. Raises ConfigError if there is none."""
    checkpoints = {step_of(path): path for path in list_checkpoints(folder)}
    if not checkpoints:
        raise ConfigError("", f"{folder} contains no checkpoint")
    step = best_step(folder)
    if not step:
        message = "has no best checkpoint: the run had no [evaluation] keep_best_on, or no evaluation yet"
        raise ConfigError("", f"{folder} {message}")
    if step not in checkpoints and (fetched := _fetch_mirrored(folder, step)):
        return fetched
    if step not in checkpoints:
        raise ConfigError("", f"{folder}: the best checkpoint, step {step}, does not exist anymore")
    return checkpoints[step]


def _fetch_mirrored(folder: Path, step: int) -> Path | None:
    """Fetch the checkpoint of a step from the mirror of the run, or return None if there is none. Raises ConfigError."""
    try:
        url = str(read_json_object(folder / MIRROR_FILE)["url"])
    except (OSError, ValueError, KeyError):
        return None
    try:
        store = ObjectStore(url)
        save = Lineage.read(store).find(store, step)
        return save and remote_run.fetch(store, save, folder)
    except StoreError as error:
        raise ConfigError("", str(error)) from None


def resolve_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint if `folder` is a run folder, its best one if the path ends in @best, otherwise `folder`.
    Raises ConfigError if it is not a folder, or if the run has no best checkpoint."""
    folder, is_best = split_best(folder)
    if problem := folder_error(folder):
        raise ConfigError("", f"{folder}: {problem}")
    if is_best:
        return best_checkpoint(folder / CHECKPOINTS)
    steps = list_checkpoints(folder / CHECKPOINTS)
    return steps[0] if steps else folder


def why_chosen(source: Path, chosen: Path) -> str:
    """Return why `resolve_checkpoint(source)` is `chosen`, and which other checkpoint a user may expect, or "" if the source is
    this folder."""
    run, is_best = split_best(source)
    if chosen in (source, run) or not (checkpoints := list_checkpoints(run / CHECKPOINTS)):
        return ""
    if is_best:
        return f"the best checkpoint by its evaluations; the newest is step {step_of(checkpoints[0])}"
    best = best_step(run / CHECKPOINTS)
    better = f"; the best by its evaluations is {run}{BEST}, of step {best}" if best not in (0, step_of(chosen)) else ""
    return f"the newest checkpoint{better}"
