"""Download of models from the Hugging Face Hub, by name, into the cache of the package huggingface_hub.

The package continues a file whose connection was lost, and keeps complete files when it is interrupted. It does not compare their
content with the hashes of the Hub; `_verify` does.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from trainer.base.config.errors import ConfigError
from trainer.base.config.packages import require_package
from trainer.base.config.recognition import Use, recognise, recognise_published
from trainer.base.config.schema.data import COMPRESSED, READER_OF_ENDING
from trainer.base.system import console
from trainer.base.system.files import atomic_write, file_lock, read_json_object, stamp
from trainer.base.system.paths import split_best
from trainer.base.system.spelling import counted
from trainer.base.system.streams import print_error

COMMIT = "MESHWRIGHT_HUB_COMMIT"
"""Environment variable in which the launcher passes NAME@COMMIT to its ranks, so that all use one commit."""
Contents = Literal["config", "text", "weights"]
"""Which files are needed: config.json; also those of the tokenizer and the chat template; also the weights."""

_SETTING = "model.pretrained"
_TEXT = r"(additional_chat_templates/)?[^/]+\.(json|jinja|model)|(merges|vocab)\.txt"
_PATTERNS: dict[Contents, str] = {
    "config": r"config\.json",
    "text": _TEXT,
    "weights": rf"{_TEXT}|model(-\d+-of-\d+)?\.safetensors",
}
"""Contents -> pattern of the names of their files. Each includes those before it."""
_RECORD = "meshwright.json"
"""File in the model's folder of the cache: for each commit, the files that it has, those whose content was verified, and for
which contents they are complete."""
_LISTED, _VERIFIED, _COMPLETE = "listed", "files", "complete"
_USUAL = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""Files that a model may lack, but without which another one would be trained on other tokens."""
_TIMEOUT_S = 20.0
"""Maximum time that the Hub may take to describe a model."""
_CHUNK_BYTES = 2**22
_WORKERS = 4


def is_hub_name(text: str) -> bool:
    """Return whether a text that is no existing path can be a name on the Hub, OWNER/NAME. If OWNER exists, the text is a path
    with a spelling mistake, and must not load somebody else's model or data."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text, re.ASCII)) and not os.path.exists(text.partition("/")[0])


def is_dataset_name(path: str) -> bool:
    """Return whether a path can be the name of a dataset of the Hub, OWNER/NAME. That of a data file cannot."""
    return is_hub_name(path) and not path.endswith((*READER_OF_ENDING, *COMPRESSED))


def names_a_folder(source: str) -> bool:
    """Return whether a model is meant to lie on this machine: its path exists, or cannot be a name on the Hub."""
    return os.path.exists(split_best(source)[0]) or not is_hub_name(source)


def is_commit(revision: str) -> bool:
    return bool(re.fullmatch("[0-9a-f]{40}", revision))


def fetch(name: str, revision: str, contents: Contents) -> Path:
    """Return the folder of a model of the Hub, after its missing files have been downloaded and verified.

    Args:
        name: OWNER/NAME.
        revision: Commit, branch or tag. Empty: the branch main. A commit that is complete in the cache needs no connection.
        contents: Which files to download.

    Raises:
        ConfigError: The model does not exist, cannot be accessed or downloaded, or is damaged.
    """
    hub = require_package("huggingface_hub", _SETTING)
    if not re.match("https?://[^/]", _endpoint()):
        raise ConfigError("", f"HF_ENDPOINT={os.environ['HF_ENDPOINT']}: expected a URL such as https://huggingface.co")
    with _one_line_errors(name, revision or "main"):
        hub.logging.set_verbosity_error()  # its warnings have several lines; errors are exceptions
        cached = _cached(hub, name, revision or "main")
        if cached is not None and is_commit(revision) and _is_complete(cached, contents):
            return cached
        try:
            api = hub.HfApi(endpoint=_endpoint())
            info = api.model_info(name, revision=revision or "main", timeout=_TIMEOUT_S, files_metadata=True)
        except Exception as error:
            if 400 <= _status(error) < 500 or cached is None:
                raise
            return _offline(cached, name, contents, type(error).__name__)
        with suppress(OSError, ValueError):  # the cache of a cluster may be read-only
            _note(_snapshot(hub, name, info.sha), {_LISTED: sorted(s.rfilename for s in info.siblings)})
        snapshot = _download(hub, name, info, contents)
        with suppress(OSError):  # the cache of a cluster may be read-only
            _remember(snapshot, revision or "main")
        return snapshot


def _remember(snapshot: Path, revision: str) -> None:
    """Write in the cache, as the package does, which commit a branch or tag is, for a start without a connection."""
    if not is_commit(revision):
        file = snapshot.parent.parent / "refs" / revision
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, snapshot.name)


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def _cached(hub: ModuleType, name: str, revision: str) -> Path | None:
    """Return the folder of the cache with (a part of) a model, or None."""
    file = hub.try_to_load_from_cache(name, "config.json", hub.constants.HF_HUB_CACHE, revision)
    return Path(file).parent if isinstance(file, str) else None


def _snapshot(hub: ModuleType, name: str, commit: str) -> Path:
    return Path(hub.constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots" / commit


def _offline(snapshot: Path, name: str, contents: Contents, reason: str) -> Path:
    """Verify and return a folder of the cache without a connection. It is complete only if a start with a connection has recorded
    which files the commit has: another program may have downloaded some of them. Raises ConfigError."""
    listed = _record(snapshot).get(snapshot.name, {}).get(_LISTED)
    names = [n for n in listed or _names(snapshot) if re.fullmatch(_PATTERNS[contents], n)]
    where, is_away = f"commit {snapshot.name} in the cache", f"{_endpoint()} cannot be reached ({reason})"
    if missing := [n for n in names if not (snapshot / n).exists()]:
        raise ConfigError(_SETTING, f"{is_away}, and {where} lacks {', '.join(missing)} of {name}")
    if not _is_complete(snapshot, contents):
        # The cache names the content of each file by the hash that the Hub gave, to which a link leads.
        hashes = {n: os.path.basename(os.path.realpath(snapshot / n)) for n in names}
        _verify(snapshot, name, hashes, contents, is_complete=listed is not None)
    unknown = [] if listed is not None else [n for n in _USUAL if not _is_known(snapshot, n)]
    doubt = (
        f"; whether the model also has {', '.join(unknown)} is unknown until a start with a connection"
        if unknown
        else ""
    )
    print_error(f"{is_away}: {name} is {where}{doubt}")
    return snapshot


def _names(snapshot: Path) -> list[str]:
    files = (file for file in snapshot.rglob("*") if not file.is_dir())
    return sorted(file.relative_to(snapshot).as_posix() for file in files)


def _is_known(snapshot: Path, file: str) -> bool:
    """Return whether a file lies in the cache, or is known not to exist. The package records what it did not find."""
    absent = snapshot.parent.parent / ".no_exist" / snapshot.name
    return (snapshot / file).exists() or (absent / file).exists()


def _download(hub: ModuleType, name: str, info: Any, contents: Contents) -> Path:
    """Download the missing files of a model. info: result of model_info."""
    uses: tuple[Use, ...] = ("huggingface", "weights") if contents == "weights" else ("huggingface",)
    for use in uses:
        if problem := recognise_published([s.rfilename for s in info.siblings], use).problem:
            raise ConfigError(_SETTING, f"{name} {problem}")
    wanted = [s for s in info.siblings if re.fullmatch(_PATTERNS[contents], s.rfilename)]
    cache, snapshot = Path(hub.constants.HF_HUB_CACHE), _snapshot(hub, name, info.sha)
    storage = snapshot.parent.parent
    with ExitStack() as held:
        with suppress(OSError):  # a cache that is read-only may be complete
            held.enter_context(file_lock(storage / ".meshwright.lock"))  # other ranks wait
        if _is_complete(snapshot, contents):
            return snapshot
        missing = [s for s in wanted if not (snapshot / s.rfilename).exists()]
        num_bytes = sum(s.size or 0 for s in missing)
        free = shutil.disk_usage(storage).free
        if num_bytes > free:
            message = f"{_size(num_bytes)} must be downloaded to {cache}, which has {_size(free)} free"
            raise ConfigError(_SETTING, f"{message}; HF_HOME names another folder")
        if missing:
            print_error(f"downloading {counted(len(missing), 'file')} of {name} ({_size(num_bytes)}) to {snapshot}")
        if not console.on_terminal():
            hub.utils.disable_progress_bars()
        names = [s.rfilename for s in wanted]
        hub.snapshot_download(name, revision=info.sha, allow_patterns=names, cache_dir=cache, endpoint=_endpoint())
        _verify(snapshot, name, {s.rfilename: _expected(s) for s in wanted}, contents)
    return snapshot


def _expected(sibling: Any) -> str:
    """Return the hash of a file that model_info describes: SHA-256, or SHA-1 of a file that is stored in git, or ""."""
    lfs = sibling.lfs or {}
    return (lfs["sha256"] if lfs else sibling.blob_id) or ""


def _verify(snapshot: Path, name: str, hashes: Mapping[str, str], contents: Contents, is_complete: bool = True) -> None:
    """Compare files with their hashes, unless an earlier start has, remove the damaged ones, and record the others. Raises
    ConfigError. is_complete: whether they are all files that these contents need."""
    verified = _record(snapshot).get(snapshot.name, {}).get(_VERIFIED, {})

    def is_intact(file: str) -> bool:
        if verified.get(file) == stamp(snapshot / file):
            return True
        return not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", hashes[file]) or _hash(snapshot / file, hashes[file])

    with ThreadPoolExecutor(_WORKERS) as pool:
        damaged = [file for file, intact in zip(hashes, pool.map(is_intact, hashes), strict=True) if not intact]
    for file in damaged:
        content = Path(os.path.realpath(snapshot / file))
        content.unlink()
        (snapshot / file).unlink(missing_ok=True)
    if damaged:
        message = f"{', '.join(damaged)} of {name} does not match the hash of the Hub and was removed"
        raise ConfigError(_SETTING, f"{message}; the same command downloads it again")
    if contents == "weights" and (problem := recognise(snapshot, "weights").problem):
        raise ConfigError(_SETTING, f"{name} {problem}")
    with suppress(OSError, ValueError):  # the cache of a cluster may be read-only
        stamps = {_VERIFIED: verified | {file: stamp(snapshot / file) for file in hashes}}
        _note(snapshot, stamps | ({_COMPLETE: contents} if is_complete else {}))


def _hash(file: Path, expected: str) -> bool:
    """Return whether a file has this hash: SHA-256 if it has 64 digits, otherwise that of git."""
    hasher = hashlib.sha256() if len(expected) == 64 else hashlib.sha1(b"blob %d\0" % file.stat().st_size)
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest() == expected


def _record(snapshot: Path) -> dict[str, Any]:
    try:
        return read_json_object(snapshot.parent.parent / _RECORD)
    except (OSError, ValueError):
        return {}


def _note(snapshot: Path, facts: Mapping[str, Any]) -> None:
    """Record facts about a commit. Raises OSError or ValueError."""
    storage = snapshot.parent.parent
    with file_lock(storage / f"{_RECORD}.lock"):  # another process may record facts about another commit
        record = _record(snapshot)
        record[snapshot.name] = record.get(snapshot.name, {}) | facts
        atomic_write(storage / _RECORD, json.dumps(record, indent=1))


def _is_complete(snapshot: Path, contents: Contents) -> bool:
    """Return whether all files that the contents need were verified, and have not changed since then."""
    order: Sequence[Contents] = tuple(_PATTERNS)
    try:
        entry = _record(snapshot)[snapshot.name]
        is_enough = order.index(entry[_COMPLETE]) >= order.index(contents)
        return is_enough and all(stamp(snapshot / file) == noted for file, noted in entry[_VERIFIED].items())
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        return False


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"


def _status(error: BaseException) -> int:
    """Return the status of the HTTP response that an exception is about, or 0."""
    return getattr(getattr(error, "response", None), "status_code", 0)


@contextmanager
def _one_line_errors(name: str, revision: str) -> Iterator[None]:
    """Context manager that turns errors of the package huggingface_hub, of its HTTP client and of the file system into a
    ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(_SETTING, _reason(error, name, revision)) from None


def _reason(error: Exception, name: str, revision: str) -> str:
    kinds = {cls.__name__ for cls in type(error).__mro__}  # the HTTP client differs between versions of the package
    address = _endpoint()
    if "GatedRepoError" in kinds:
        return f"access to {name} must be requested at {address}/{name}; then set HF_TOKEN, or run `hf auth login`"
    if "RevisionNotFoundError" in kinds:
        return f"{name} has no revision {revision}"
    if "RepositoryNotFoundError" in kinds:
        private = "" if _status(error) == 404 else ", or it is private and HF_TOKEN is missing or wrong"
        return f"there is no folder of this name, and {address} has no model {name}{private}"
    if _status(error) in (401, 403):
        return f"{address} refuses access to {name} (HTTP {_status(error)}); set HF_TOKEN, or run `hf auth login`"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full while {name} is downloaded; HF_HOME names another folder"
    if "OfflineModeIsEnabled" in kinds:
        return f"{name} is not in the cache, and HF_HUB_OFFLINE forbids to download it"
    if {"ConnectError", "ConnectionError", "TimeoutException", "ConnectTimeout", "LocalEntryNotFoundError"} & kinds:
        return f"{name} is neither a folder nor in the cache, and {address} cannot be reached; use --from FOLDER"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or name} cannot be written ({error.strerror})"
    status = f"HTTP {_status(error)}" if _status(error) else (str(error).strip().splitlines() or [""])[0][:200]
    return f"{name} cannot be downloaded from {address} ({status or type(error).__name__}); try again"
