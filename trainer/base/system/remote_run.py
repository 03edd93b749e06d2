"""A run in an object store: its mirrored checkpoints. A store has the files of a run below one prefix:

PREFIX/
    lineage.json                             the mirrored checkpoints that belong to the run's history, and its epoch
    lease.json                               which process may write (trainer/checkpoint/lease.py)
    checkpoints/step-00000100-1a2b3c4d5e6f/  a checkpoint. The end of its name is a hash of its manifest: a step that is saved
                                             again after a rollback has another name
        rank-00000.safetensors ...           its files, as in the run folder
        run-7/metrics.jsonl ...              the small files of the run folder, so that curves go on; 7 is the epoch in which they
                                             were written, because a run that saves the step again has other ones
        shares/1.json                        SHA-256 of the files that another node has uploaded
        mirror.json                          size and SHA-256 of every file; written last, and only if it does not exist

Only objects that mirror.json or lineage.json names are read, each by its key: a stale listing hides nothing, and a file is
compared with its SHA-256. A checkpoint without mirror.json is unfinished.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.base.system import console
from trainer.base.system.files import file_lock, is_plain_filename, lock_holder, parse_json_object, sync, temporary_path
from trainer.base.system.object_store import Object, ObjectStore
from trainer.base.system.run_files import CHECKPOINTS, MANIFEST, parse_step
from trainer.base.system.store_errors import StoreError
from trainer.base.system.units import GIB

LINEAGE = "lineage.json"
_MIRROR = "mirror.json"
_VERSION = 1


def _damaged(message: str) -> StoreError:
    return StoreError(message, "damaged")


@dataclass(frozen=True)
class RemoteFile:
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Save:
    """A mirrored checkpoint."""

    name: str
    epoch: int
    """Number of the lease under which it was written."""
    files: Mapping[str, RemoteFile]
    run_files: Mapping[str, RemoteFile]
    """Path in the run folder -> file."""

    @property
    def step(self) -> int:
        return step_of_name(self.name)

    @property
    def local_name(self) -> str:
        """Name of the folder on a disk."""
        return self.name.rpartition("-")[0]

    def key_of_run_file(self, path: str) -> str:
        return key_of(self.name, f"run-{self.epoch}/{path}")

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files.values())


def step_of_name(name: str) -> int:
    """Return the step in the name of a mirrored checkpoint. Raises StoreError."""
    step = parse_step(name.rpartition("-")[0])
    if step is None:
        raise _damaged(f"{name!r:.100} is not the name of a mirrored checkpoint")
    return step


def name_of(checkpoint: Path) -> str:
    """Return the name in the store of a local checkpoint."""
    digest = hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
    return f"{checkpoint.name.removesuffix('.old')}-{digest[:12]}"


def key_of(name: str, file: str = _MIRROR) -> str:
    return f"{CHECKPOINTS}/{name}/{file}"


def read_save(store: ObjectStore, name: str) -> Save | None:
    """Return a mirrored checkpoint, or None if it is unfinished or removed. Raises StoreError."""
    try:
        content = _parse(store, key_of(name))
    except StoreError as error:
        if error.kind == "missing":
            return None
        raise
    try:
        files = {_plain(file): _file(given) for file, given in content["files"].items()}
        run_files = {_relative(file): _file(given) for file, given in content["run_files"].items()}
        if content["name"] != name or content["version"] != _VERSION:
            raise ValueError
        return Save(name=name, epoch=int(content["epoch"]), files=files, run_files=run_files)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _damaged(f"{store.name(key_of(name))} is not the manifest of {name}") from None


def _file(given: Mapping[str, Any]) -> RemoteFile:
    return RemoteFile(int(given["size"]), str(given["sha256"]))


def _plain(name: Any) -> str:
    """Return the name of a file. Raises StoreError if it is no plain one."""
    if not is_plain_filename(name):
        raise _damaged(f"{name!r:.100} in {_MIRROR} or {LINEAGE} is not a plain file name")
    return name


def _relative(path: str) -> str:
    """Return a path whose parts are plain names. Raises StoreError."""
    for part in path.split("/"):
        _plain(part)
    return path


def create_save(store: ObjectStore, save: Save) -> None:
    """Commit a checkpoint whose files are in the store. Raises StoreError of the kind "changed" if another writer has committed
    one of this name with other files."""
    text = json.dumps({"version": _VERSION, **asdict(save)}, indent=1).encode()
    try:
        store.write(key_of(save.name), text, "")
    except StoreError as error:
        if error.kind != "changed":
            raise
        try:
            found = read_save(store, save.name)
        except StoreError as damage:
            if damage.kind != "damaged":
                raise
            store.write(key_of(save.name), text, None)
            return
        if found is None or found.files != save.files:
            raise


def _parse(store: ObjectStore, key: str) -> dict[str, Any]:
    """Return the content of a JSON object. Raises StoreError."""
    try:
        return parse_json_object(store.read(key)[0])
    except ValueError:
        raise _damaged(f"{store.name(key)} is not JSON") from None


# ---------------------------------------------------------------- the history of a run


@dataclass(frozen=True)
class Lineage:
    """The history of a run in a store."""

    epoch: int = 0
    """Number of leases so far."""
    saves: tuple[str, ...] = ()
    """Names of the mirrored checkpoints, oldest first. Others were discarded by a rollback, or are of another writer."""
    rolled_back_to: tuple[int | str, ...] = ()
    """Values of load_step to which the run was rolled back, oldest first."""
    best_step: int = 0
    """Step of the best checkpoint, which is not removed, or 0."""
    owner: str = ""
    """Owner of the lease under which this was written."""
    version: str = field(default="", compare=False)
    """ETag of the object. "": it does not exist."""

    @classmethod
    def read(cls, store: ObjectStore) -> "Lineage":
        """Raises StoreError."""
        try:
            content, version = store.read(LINEAGE)
        except StoreError as error:
            if error.kind == "missing":
                return cls()
            raise
        try:
            found = parse_json_object(content)
            saves = tuple(str(name) for name in found["saves"])
            for name in saves:
                step_of_name(_plain(name))
            return cls(
                int(found["epoch"]),
                saves,
                tuple(found["rolled_back_to"]),
                int(found["best_step"]),
                str(found["owner"]),
                version,
            )
        except (KeyError, TypeError, ValueError):
            raise _damaged(f"{store.name(LINEAGE)} is not the history of a run") from None

    def find(self, store: ObjectStore, step: int | None) -> Save | None:
        """Return the newest complete checkpoint, of a step unless this is None, or None if there is none. Raises StoreError."""
        names = [name for name in reversed(self.saves) if step in (None, step_of_name(name))]
        return next((save for name in names if (save := read_save(store, name)) is not None), None)

    def write(self, store: ObjectStore, is_conditional: bool) -> "Lineage":
        """Write the history, if nobody else has since this one was read. Raises StoreError of the kind "changed" otherwise."""
        content = {key: value for key, value in asdict(self).items() if key != "version"}
        text = json.dumps(content, indent=1).encode()
        try:
            return replace(self, version=store.write(LINEAGE, text, self.version if is_conditional else None))
        except StoreError as error:
            found = Lineage.read(store) if error.kind == "changed" else None
            if found is None or found.owner != self.owner:
                raise
            # Only the answer to a write of this process was lost: to this one, or to the one before.
            return found if found == self else replace(self, version=found.version).write(store, is_conditional)


def fetch(store: ObjectStore, save: Save, folder: Path) -> Path:
    """Download a checkpoint into a folder of checkpoints, verify it, and commit it by a rename. Return its path. A download that
    was cut off continues.

    Args:
        store: The store.
        save: The checkpoint.
        folder: Folder of checkpoints.

    Raises:
        StoreError: A file is missing or damaged, or the store cannot be reached.
    """
    with file_lock(folder / f".fetch-{save.name}.lock"):  # several commands may ask for the best checkpoint
        final = folder / save.local_name
        return final if _is_here(save, final) else _fetch(store, save, final)


def _is_here(save: Save, checkpoint: Path) -> bool:
    return (checkpoint / MANIFEST).exists() and name_of(checkpoint) == save.name


def _fetch(store: ObjectStore, save: Save, final: Path) -> Path:
    folder = final.parent
    staging = folder / f".fetch-{save.name}"
    staging.mkdir(exist_ok=True)
    console.info(f"fetching {save.name} from {store.url} ({save.num_bytes / GIB:.2f} GiB)")
    with console.progress(save.num_bytes, "B", "fetching") as bar:
        for file, expected in save.files.items():
            key = key_of(save.name, file)
            store.download(key, staging / file, expected.size, sha256=expected.sha256, progress=bar.update)
    sync(staging)
    trash = temporary_path(final)
    if final.exists():
        final.rename(trash)
    staging.rename(final)
    sync(folder)
    leftovers = [path for path in folder.glob(".fetch-*") if path.is_dir() and not lock_holder(Path(f"{path}.lock"))]
    for leftover in (trash, *leftovers):
        shutil.rmtree(leftover, ignore_errors=True)
    return final


def fetch_run_files(store: ObjectStore, save: Save, run_folder: Path) -> None:
    """Download the small files of a run, as they were when a checkpoint was mirrored. Raises StoreError."""
    for name, expected in save.run_files.items():
        path = run_folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".fetch-{path.name}")
        temporary.unlink(missing_ok=True)
        store.download(save.key_of_run_file(name), temporary, expected.size, sha256=expected.sha256)
        temporary.replace(path)


def all_files(save: Save) -> dict[str, RemoteFile]:
    """Return key -> file, for all files of a checkpoint and of the run."""
    of_run = {save.key_of_run_file(path): file for path, file in save.run_files.items()}
    return {**{key_of(save.name, name): file for name, file in save.files.items()}, **of_run}


def find_damage(store: ObjectStore, save: Save) -> str:
    """Return a line that describes the first damage to a checkpoint, whose objects are read, or ""."""
    try:
        for key, file in all_files(save).items():
            if store.sha256(key) != (file.size, file.sha256):
                return f"{store.name(key)}: does not match its SHA-256"
    except StoreError as error:
        return str(error)
    return ""


def unused_objects(store: ObjectStore, lineage: Lineage) -> list[Object]:
    """Return the objects of checkpoints that are not part of the history: discarded, unfinished or partly removed ones."""
    kept = tuple(f"{CHECKPOINTS}/{name}/" for name in lineage.saves)
    return [item for item in store.list(f"{CHECKPOINTS}/") if not item.key.startswith(kept)]


def remove(store: ObjectStore, name: str) -> None:
    """Remove a checkpoint, its manifest first. Raises StoreError."""
    store.delete([key_of(name)])
    store.delete([item.key for item in store.list(f"{CHECKPOINTS}/{name}/")])


def to_keep(saves: Sequence[str], keep: int, keep_interval_steps: int, best_step: int) -> set[str]:
    """Return which mirrored checkpoints are kept: the newest `keep` ones, those at multiples of an interval, and the best.

    Args:
        saves: Names, oldest first.
        keep: Number of the newest ones. 0: all.
        keep_interval_steps: Interval in steps. 0: none.
        best_step: Step of the best one, or 0.
    """
    if not keep:
        return set(saves)
    by_interval = {n for n in saves if keep_interval_steps and step_of_name(n) % keep_interval_steps == 0}
    return {*saves[-keep:], *by_interval, *(n for n in saves if best_step and step_of_name(n) == best_step)}
