"""List, verify and inspect checkpoints, on the disk and in an object store.

    python scripts/checkpoint.py list outputs/debug
    python scripts/checkpoint.py inspect outputs/debug/checkpoints/step-00000300
    python scripts/checkpoint.py verify outputs/debug@best
    python scripts/checkpoint.py list s3://bucket/my-run            # what [checkpoint] mirror has uploaded
    python scripts/checkpoint.py fetch s3://bucket/my-run outputs/my-run
    python scripts/checkpoint.py prune s3://bucket/my-run           # remove what is no part of the run's history

The exit code is 1 if a checkpoint is damaged. Only `verify` reads whole files; `list` and `inspect` check names and sizes.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

from trainer.base.config.argument_types import local_path, positive_int
from trainer.base.config.arguments import Arguments
from trainer.base.config.errors import ConfigError
from trainer.base.config.exits import answer_early, run_to_end


def arguments() -> Arguments:
    parser = Arguments(__doc__)
    command_help = (
        "list: print the steps, newest first; verify: check all files; inspect: print metadata and tensors; fetch: download the "
        "newest checkpoint; prune: remove discarded and unfinished ones"
    )
    parser.add_argument("command", choices=["list", "verify", "inspect", "fetch", "prune"], help=command_help)
    path_help = "run folder, its checkpoints/ folder, one checkpoint, or RUN@best; URL of a mirror, except for inspect"
    parser.add_argument("path", type=str, help=path_help)
    parser.add_argument("out", type=Path, nargs="?", help="run folder into which fetch downloads")
    parser.add_argument("--step", type=positive_int, metavar="N", help="step to fetch (default: the newest)")
    return parser


if __name__ == "__main__":
    answer_early(arguments())  # before torch is imported

from tqdm import tqdm

from trainer.base.config.checkpoints import best_checkpoint, best_step, list_checkpoints
from trainer.base.config.recognition import is_checkpoint
from trainer.base.system import console, remote_run
from trainer.base.system.files import folder_error
from trainer.base.system.object_store import ObjectStore, is_url
from trainer.base.system.paths import BEST, split_best
from trainer.base.system.remote_run import Lineage
from trainer.base.system.run_files import CHECKPOINTS, CONFIG_FILE, STATE_FILE, parse_step
from trainer.base.system.spelling import counted
from trainer.base.system.store_errors import StoreError
from trainer.checkpoint import manifest
from trainer.checkpoint.lease import Lease, LeaseLost
from trainer.checkpoint.manifest import CorruptError
from trainer.checkpoint.resume import LARGEST_STATE, check_train_state
from trainer.checkpoint.tensor_files import read_index


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint at `path`, or all checkpoints of the run at `path`. Raises ConfigError for an unreadable folder."""
    run_folder, is_best = split_best(path)
    if is_best:
        return [best_checkpoint(run_folder / CHECKPOINTS)]
    if parse_step(path.name) is not None or is_checkpoint(path):
        return [path]
    return list_checkpoints(path / CHECKPOINTS) or list_checkpoints(path)


def size_and_time(checkpoint: Path) -> str:
    files = [path.stat() for path in checkpoint.iterdir()]
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(max((file.st_mtime for file in files), default=0)))
    return f"{sum(file.st_size for file in files) / 2**20:>12,.1f} MiB  {written}"


def print_list(checkpoints: list[Path]) -> Iterator[bool]:
    """Print a line for each checkpoint and yield whether it is intact."""
    best = best_step(checkpoints[0].parent)
    for checkpoint in checkpoints:
        size, problem, counts = "", "", []
        try:
            size = size_and_time(checkpoint)
            metadata = manifest.read(checkpoint).metadata
            units = (("tokens_seen", "token"), ("world_size", "rank"))
            counts = [counted(metadata[key], unit, ",") for key, unit in units if key in metadata]
            counts += ["best"] if parse_step(checkpoint.name) == best else []
        except CorruptError as damage:
            problem = str(damage)
        except OSError as error:  # the checkpoint may have been removed meanwhile
            problem = f"cannot be read ({error.strerror})"
        print(f"{checkpoint.name}  {size}  {problem or ', '.join(counts)}")
        yield not problem


def verify(checkpoints: list[Path]) -> Iterator[bool]:
    with console.progress(len(checkpoints), " checkpoints", "verifying") as bar:
        for checkpoint in checkpoints:
            problem = manifest.find_damage(checkpoint)
            if not problem and parse_step(checkpoint.name) is not None and (checkpoint / STATE_FILE).exists():
                problem = check_train_state(checkpoint)
            tqdm.write(f"{checkpoint}: {problem or 'intact'}")  # above the bar
            bar.update(1)
            yield not problem


def describe(checkpoint: Path) -> Iterator[str]:
    """Yield the lines that describe the metadata and tensors of a checkpoint. Raises CorruptError if it is damaged."""
    for key, value in manifest.read(checkpoint).metadata.items():
        yield f"{key}: {value}"
    for name in ("model.json", "train_state.json"):
        if (checkpoint / name).exists():
            try:
                yield f"{name}: {json.dumps(json.loads(manifest.read_text(checkpoint / name, LARGEST_STATE)))}"
            except (ValueError, RecursionError):
                raise CorruptError(f"{name} is not JSON") from None
    for name, stored in read_index(checkpoint).items():
        shape = " x ".join(map(str, stored.shape)) or "scalar"
        num_files = len({chunk.file for chunk in stored.chunks})
        yield f"{name}  {str(stored.dtype).removeprefix('torch.')}  {shape}  in {counted(num_files, 'file')}"


def inspect(checkpoints: list[Path]) -> Iterator[bool]:
    for checkpoint in checkpoints:
        try:
            for line in describe(checkpoint):
                print(line)
            yield True
        except CorruptError as damage:
            print(f"{checkpoint}: {damage}")
            yield False


# ---------------------------------------------------------------- mirrors


def print_mirror(store: ObjectStore, lineage: Lineage, args: argparse.Namespace) -> Iterator[bool]:
    for name in reversed(lineage.saves):
        save = remote_run.read_save(store, name)
        size = f"{save.num_bytes / 2**20:>12,.1f} MiB" if save else "unfinished"
        print(f"{name}  {size}{'  best' if lineage.best_step == remote_run.step_of_name(name) else ''}")
        yield True


def verify_mirror(store: ObjectStore, lineage: Lineage, args: argparse.Namespace) -> Iterator[bool]:
    for name in reversed(lineage.saves):
        if (save := remote_run.read_save(store, name)) is not None:
            problem = remote_run.find_damage(store, save)
            print(f"{name}: {problem or 'intact'}", flush=True)
            yield not problem


def fetch(store: ObjectStore, lineage: Lineage, args: argparse.Namespace) -> Iterator[bool]:
    if args.out is None:
        raise ConfigError("", "fetch needs the run folder to download into")
    if (save := lineage.find(store, args.step)) is None:
        which = "complete checkpoint" if args.step is None else f"complete checkpoint of step {args.step}"
        raise ConfigError("", f"{args.path} has no {which}")
    print(remote_run.fetch(store, save, args.out / CHECKPOINTS))
    if not (args.out / CONFIG_FILE).exists():
        remote_run.fetch_run_files(store, save, args.out)
    yield True


def prune(store: ObjectStore, lineage: Lineage, args: argparse.Namespace) -> Iterator[bool]:
    lease = Lease.acquire(store, timeout_s=60.0, is_conditional=True, own_before="")
    try:
        unused = remote_run.unused_objects(store, Lineage.read(store))  # a run may have just ended
        for item in unused:
            lease.renew()
            store.delete([item.key])
    finally:
        lease.release()
    print(f"removed {counted(len(unused), 'object')} ({sum(item.size for item in unused) / 2**20:,.1f} MiB)")
    yield True


ON_DISK = {"list": print_list, "verify": verify, "inspect": inspect}
ON_MIRROR = {"list": print_mirror, "verify": verify_mirror, "fetch": fetch, "prune": prune}
"""Command -> function that yields whether each checkpoint is intact."""


def of_mirror(args: argparse.Namespace) -> list[bool]:
    """Run a command on a mirror. Raises ConfigError."""
    if args.command not in ON_MIRROR:
        raise ConfigError("", f"{args.command} reads a local checkpoint; fetch it first")
    if args.path.endswith(BEST):
        raise ConfigError(
            "", f"{args.path}: name the run without {BEST}; `list` shows the best step, `fetch` takes --step"
        )
    try:
        store = ObjectStore(args.path)
        lineage = Lineage.read(store)
        if not lineage.version:
            raise ConfigError("", f"{args.path}: no run is mirrored there")
        return list(ON_MIRROR[args.command](store, lineage, args))
    except (StoreError, CorruptError, LeaseLost) as error:
        raise ConfigError("", str(error)) from None


def of_folder(args: argparse.Namespace) -> list[bool]:
    """Run a command on a run folder or a checkpoint. Raises ConfigError."""
    if args.command not in ON_DISK:
        raise ConfigError("", f"{args.command} needs the URL of a mirror, such as s3://bucket/my-run")
    path = local_path(args.path)
    if problem := folder_error(split_best(path)[0]):
        raise ConfigError("", f"{path}: {problem}")
    checkpoints = find_checkpoints(path)
    if not checkpoints:
        raise ConfigError("", f"{path}: contains no checkpoint")
    return list(ON_DISK[args.command](checkpoints))


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "| head" ends the process
    args = arguments().parse_args()
    intact = of_mirror(args) if is_url(args.path) else of_folder(args)
    sys.exit(0 if all(intact) else 1)


if __name__ == "__main__":
    run_to_end(main)
