"""ETags of S3 objects: the MD5 of the content, or that of the MD5s of the parts in which it was uploaded."""

import hashlib
import os
import re
from pathlib import Path

from trainer.base.system.files import hash_of_file, sha256_of

PART_BYTES = 8 * 2**20
_MAX_PARTS = 10_000
"""Limit of S3 for one object."""
_USUAL_PARTS = tuple(mib * 2**20 for mib in (5, 8, 10, 15, 16, 25, 32, 50, 64, 100, 128, 256, 512))
"""Sizes of the parts in which programs upload, which decide the ETag of an object."""
ETAGS = "MESHWRIGHT_ETAG_IS_MD5"
"""Environment variable: 0 if ETags of objects without parts are not the MD5 of their contents."""
_CHUNK_BYTES = 2**20


def part_bytes(size: int) -> int:
    """Return the size of the parts in which a file of this size is uploaded."""
    return max(PART_BYTES, -(-size // _MAX_PARTS))


def etag_of(path: Path) -> str:
    """Return the ETag that an upload of a file in our parts gets."""
    size = path.stat().st_size
    if size <= PART_BYTES:
        return hash_of_file(path, hashlib.md5(usedforsecurity=False))
    part = part_bytes(size)
    return f"{_md5_of_parts(path, part)}-{-(-size // part)}"


def etag_problem(path: Path, etag: str, seen: set[str]) -> str:
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
