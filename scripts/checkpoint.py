"""Look at checkpoints.

    python scripts/checkpoint.py list outputs/debug                                  # the steps of a run, newest first
    python scripts/checkpoint.py verify outputs/debug                                # every file of every step, by content
    python scripts/checkpoint.py inspect outputs/debug/checkpoints/step-00000300     # what one holds, tensor by tensor

Only verify compares content; list and inspect look at names and sizes.

PATH is a run folder, its checkpoints/, or one checkpoint. Exit code 1 where something is damaged.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tqdm import tqdm

from trainer.checkpoint import manifest
from trainer.checkpoint.commit import parse_step
from trainer.checkpoint.manifest import CorruptError
from trainer.checkpoint.resume import LARGEST_STATE, check_train_state, list_checkpoints
from trainer.checkpoint.storage import read_index
from trainer.config import ConfigError
from trainer.config.command_line import Arguments, die, run_to_end
from trainer.system.files import folder_error


def found_at(path: Path) -> list[Path]:
    """Raises ConfigError."""
    if parse_step(path.name) is not None or os.path.exists(path / manifest.NAME):
        return [path]
    return list_checkpoints(path / "checkpoints") or list_checkpoints(path)


def size_and_time(checkpoint: Path) -> str:
    files = [path.stat() for path in checkpoint.iterdir()]
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(max((file.st_mtime for file in files), default=0)))
    return f"{sum(file.st_size for file in files) / 2**20:>12,.1f} MiB  {written}"


def listed(checkpoints: list[Path]) -> Iterator[bool]:
    for checkpoint in checkpoints:
        what, problem, told = "", "", []
        try:
            what = size_and_time(checkpoint)
            about = manifest.read(checkpoint).metadata
            numbers = (("tokens_seen", "token"), ("world_size", "rank"))
            told = [f"{about[key]:,} {word}{'s' * (about[key] != 1)}" for key, word in numbers if key in about]
        except CorruptError as damage:
            problem = str(damage)
        except OSError as error:  # it may have been removed a moment ago, too
            problem = f"cannot be read ({error.strerror})"
        print(f"{checkpoint.name}  {what}  {problem or ', '.join(told)}")
        yield not problem


def verified(checkpoints: list[Path]) -> Iterator[bool]:
    for checkpoint in tqdm(checkpoints, unit="checkpoint", disable=None):
        problem = manifest.find_damage(checkpoint)
        if not problem and parse_step(checkpoint.name) is not None and (checkpoint / "train_state.json").exists():
            problem = check_train_state(checkpoint)
        tqdm.write(f"{checkpoint}: {problem or 'every file is as it was written'}")
        yield not problem


def content_of(checkpoint: Path) -> Iterator[str]:
    """Lines for people. Raises CorruptError."""
    for key, value in manifest.read(checkpoint).metadata.items():
        yield f"{key}: {value}"
    for name in ("model.json", "train_state.json"):
        if (checkpoint / name).exists():
            try:
                yield f"{name}: {json.dumps(json.loads(manifest.read_text(checkpoint / name, LARGEST_STATE)))}"
            except (ValueError, RecursionError):
                raise CorruptError(f"{name} is no JSON") from None
    for name, stored in read_index(checkpoint).items():
        shape = " x ".join(map(str, stored.shape)) or "one number"
        files = len({chunk.file for chunk in stored.chunks})
        yield f"{name}  {str(stored.dtype).removeprefix('torch.')}  {shape}  in {files} file{'s' * (files > 1)}"


def inspected(checkpoints: list[Path]) -> Iterator[bool]:
    for checkpoint in checkpoints:
        try:
            for line in content_of(checkpoint):
                print(line)
            yield True
        except CorruptError as damage:
            print(f"{checkpoint}: {damage}")
            yield False


KINDS = {"list": listed, "verify": verified, "inspect": inspected}


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "| head" ends it
    parser = Arguments(__doc__)
    parser.add_argument("what", choices=list(KINDS))
    parser.add_argument("path", type=Path)
    chosen = parser.parse_args()
    if problem := folder_error(chosen.path):
        die(f"{chosen.path}: {problem}")
    try:
        checkpoints = found_at(chosen.path)
        if not checkpoints:
            die(f"{chosen.path}: no checkpoint in it")
        good = list(KINDS[chosen.what](checkpoints))
    except ConfigError as error:
        die(error.message)
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    run_to_end(main)
