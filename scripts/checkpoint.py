"""Look at checkpoints.

    python scripts/checkpoint.py list outputs/debug                                  # the steps of a run, newest first
    python scripts/checkpoint.py verify outputs/debug                                # every file of every step, by content
    python scripts/checkpoint.py inspect outputs/debug/checkpoints/step-00000300     # what one holds, tensor by tensor

PATH is a run folder, its checkpoints/, or one checkpoint. Exit code 1 where something is damaged.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tqdm import tqdm

from scripts.arguments import Arguments
from trainer import manifest
from trainer.checkpoint import of_step, steps_in
from trainer.lineage import state_problem
from trainer.load_config import exit_with
from trainer.manifest import Damaged
from trainer.shards import read_index


def found_at(path: Path) -> list[Path]:
    if (path / manifest.NAME).exists() or of_step(path.name) is not None:
        return [path]
    try:
        return steps_in(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    except OSError as error:
        exit_with(f"{error.filename}: cannot be read ({error.strerror})")


def structure_problem(checkpoint: Path) -> str:
    try:
        manifest.read(checkpoint)
    except Damaged as damage:
        return str(damage)
    return ""


def size_of(checkpoint: Path) -> str:
    return f"{sum(p.stat().st_size for p in checkpoint.iterdir()) / 2**20:,.1f} MiB"


def listed(checkpoints: list[Path]) -> Iterator[bool]:
    for checkpoint in checkpoints:
        try:
            problem, size = structure_problem(checkpoint), size_of(checkpoint)
        except OSError as error:  # it may have been removed a moment ago, too
            problem, size = f"cannot be read ({error.strerror})", "?"
        about = "" if problem else "  ".join(f"{k} {v}" for k, v in manifest.read(checkpoint).about.items())
        print(f"{checkpoint.name}  {size:>14}  {problem or about}")
        yield not problem


def verified(checkpoints: list[Path]) -> Iterator[bool]:
    for checkpoint in tqdm(checkpoints, unit="checkpoint", disable=None):
        problem = manifest.problem(checkpoint)
        if not problem and of_step(checkpoint.name) is not None and (checkpoint / "train_state.json").exists():
            problem = state_problem(checkpoint)
        tqdm.write(f"{checkpoint}: {problem or 'every file is as it was written'}")
        yield not problem


def inspected(checkpoints: list[Path]) -> Iterator[bool]:
    for checkpoint in checkpoints:
        problem = structure_problem(checkpoint)
        if problem:
            print(f"{checkpoint}: {problem}")
            yield False
            continue
        for key, value in manifest.read(checkpoint).about.items():
            print(f"{key}: {value}")
        for name in ("model.json", "train_state.json"):
            if (checkpoint / name).exists():
                print(f"{name}: {json.dumps(json.loads((checkpoint / name).read_text()))}")
        for name, stored in read_index(checkpoint).items():
            shape = " x ".join(map(str, stored.shape)) or "one number"
            files = len({part.file for part in stored.parts})
            print(f"{name}  {str(stored.dtype).removeprefix('torch.')}  {shape}  in {files} file{'s' * (files > 1)}")
        yield True


KINDS = {"list": listed, "verify": verified, "inspect": inspected}


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("what", choices=list(KINDS))
    parser.add_argument("path", type=Path)
    chosen = parser.parse_args()
    if not chosen.path.is_dir():
        exit_with(f"{chosen.path}: no such folder")
    checkpoints = found_at(chosen.path)
    if not checkpoints:
        exit_with(f"{chosen.path}: no checkpoint in it")
    try:
        good = list(KINDS[chosen.what](checkpoints))
    except Damaged as damage:
        exit_with(str(damage))
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
