"""Object stores, such as S3, through the package obstore: a bucket's objects below a prefix, and one line for each error.

A store may lie: nothing here is trusted but the content of an object whose hash is known, and a condition that was tested.
"""

import hashlib
import importlib
import importlib.util
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from trainer.base.system.etags import ETAGS, PART_BYTES, etag_of, etag_problem, part_bytes
from trainer.base.system.files import file_lock, sha256_of, sync
from trainer.base.system.spelling import first_line
from trainer.base.system.store_errors import StoreError, failure

SCHEMES = ("s3", "gs", "az", "file")
"""Schemes of the URLs of stores: S3, Google Cloud Storage, Azure, a folder."""
_OTHER_NAMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az", "wasbs": "az"}
"""Schemes of other programs -> ours."""
_URL = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<bucket>[^/?#]*)(?:/(?P<prefix>[^?#]*))?")
_PARTS_AT_ONCE = 2
"""An upload holds at most this number of parts in memory, and one that is read."""
_CHUNK_BYTES = 2**20
_FOLDERS = threading.Lock()
_ATTEMPTS = 4
_PAUSE_S = 0.2
_RETRIES = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=90),
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=10), "base": 2},
}
_TIMEOUTS = {"timeout": "120s", "connect_timeout": "10s"}

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


@dataclass(frozen=True)
class Object:
    key: str
    """Below the prefix of its store."""
    size: int
    version: str
    """ETag, which differs between contents of one key."""


def is_url(path: str) -> bool:
    """Return whether a path names an object store."""
    scheme = path.partition("://")[0]
    return "://" in path and (scheme in SCHEMES or _ours(scheme) != "")


def _ours(scheme: str) -> str:
    """Return our name of a scheme that other programs write otherwise, or "". It has no capital letters."""
    lower = scheme.lower()
    return _OTHER_NAMES.get(lower, lower if lower in SCHEMES and lower != scheme else "")


def url_error(url: str) -> str:
    """Return the reason why a text is no URL of an object store, or ""."""
    match = _URL.fullmatch(url)
    scheme = url.partition("://")[0]
    if ours := _ours(scheme):
        return f"is a URL of another program; write {ours}://BUCKET/PREFIX"
    if scheme in SCHEMES and re.search("[#?]", url):
        return "must not contain # or ?"
    if scheme not in SCHEMES or match is None:
        return f"expected a URL such as s3://BUCKET/PREFIX; it begins with {', '.join(f'{s}://' for s in SCHEMES)}"
    if scheme == "file" and match["bucket"]:
        return "expected file:/// and an absolute path"
    if scheme != "file" and not match["bucket"]:
        return "names no bucket"
    if {".", ".."} & set(parts := (match["prefix"] or "").rstrip("/").split("/")):
        return "must not contain the names . and .."
    if "" in parts and parts != [""]:
        return "has an empty name between two slashes"
    if "@" in match["bucket"]:
        return "must not contain credentials; they are read from the environment"
    if re.search(r"\s", match["bucket"]):
        return "must not contain spaces in the name of the bucket"
    if scheme == "file" and not (match["prefix"] or "").strip("/"):
        return "names no folder"
    return ""


class ObjectStore:
    """The objects below a URL. Keys are relative to it. Methods raise StoreError."""

    def __init__(self, url: str):
        """Describe a store. No request is made. Raises StoreError if the URL or the credentials cannot be used."""
        if problem := url_error(url):
            raise StoreError(f"{url}: {problem}")
        if problem := _environment_error():
            raise StoreError(problem, "denied")
        self.url = url.rstrip("/")
        self.scheme = url.partition("://")[0]
        self._obstore = _package()
        options: dict[str, Any] = (
            {} if self.scheme == "file" else {"retry_config": _RETRIES, "client_options": _client()}
        )
        if self.scheme == "s3" and (provider := _profile_credentials()) is not None:
            options["credential_provider"] = provider
        try:
            if self.scheme == "file":
                options["mkdir"] = True
            self._store = self._obstore.store.from_url(self.url, **options)
        except Exception as error:
            raise failure(self.url, self.scheme, "opened", error) from None

    def read(self, key: str) -> tuple[bytes, str]:
        """Return the content of a small object, and its version."""
        return self._try(key, "read", lambda: _content(self._obstore.get(self._store, key)))

    def write(self, key: str, content: bytes, version: str | None) -> str:
        """Write a small object if it has a version. Return its new version. If an answer is lost, a write that has succeeded may
        seem to have failed.

        Args:
            key: Of the object.
            content: Of the object.
            version: The version that the object must have. "": it must not exist. None: any.

        Raises:
            StoreError: Of the kind "changed" if the object has another version.
        """
        if self.scheme == "file" and version:
            # The lock of a file excludes only other processes.
            with _FOLDERS, file_lock(Path(self.url.removeprefix("file://")) / ".lock"):
                return self._replace(key, content, version)
        mode: Any = "create" if version == "" else "overwrite" if version is None else {"e_tag": version}
        options = {"mode": mode, "use_multipart": False}
        result = self._try(key, "written", lambda: self._obstore.put(self._store, key, content, **options))
        return result["e_tag"] or ""

    def _replace(self, key: str, content: bytes, version: str) -> str:
        """Write an object of a folder, which knows no such condition, if it has a version."""
        found = self.head(key)
        if found is None or found.version != version:
            raise StoreError(
                f"{self.name(key)}: cannot be written: the object has been changed by another writer", "changed"
            )
        return self.write(key, content, None)

    def upload(self, path: Path, key: str, pace: Callable[[int], None] = lambda num_bytes: None) -> str:
        """Write a file as an object, in parts. Return the SHA-256 of its content.

        Args:
            path: The file.
            key: Of the object.
            pace: Called with the number of bytes before they are sent, to limit the bandwidth.
        """

        def send() -> str:
            hasher = hashlib.sha256()
            with path.open("rb") as file:
                chunks = _chunks(file, hasher, pace)
                if (size := path.stat().st_size) <= PART_BYTES:
                    self._obstore.put(self._store, key, b"".join(chunks), use_multipart=False)
                else:
                    parts = {"chunk_size": part_bytes(size), "max_concurrency": _PARTS_AT_ONCE}
                    self._obstore.put(self._store, key, chunks, use_multipart=True, **parts)
            return hasher.hexdigest()

        return self._try(key, "written", send)

    def download(
        self,
        key: str,
        path: Path,
        size: int,
        *,
        sha256: str = "",
        version: str = "",
        progress: Callable[[int], Any] = lambda num_bytes: None,
    ) -> None:
        """Write an object to a file, which continues if it has the beginning already, and compare it with its hash: SHA-256, or
        the MD5 in the ETag of an S3 object. An object in parts of an unknown size must be the same in two downloads.

        Args:
            key: Of the object.
            path: The file. It is removed if it does not match.
            size: Number of bytes of the object.
            sha256: The expected hash, or "".
            version: The version that the object must have. "": any.
            progress: Receives numbers of bytes.

        Raises:
            StoreError: Of the kind "damaged", or "changed" if the object has another version.
        """

        seen: set[str] = set()
        counted = 0

        def receive() -> None:
            nonlocal counted
            have = path.stat().st_size if path.exists() else 0
            if have > size:
                path.unlink()
                have = 0
            progress(have - counted)
            counted = have
            if have < size:
                # get() without a range reads also what a store serves only complete.
                options: dict[str, Any] = {"if_match": version} if version else {}
                options |= {"range": (have, size)} if have else {}
                result = self._obstore.get(self._store, key, options=options)
                with path.open("ab") as file:
                    for chunk in result.stream(min_chunk_size=_CHUNK_BYTES):
                        file.write(chunk)
                        progress(len(chunk))
                        counted += len(chunk)
                sync(path)
            path.touch()
            problem = ""
            if (found := path.stat().st_size) != size:
                problem = f"has {found} bytes, expected {size}"
            elif sha256 and sha256_of(path) != sha256:
                problem = "does not match its SHA-256"
            elif self.scheme == "s3" and not sha256:
                problem = etag_problem(path, version, seen)
            if problem:
                if found >= size:  # otherwise the next attempt continues
                    path.unlink()
                raise StoreError(f"{self.name(key)}: {problem}", "damaged")

        self._try(key, "read", receive)

    def sha256(self, key: str) -> tuple[int, str]:
        """Return the size and the SHA-256 of an object, which is read."""

        def hashed() -> tuple[int, str]:
            hasher, size = hashlib.sha256(), 0
            for chunk in self._obstore.get(self._store, key).stream(min_chunk_size=_CHUNK_BYTES):
                hasher.update(chunk)
                size += len(chunk)
            return size, hasher.hexdigest()

        return self._try(key, "read", hashed)

    def list(self, prefix: str = "") -> "list[Object]":
        """Return the objects whose keys begin with a prefix that ends at a slash, sorted by key."""

        def objects() -> "list[Object]":
            found = [meta for page in self._obstore.list(self._store, prefix or None) for meta in page]
            return sorted((Object(m["path"], m["size"], m["e_tag"] or "") for m in found), key=lambda o: o.key)

        return self._try(prefix, "listed", objects)

    def names(self, folder: str) -> "list[str]":
        """Return the names of the objects and prefixes directly below a key."""

        def names() -> "list[str]":
            page = self._obstore.list_with_delimiter(self._store, f"{folder}/" if folder else None)
            keys = [*page["common_prefixes"], *(meta["path"] for meta in page["objects"])]
            return sorted(key.rstrip("/").rpartition("/")[2] for key in keys)

        return self._try(folder, "listed", names)

    def head(self, key: str) -> Object | None:
        """Return the description of an object, or None if it does not exist."""
        try:
            meta = self._try(key, "read", lambda: self._obstore.head(self._store, key))
        except StoreError as error:
            if error.kind == "missing":
                return None
            if error.kind in ("denied", "refused"):  # the answer to HEAD has no body, which would say why
                self._try(key, "read", lambda: self._obstore.get(self._store, key, options={"range": (0, 1)}))
            raise
        return Object(key, meta["size"], meta["e_tag"] or "")

    def has(self, key: str, path: Path) -> bool:
        """Return whether an object exists that `upload` has written from a file with this content, as its ETag says. Where an
        ETag is no hash, return False."""
        if (found := self.head(key)) is None or found.size != path.stat().st_size:
            return False
        return found.version.strip('"') == etag_of(path)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects. Those that do not exist are ignored."""
        for key in keys:
            try:
                self._try(key, "removed", lambda key=key: self._obstore.delete(self._store, key))
            except StoreError as error:
                if error.kind != "missing":
                    raise

    def abort_uploads(self) -> int:
        """Remove the parts of uploads to S3 that were cut off, and return their number. Nobody else may upload. Without the
        package boto3, nothing is removed: obstore does not list such uploads."""
        if self.scheme != "s3" or importlib.util.find_spec("boto3") is None:
            return 0
        bucket, _, prefix = self.url.partition("://")[2].partition("/")

        def abort() -> int:
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
            client = importlib.import_module("boto3").client("s3", region_name=region)
            pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=f"{prefix}/")
            uploads = [upload for page in pages for upload in page.get("Uploads", ())]
            for upload in uploads:
                client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
            return len(uploads)

        return self._try("", "cleared of parts", abort)

    def name(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    def _try(self, key: str, verb: str, request: Callable[[], Any]) -> Any:
        """Return the result of a request, which is repeated after a transient error."""
        attempts: Counter[str] = Counter()  # of each kind of error
        while True:
            try:
                return request()
            except StoreError as caught:
                error = caught
            except OSError as caught:
                if type(caught) is not FileNotFoundError and caught.filename:  # a local file
                    raise
                error = failure(self.name(key), self.scheme, verb, caught)
            except Exception as caught:
                error = failure(self.name(key), self.scheme, verb, caught)
            attempts[error.kind] += 1
            # A damaged object may have been changed on the way. The package has tried often to reach a host.
            most = {"damaged": 2, **dict.fromkeys(("busy", "lost", "other"), _ATTEMPTS)}.get(error.kind, 1)
            if attempts[error.kind] >= most:
                raise error from None
            time.sleep(_PAUSE_S * 4 ** attempts[error.kind])


def _chunks(file: BinaryIO, hasher: Any, pace: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the content of a file, which is hashed and paced."""
    while chunk := file.read(_CHUNK_BYTES):
        pace(len(chunk))
        hasher.update(chunk)
        yield chunk


def _content(result: Any) -> tuple[bytes, str]:
    return bytes(result.bytes()), result.meta["e_tag"] or ""


def _package() -> ModuleType:
    """Return obstore. Raises StoreError."""
    try:
        importlib.import_module("obstore.store")
        return importlib.import_module("obstore")
    except ImportError:
        raise StoreError("object stores need the package obstore: pip install obstore") from None


def _environment_error() -> str:
    """Return which environment variable cannot be used, or "". The package aborts at an address that is none."""
    for name in _ENDPOINTS:
        if name in os.environ and not re.match(r"https?://[^/\s]", os.environ[name]):
            return f"{name}={os.environ[name]}: expected an address such as https://s3.example.com"
    if os.environ.get(ETAGS, "") not in ("", "0", "1"):
        return f"{ETAGS}={os.environ[ETAGS]}: expected 0 or 1"
    return ""


def _client() -> dict[str, Any]:
    endpoint = next((os.environ[name] for name in _ENDPOINTS if name in os.environ), "")
    return _TIMEOUTS | ({"allow_http": True} if endpoint.startswith("http://") else {})


def _profile_credentials() -> Any:
    """Return the provider of a profile's credentials, or None if the environment has keys or names no profile."""
    if "AWS_ACCESS_KEY_ID" in os.environ or not _has_profile():
        return None
    try:
        return importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider()
    except ImportError:
        raise StoreError("the profile in AWS_PROFILE or ~/.aws needs the package boto3: pip install boto3") from None
    except Exception as error:  # of botocore, which is not imported here
        raise StoreError(
            f"the profile in AWS_PROFILE or ~/.aws cannot be used: {first_line(error)}", "denied"
        ) from None


def _has_profile() -> bool:
    credentials = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", os.path.expanduser("~/.aws/credentials"))
    return "AWS_PROFILE" in os.environ or os.path.exists(credentials)
