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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from trainer.base.system.files import file_lock, hash_of_file, sync
from trainer.base.system.spelling import first_line
from trainer.base.system.streams import without_credentials

SCHEMES = ("s3", "gs", "az", "file")
"""Schemes of the URLs of stores: S3, Google Cloud Storage, Azure, a folder."""
_OTHER_NAMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az", "wasbs": "az"}
"""Schemes of other programs -> ours."""
_URL = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<bucket>[^/?#]*)(?:/(?P<prefix>[^?#]*))?")
_PART_BYTES = 8 * 2**20
_MAX_PARTS = 10_000
"""Limit of S3 for one object."""
_PARTS_AT_ONCE = 2
"""An upload holds at most this number of parts in memory, and one that is read."""
_CHUNK_BYTES = 2**20
_USUAL_PARTS = tuple(mib * 2**20 for mib in (5, 8, 10, 15, 16, 25, 32, 50, 64, 100, 128, 256, 512))
"""Sizes of the parts in which programs upload, which decide the ETag of an object."""
ETAGS = "MESHWRIGHT_ETAG_IS_MD5"
"""Environment variable: 0 if ETags of objects without parts are not the MD5 of their contents."""
_FOLDERS = threading.Lock()
_ATTEMPTS = 4
_PAUSE_S = 0.2
_RETRIES = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=90),
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=10), "base": 2},
}
_TIMEOUTS = {"timeout": "120s", "connect_timeout": "10s"}

_REASONS = (
    (r"No space left on device|Disk quota exceeded|StorageFull", "disk", "no space is left on the disk"),
    (r"169\.254\.16[09]\.|metadata\.google|MissingAccessKey|no credentials", "denied", "there are no credentials ({ways})"),
    (r"ExpiredToken|TokenRefreshRequired|token.{0,40}expired", "denied", "the credentials of {names} have expired"),
    (r"InvalidAccessKeyId", "denied", "the store does not know the access key of {names}"),
    (r"SignatureDoesNotMatch", "denied", "the secret key does not belong to the access key of {names}"),
    (r"RequestTimeTooSkewed", "denied", "the clock of this machine differs from that of the store"),
    (r"NoSuchBucket|InvalidBucketName|ContainerNotFound", "no bucket", "there is no such bucket"),
    (r"PermanentRedirect|AuthorizationHeaderMalformed|status code: 301", "denied",
     "the bucket is in another region (AWS_REGION)"),
    (r"AccessDenied|status code: 403|Forbidden", "denied", "access is denied to {names}"),
    (r"status code: 401|Unauthorized", "denied", "the credentials of {names} are refused"),
    (r"(Path \"[^\"]{0,200}\" contained [^\n]{0,80})|Could not parse path|invalid path", "refused",
     "an object below has a name that cannot be read: {1}"),
    (r"Missing (SecretAccessKey|AccessKeyId)", "denied", "of the two keys, one is missing ({ways})"),
    (r"NoSuchKey|status code: 404|not found", "missing", "there is no such object"),
    (r"status code: 412|already exists|PreconditionFailed|ConditionalRequestConflict|status code: 409", "changed",
     "the object has been changed by another writer"),
    (r"SlowDown|status code: 503|status code: 429", "busy", "the store is overloaded"),
    (r"dns error|failed to lookup|Name or service not known", "unreachable", "the name of the host {host} cannot be resolved"),
    (r"certificate|tls|TLS|SSL|handshake|InvalidContentType", "unreachable", "the TLS connection to {host} fails"),
    (r"kind: Interrupted|error decoding response body|IncompleteMessage|ConnectionReset|BrokenPipe", "lost",
     "the connection to {host} was lost"),
    (r"timed out|TimedOut|operation timed out", "unreachable", "{host} does not answer in time"),
    (r"kind: Connect|Connection refused|connection error", "unreachable", "{host} cannot be reached"),
    (r"status code: (5\d\d)", "busy", "the store fails with status {1}"),
    (r"status code: (\d+)", "refused", "the store refuses with status {1}"),
)  # fmt: skip
"""Pattern of obstore's message, which has many lines -> kind of error, and reason."""
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_VARIABLES = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
    "file": (),
}


class StoreError(Exception):
    """Failure of a request. The message is one line with the object, the operation and the reason, without credentials."""

    def __init__(self, message: str, kind: str = "other"):
        super().__init__(without_credentials(message))
        self.kind = kind
        """"missing", "damaged", "changed", "denied", "no bucket", "refused", "busy", "lost", "unreachable",
        "disk", "stopped" or "other"."""


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
            raise self._failure("", "opened", error) from None

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
                if (size := path.stat().st_size) <= _PART_BYTES:
                    self._obstore.put(self._store, key, b"".join(chunks), use_multipart=False)
                else:
                    parts = {"chunk_size": _part_bytes(size), "max_concurrency": _PARTS_AT_ONCE}
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
                problem = _etag_problem(path, version, seen)
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
            raise
        return Object(key, meta["size"], meta["e_tag"] or "")

    def has(self, key: str, path: Path) -> bool:
        """Return whether an object exists that `upload` has written from a file with this content, as its ETag says. Where an
        ETag is no hash, return False."""
        if (found := self.head(key)) is None or found.size != path.stat().st_size:
            return False
        if found.size <= _PART_BYTES:
            etag = hash_of_file(path, hashlib.md5(usedforsecurity=False))
        else:
            part = _part_bytes(found.size)
            etag = f"{_md5_of_parts(path, part)}-{-(-found.size // part)}"
        return found.version.strip('"') == etag

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
            except StoreError as failure:
                error = failure
            except OSError as failure:
                if type(failure) is not FileNotFoundError and failure.filename:  # a local file
                    raise
                error = self._failure(key, verb, failure)
            except Exception as failure:
                error = self._failure(key, verb, failure)
            attempts[error.kind] += 1
            # A damaged object may have been changed on the way. The package has tried often to reach a host.
            most = {"damaged": 2, **dict.fromkeys(("busy", "lost", "other"), _ATTEMPTS)}.get(error.kind, 1)
            if attempts[error.kind] >= most:
                raise error from None
            time.sleep(_PAUSE_S * 4 ** attempts[error.kind])

    def _failure(self, key: str, verb: str, error: Exception) -> StoreError:
        """Return an error with the reason that obstore's message contains."""
        text = str(error)
        names = " and ".join(name for name in _VARIABLES[self.scheme] if name in os.environ) or "this machine"
        host = re.search(r"https?://([^/\s\",?]+)", text)
        words: Mapping[str, str] = {
            "names": names,
            "ways": f"set {' and '.join(_VARIABLES[self.scheme])}, or use the role of the machine",
            "host": host[1] if host else "the store",
        }
        for pattern, kind, reason in _REASONS:
            if match := re.search(pattern, text):
                text = reason.format(match[0], *match.groups(), **words)
                return StoreError(f"{self.name(key)}: cannot be {verb}: {text}", kind)
        first = text.splitlines()[0] if text else type(error).__name__
        return StoreError(f"{self.name(key)}: cannot be {verb}: {re.sub(r'Error performing .*? - ', '', first)[:200]}")


def _chunks(file: BinaryIO, hasher: Any, pace: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the content of a file, which is hashed and paced."""
    while chunk := file.read(_CHUNK_BYTES):
        pace(len(chunk))
        hasher.update(chunk)
        yield chunk


def _part_bytes(size: int) -> int:
    """Return the size of the parts in which a file of this size is uploaded."""
    return max(_PART_BYTES, -(-size // _MAX_PARTS))


def sha256_of(path: Path) -> str:
    return hash_of_file(path, hashlib.sha256())


def _etag_problem(path: Path, etag: str, seen: set[str]) -> str:
    """Return how a downloaded file differs from its ETag, or "".

    Args:
        path: The file.
        etag: The MD5 of the content, or that of the MD5s of its parts, with their number. Another text says nothing.
        seen: SHA-256 of earlier downloads, if the parts have an unknown size. Receives that of this one.
    """
    match = re.fullmatch(r'"?([0-9a-f]{32})(?:-(\d+))?"?', etag)
    if match is None:
        return ""
    if match[2] is None:
        is_md5 = os.environ.get(ETAGS) == "0" or hash_of_file(path, hashlib.md5(usedforsecurity=False)) == match[1]
        return "" if is_md5 else f"does not match its MD5 (if the bucket is encrypted with keys of KMS, set {ETAGS}=0)"
    usual = [part for part in _USUAL_PARTS if -(-path.stat().st_size // part) == int(match[2])]
    if any(_md5_of_parts(path, part) == match[1] for part in usual) or (digest := sha256_of(path)) in seen:
        return ""
    seen.add(digest)
    return "differs between downloads"


def _md5_of_parts(path: Path, part_bytes: int) -> str:
    """Return the MD5 of the MD5s of the parts of a file."""
    digests = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        left = path.stat().st_size
        while left > 0:
            hasher, of_part = hashlib.md5(usedforsecurity=False), min(part_bytes, left)
            left -= of_part
            while of_part and (chunk := file.read(min(_CHUNK_BYTES, of_part))):
                hasher.update(chunk)
                of_part -= len(chunk)
            digests.update(hasher.digest())
    return digests.hexdigest()


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
