"""The mirror of a run in an object store. The local rename stays the commit of a checkpoint; a thread uploads what is committed,
and a run that starts on an empty disk begins with what the store has.

The first process of each node uploads the files of its node's ranks. Rank 0 also holds the lease, commits in the store, and
removes old checkpoints there and, after the upload, on the disk. Training never waits for it, except at the end of the run.
"""

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from trainer.base.config import CheckpointConfig, ConfigError
from trainer.base.config.checkpoints import list_checkpoints
from trainer.base.system import console, remote_run
from trainer.base.system.files import atomic_write, digest_of, read_json_object, sha256_of
from trainer.base.system.object_store import ObjectStore
from trainer.base.system.process import local_rank
from trainer.base.system.remote_run import Lineage, RemoteFile, Save, step_of_name
from trainer.base.system.run_files import CHECKPOINTS, MANIFEST, MIRROR_FILE, step_of
from trainer.base.system.spelling import counted
from trainer.base.system.store_errors import StoreError
from trainer.base.system.units import GIB, duration
from trainer.checkpoint import manifest
from trainer.checkpoint.commit import SaveRequest, prune
from trainer.checkpoint.lease import LEASE, PROBE, Lease, LeaseLost, honours_conditions
from trainer.checkpoint.manifest import CorruptError
from trainer.checkpoint.resume import LINEAGE
from trainer.checkpoint.uploads import Uploads
from trainer.runtime.distributed import first_problem, once_per_node

_LARGEST_RUN_FILE = 64 * 2**20
_NOT_MIRRORED = (CHECKPOINTS, "huggingface", ".lock", "log.txt")
"""Names in the run folder that are no small files of the run."""
_RENEWALS = 4
"""Number of renewals of the lease in its time-out."""


@contextlib.contextmanager
def _as_config_error() -> Iterator[None]:
    try:
        yield
    except (StoreError, CorruptError) as error:
        raise ConfigError("checkpoint.mirror", str(error)) from None


@dataclass(frozen=True)
class _State:
    """What this disk knows of the store: which checkpoints it has in common with it, and the owner of the last lease."""

    url: str
    owner: str
    known: tuple[str, ...]
    """Names of mirrored checkpoints that this disk has written or read."""

    @classmethod
    def read(cls, folder: Path, url: str) -> "_State":
        try:
            found = read_json_object(folder / MIRROR_FILE)
            if found["url"] == url:
                return cls(url, str(found["owner"]), tuple(found["known"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return cls(url, "", ())

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / MIRROR_FILE, json.dumps({"url": self.url, "owner": self.owner, "known": self.known}))


class Mirror:
    """The mirror of one run. Only the first process of each node has one."""

    def __init__(self, config: CheckpointConfig, run_folder: Path, *, node: int, nodes: int, ranks_per_node: int):
        """Describe a mirror. Nothing is read or written.

        Args:
            config: Settings of checkpoints.
            run_folder: Folder of the run.
            node: Index of this node.
            nodes: Number of nodes.
            ranks_per_node: Number of ranks of each.
        """
        self.config, self.run_folder, self.folder = config, run_folder, run_folder / CHECKPOINTS
        self.node, self.nodes, self.ranks_per_node = node, nodes, ranks_per_node
        self.uploads = Uploads(self._upload, config.mirror_pending, config.mirror_mib_per_second)
        self._history = threading.Lock()
        """Held while the history is written, which `add` does not wait for."""
        self._left_over: set[Path] = set()
        """Checkpoints of an earlier process. Rank 0 uploads all their files."""
        self._committed: set[str] = set()
        """Names of the checkpoints that this process has committed in the store."""
        self._given_up: list[Path] = []
        """Checkpoints of which another node has to say that it uploads nothing."""
        self._target: int | None = None
        """Step to which this process has rolled back. Later checkpoints of earlier processes are discarded."""

    # ---------------------------------------------------------------- start

    def start(self) -> None:
        """Take the lease, fetch what the disk lacks, and start to upload what the store lacks. On rank 0. Raises ConfigError."""
        with _as_config_error():
            self.store = ObjectStore(self.config.mirror)
            self.is_conditional = honours_conditions(self.store)
            if not self.is_conditional:
                console.warning(
                    f"{self.store.url} ignores conditions: two runs that start there within "
                    f"{duration(self.config.mirror_lease_s)} are not told apart"
                )
            state = _State.read(self.folder, self.store.url)
            self.lease = Lease.acquire(self.store, self.config.mirror_lease_s, self.is_conditional, state.owner)
            self.uploads.start(self._keep_lease)
            self.state = replace(state, owner=self.lease.owner)
            try:
                self._abort_uploads()
                lineage = Lineage.read(self.store)
                if not lineage.version:
                    self._require_own_place()
                lineage = replace(lineage, epoch=lineage.epoch + 1, owner=self.lease.owner)
                self.lineage = lineage.write(self.store, self.is_conditional)
                missing = self._reconcile()
            except BaseException:
                self._release()
                raise
        self.uploads.start()
        self._left_over.update(missing)
        for path in missing:
            self.add(_request_of(path))

    def _require_own_place(self) -> None:
        """Warn if the place of a new mirror holds other objects. Raises StoreError if it is an object itself."""
        parent, _, name = self.store.url.rpartition("/")
        if parent.count("/") > 2 and ObjectStore(parent).head(name) is not None:
            raise StoreError(f"{self.store.url}: is an object; choose another prefix")
        if others := [name for name in self.store.names("") if name not in (LEASE, PROBE)]:
            console.warning(
                f"{self.store.url} holds other objects, such as {others[0]}; a prefix of its own is clearer"
            )

    def _abort_uploads(self) -> None:
        try:
            if count := self.store.abort_uploads():
                console.info(f"{self.store.url}: removed the parts of {counted(count, 'upload')} that were cut off")
        except StoreError as error:
            console.warning(f"parts of uploads that were cut off may be left: {error}")

    def _reconcile(self) -> list[Path]:
        """Fetch the newest checkpoint of the store if this disk lacks it. Return the newest one that the store lacks, if any.
        Raises ConfigError if both have checkpoints that the other one lacks."""
        local = {remote_run.name_of(path): path for path in list_checkpoints(self.folder) if (path / MANIFEST).exists()}
        saves = [save for name in self.lineage.saves if (save := self._read_save(name)) is not None]
        known = {*self.state.known, *(save.name for save in saves)}
        unmirrored = [path for name, path in local.items() if name not in known]
        if local:  # otherwise also what this disk knew is lost
            foreign = [save for save in saves if save.name not in local and save.name not in self.state.known]
            if foreign and unmirrored:
                there = f"{self.store.url} has checkpoints that this disk never had (step {foreign[-1].step})"
                here = f"{self.folder} has others (step {step_of(unmirrored[0])})"
                message = f"{there}, and {here}: two runs wrote them. Remove or rename one of the two"
                raise ConfigError("checkpoint.mirror", message)
            saves = foreign
        self._fetch_newest(saves)
        self._know(*known)
        return unmirrored[:1]

    def _read_save(self, name: str) -> Save | None:
        try:
            return remote_run.read_save(self.store, name)
        except StoreError as error:
            if error.kind != "damaged":
                raise
            console.warning(f"ignoring a damaged checkpoint: {error}")
            return None

    def _fetch_newest(self, saves: list[Save]) -> None:
        """Fetch the newest intact checkpoint, the run's small files, and the checkpoint to roll back to."""
        for save in reversed(saves):
            try:
                remote_run.fetch(self.store, save, self.folder)
            except StoreError as error:
                if error.kind not in ("missing", "damaged", "refused"):
                    raise
                console.warning(f"ignoring a damaged checkpoint: {error}")
                continue
            try:
                remote_run.fetch_run_files(self.store, save, self.run_folder)
            except StoreError as error:
                console.warning(f"the records before step {save.step} are not restored: {error}")
            break
        else:
            if saves:
                raise ConfigError(
                    "checkpoint.mirror", f"{self.store.url}: all {counted(len(saves), 'checkpoint')} are damaged"
                )
        if saves and self.lineage.rolled_back_to:
            atomic_write(self.folder / LINEAGE, json.dumps({"rolled_back_to": self.lineage.rolled_back_to}))
        if self.config.load_step and self.config.load_step not in self.lineage.rolled_back_to[-1:]:
            step = self.lineage.best_step if self.config.load_step == "best" else self.config.load_step
            self._fetch_step(int(step))

    def _fetch_step(self, step: int) -> None:
        """Fetch the checkpoint of a step if the store has it and the disk lacks it. Raises StoreError."""
        if step in map(step_of, list_checkpoints(self.folder)):
            return
        if (save := self.lineage.find(self.store, step)) is not None:
            remote_run.fetch(self.store, save, self.folder)

    @property
    def steps(self) -> list[int]:
        """Steps of the mirrored checkpoints."""
        return [step_of_name(name) for name in self.lineage.saves]

    def rolled_back(self, step: int, requested: int | str) -> None:
        """Forget the checkpoints after a step, to which the run was rolled back. On rank 0. Raises ConfigError."""
        with _as_config_error(), self._history:
            self._target = step
            kept = tuple(name for name in self.lineage.saves if step_of_name(name) <= step)
            rollbacks = (*self.lineage.rolled_back_to, requested)
            lineage = replace(self.lineage, saves=kept, rolled_back_to=rollbacks)
            self.lineage = lineage.write(self.store, self.is_conditional)

    # ---------------------------------------------------------------- uploads

    def start_share(self) -> None:
        """Start to upload this node's share. On the first process of another node. Raises ConfigError."""
        with _as_config_error():
            self.store = ObjectStore(self.config.mirror)
        self.uploads.start()

    def add(self, request: SaveRequest) -> None:
        """Upload a committed checkpoint in the background."""
        given_up = self.uploads.add(request)
        if not given_up:
            return
        if self.node:
            self._given_up += [old.final for old in given_up]
            return
        for old in given_up:
            console.warning(f"step {old.step} is not mirrored, because the uploads are too slow")
            self._know(remote_run.name_of(old.final))
        # The disk must not fill up while the store cannot be reached.
        prune(request, protected=[waiting.final for waiting in self.uploads.waiting])

    def _keep_lease(self) -> None:
        while not self.uploads.ended.wait(self.config.mirror_lease_s / _RENEWALS):
            with contextlib.suppress(StoreError):  # an upload will say so
                self.lease.renew()

    def _upload(self, request: SaveRequest) -> None:
        """Upload this node's share of a checkpoint. Rank 0 also commits it."""
        start_s, path = time.monotonic(), request.final
        while self._given_up:
            self._put_share(self._given_up[0], None)
            self._given_up.pop(0)
        if not path.exists():
            return
        name, files = remote_run.name_of(path), manifest.read(path).files
        if name not in self._committed:
            nodes = 1 if path in self._left_over else self.nodes
            share = {file: f.digest for file, f in files.items() if nodes == 1 or self._node_of(file) == self.node}
            own = self._upload_files(path, name, share)
            if self.node:
                self._put_share(path, own)
                return
            for node in range(1, nodes):
                own |= self._share_of(name, node)
            if own.keys() != files.keys():
                raise CorruptError(f"the nodes have uploaded other files than {path} has")
            content = (path / MANIFEST).read_bytes()
            own[MANIFEST] = RemoteFile(len(content), self._put(remote_run.key_of(name, MANIFEST), content))
            save = self._with_run_files(Save(name=name, epoch=self.lineage.epoch, files=own, run_files={}))
            if not self._commit(request, save):
                return
            seconds = time.monotonic() - start_s
            size = f"{save.num_bytes / GIB:.2f} GiB in {seconds:.1f} s"
            console.info(f"mirrored step {request.step} to {self.store.url} ({size})")
        self._know(name)
        self._prune(request)

    def _commit(self, request: SaveRequest, save: Save) -> bool:
        """Add a checkpoint, whose files are in the store, to the history. Return False if it was discarded meanwhile."""
        self.lease.require()
        with self._history:
            if request.final in self._left_over and self._target is not None and request.step > self._target:
                return False
            saves = (*(name for name in self.lineage.saves if name != save.name), save.name)
            lineage = replace(self.lineage, saves=saves, best_step=request.keep_best or self.lineage.best_step)
            self.lineage = lineage.write(self.store, self.is_conditional)
        remote_run.create_save(self.store, save)
        self._committed.add(save.name)
        return True

    def _node_of(self, file: str) -> int:
        """Return which node uploads a file of a checkpoint: that of the rank that has written it."""
        rank = file.removeprefix("rank-").partition(".")[0]
        return int(rank) // self.ranks_per_node if rank.isdigit() else 0

    def _upload_files(self, path: Path, name: str, digests: Mapping[str, str]) -> dict[str, RemoteFile]:
        """Upload files of a checkpoint. Another node's rank 0 learns if one of them is damaged. Raises CorruptError.

        Args:
            path: The checkpoint.
            name: Its name in the store.
            digests: File -> the hash with which it was committed.
        """
        try:
            return {file: self._upload_file(path, name, file, digest) for file, digest in digests.items()}
        except CorruptError:
            if self.node:
                self._put_share(path, None)
            raise

    def _upload_file(self, path: Path, name: str, file: str, digest: str) -> RemoteFile:
        """Upload a file unless the store has it. Raises CorruptError if it is not what was committed."""
        size, key = (path / file).stat().st_size, remote_run.key_of(name, file)
        if digest_of(path / file) != digest:
            raise CorruptError(f"{path / file} does not match its hash")
        if self.store.has(key, path / file):
            return RemoteFile(size, sha256_of(path / file))
        return RemoteFile(size, self.store.upload(path / file, key, self.uploads.pace))

    def _put(self, key: str, content: bytes) -> str:
        self.store.write(key, content, None)
        return hashlib.sha256(content).hexdigest()

    def _run_files(self) -> list[str]:
        """Return the paths of the small files of the run in its folder."""
        # Not below all folders: checkpoints appear and disappear while they are written.
        own = [path for path in self.run_folder.iterdir() if path.name not in _NOT_MIRRORED]
        below = [inner for path in own if path.is_dir() and not path.is_symlink() for inner in path.rglob("*")]
        return sorted(path.relative_to(self.run_folder).as_posix() for path in (*own, *below) if _is_small_file(path))

    def _with_run_files(self, save: Save) -> Save:
        """Upload the small files of the run."""
        files = {}
        for path in self._run_files():
            content = (self.run_folder / path).read_bytes()
            files[path] = RemoteFile(len(content), self._put(save.key_of_run_file(path), content))
        return replace(save, run_files=files)

    def _put_share(self, path: Path, files: Mapping[str, RemoteFile] | None) -> None:
        """Tell rank 0 which files of a checkpoint this node has uploaded. None: it does not upload them."""
        share = files and {file: [f.size, f.sha256] for file, f in files.items()}
        key = remote_run.key_of(remote_run.name_of(path), f"shares/{self.node}-of-{self.nodes}.json")
        self._put(key, json.dumps(share).encode())

    def _share_of(self, name: str, node: int) -> dict[str, RemoteFile]:
        """Wait for the share of another node. Raises StoreError or CorruptError."""
        key = remote_run.key_of(name, f"shares/{node}-of-{self.nodes}.json")
        while not self.uploads.ended.is_set():
            try:
                share = json.loads(self.store.read(key)[0])
                return {str(file): RemoteFile(int(size), str(sha)) for file, (size, sha) in share.items()}
            except StoreError as error:
                if error.kind != "missing":
                    raise
            except (ValueError, TypeError, AttributeError):
                raise CorruptError(f"node {node} has uploaded nothing") from None
            self.lease.require()
            self.uploads.ended.wait(1.0)
        raise StoreError(f"{self.store.name(key)} is not there yet")

    def _know(self, *names: str) -> None:
        """Note that this disk and the store have these checkpoints in common."""
        with self.uploads.lock:
            known = tuple(dict.fromkeys((*self.state.known, *names)))
            self.state = replace(self.state, known=known)
            self.state.write(self.folder)

    def _prune(self, request: SaveRequest) -> None:
        """Remove old checkpoints, in the store and on the disk."""
        prune(request)
        interval, best = self.config.keep_interval_steps, self.lineage.best_step
        keep = remote_run.to_keep(self.lineage.saves, self.config.mirror_keep, interval, best)
        removed = [name for name in self.lineage.saves if name not in keep]
        if not removed:
            return
        with self._history:
            lineage = replace(self.lineage, saves=tuple(name for name in self.lineage.saves if name in keep))
            self.lineage = lineage.write(self.store, self.is_conditional)
        try:
            for name in removed:
                remote_run.remove(self.store, name)
        except StoreError as error:  # such as keys that may write, but not remove
            console.warning(f"old checkpoints stay in the store (scripts/checkpoint.py prune removes them): {error}")

    # ---------------------------------------------------------------- end

    def finish(self) -> None:
        """Wait for the uploads, at most mirror_timeout_s, and end the lease."""
        missing = self.uploads.finish(self.config.mirror_timeout_s)
        if self.node or self.uploads.failure:
            return
        if missing:
            limit = f"mirror_timeout_s = {self.config.mirror_timeout_s:g}"
            steps = ", ".join(map(str, missing))
            console.warning(f"not mirrored after {limit}: step {steps}; the next start on this disk goes on")
        self._release()

    def _release(self) -> None:
        self.uploads.ended.set()
        with contextlib.suppress(StoreError, LeaseLost):
            self.lease.release()

    def close(self) -> None:
        """End the threads, without waiting for an upload."""
        self.uploads.ended.set()


def _is_small_file(path: Path) -> bool:
    is_file = path.is_file() and not path.is_symlink() and not path.name.startswith(".")
    return is_file and path.stat().st_size <= _LARGEST_RUN_FILE


def _request_of(path: Path) -> SaveRequest:
    """Return the request of a checkpoint that an earlier process has committed, and that the store lacks."""
    return SaveRequest(
        folder=path.parent, step=step_of(path), files={}, metadata={}, keep=0, keep_interval_steps=0, keep_best=0
    )


def finish_mirror(config: CheckpointConfig, mirror: Mirror | None) -> None:
    """Wait for the uploads, collectively. See Mirror.finish. mirror: result of `open_mirror`."""
    if config.mirror:
        once_per_node(lambda: mirror.finish() or "")


def open_mirror(config: CheckpointConfig, run_folder: Path) -> Mirror | None:
    """Start the mirror of a run, collectively, and fetch what the disk lacks. Return it on the first process of each node. Raises
    ConfigError."""
    if not config.mirror:
        return None
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    nodes = -(-dist.get_world_size() // ranks_per_node)
    mirror = Mirror(
        config, run_folder, node=dist.get_rank() // ranks_per_node, nodes=nodes, ranks_per_node=ranks_per_node
    )

    def start() -> str:
        try:
            mirror.start_share() if dist.get_rank() else mirror.start()
        except ConfigError as error:
            return error.message
        return ""

    if problem := first_problem(once_per_node(start)):
        raise ConfigError("checkpoint.mirror", problem)
    return None if local_rank() else mirror
