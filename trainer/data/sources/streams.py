"""Files as streams of bytes, decompressed in bounded memory."""

import io
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from trainer.base.config.packages import require_package
from trainer.base.config.schema.data import COMPRESSED

_READ_BYTES = 2048
"""Number of compressed bytes that are decompressed at a time. The result is at most 64 MiB, because each byte of
zstd data decompresses to at most 32,000 bytes."""


class BrokenStream(Exception):
    """The reason why a compressed file cannot be read."""


def ends_in(path: str, endings: str | tuple[str, ...]) -> bool:
    """Return whether a path has one of these endings, in lower or upper case: some programs write names such as DATA.JSONL."""
    return path.lower().endswith(endings)


def is_compressed(path: str) -> bool:
    return ends_in(path, COMPRESSED)


def open_stream(path: str, setting: str = "data.path") -> BinaryIO:
    """Open a file as a stream of decompressed bytes. Raises ConfigError, about the setting that names the file, if the package
    that decompresses it is missing. Reading raises BrokenStream if the compressed data is damaged."""
    if not is_compressed(path):
        return open(path, "rb")
    if ends_in(path, ".gz"):
        decompress = ("gzip", lambda: zlib.decompressobj(wbits=31), zlib.error)
    else:
        zstandard = require_package("zstandard", setting)
        decompress = ("zstd", zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError)
    return io.BufferedReader(_Decompressor(open(path, "rb"), *decompress))


class _Decompressor(io.RawIOBase):
    """Stream of decompressed bytes. The contents of all compressed streams in a file are concatenated.

    `gzip.open` reads an empty file as an empty document, and zstandard's own reader also a truncated one; here both are errors.
    """

    def __init__(self, file: BinaryIO, format: str, new_stream: Callable[[], Any], error: type[Exception]):
        self._file = file
        self._format, self._new_stream, self._error = format, new_stream, error
        self._stream = new_stream()
        self._in_stream = True  # true at the start too, because an empty file counts as truncated
        self._out = memoryview(b"")
        self._compressed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._out:
            compressed = self._compressed or self._file.read(_READ_BYTES)
            if not compressed:
                if self._in_stream:
                    raise BrokenStream(f"the {self._format} data is truncated")
                return 0
            self._decompress(compressed)
        count = min(len(buffer), len(self._out))
        buffer[:count] = self._out[:count]
        self._out = self._out[count:]
        return count

    def _decompress(self, compressed: bytes) -> None:
        try:
            self._out = memoryview(self._stream.decompress(compressed))
        except self._error:
            raise BrokenStream(f"this is not {self._format} data, or it is damaged") from None
        self._compressed, self._in_stream = b"", True
        if self._stream.eof:
            # Trailing zeros are padding, as tape drives write it. Anything else starts another stream.
            self._compressed = self._stream.unused_data.lstrip(b"\0")
            self._stream, self._in_stream = self._new_stream(), bool(self._compressed)

    def close(self) -> None:
        self._file.close()
        super().close()
