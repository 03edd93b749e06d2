"""Files as streams of bytes, compressed ones too, in bounded memory."""

import io
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from trainer.config.packages import require_package

COMPRESSED = (".gz", ".zst")
_BLOCK = 2048
"""Compressed bytes that are unpacked at a time. zstd can make 32,000 of one, so a few dozen MiB come out at the most."""


class BrokenStream(Exception):
    """What is wrong with a compressed file."""


def is_compressed(path: str) -> bool:
    return path.endswith(COMPRESSED)


def open_stream(path: str) -> BinaryIO:
    """The content, unpacked. Reading raises BrokenStream. Raises ConfigError where the package for it is missing."""
    if path.endswith(".gz"):
        return io.BufferedReader(_Unpacked(path, "gzip", lambda: zlib.decompressobj(wbits=31), zlib.error))
    if path.endswith(".zst"):
        zstandard = require_package("zstandard", "data.path")
        new = zstandard.ZstdDecompressor().decompressobj
        return io.BufferedReader(_Unpacked(path, "zstd", new, zstandard.ZstdError))
    return open(path, "rb")


class _Unpacked(io.RawIOBase):
    """One compressed stream after the other, to the end of the file."""

    def __init__(self, path: str, kind: str, new: Callable[[], Any], error: type[Exception]):
        self._file = open(path, "rb")  # noqa: SIM115  closed with this
        self._kind, self._new, self._error = kind, new, error
        self._stream = new()
        self._begun = True  # of the stream: an empty file is none
        self._out = memoryview(b"")
        self._packed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._out:
            packed = self._packed or self._file.read(_BLOCK)
            if not packed:
                if self._begun:
                    raise BrokenStream(f"its {self._kind} data ends too early")
                return 0
            self._unpack(packed)
        count = min(len(buffer), len(self._out))
        buffer[:count] = self._out[:count]
        self._out = self._out[count:]
        return count

    def _unpack(self, packed: bytes) -> None:
        try:
            self._out = memoryview(self._stream.decompress(packed))
        except self._error:
            raise BrokenStream(f"not {self._kind} data, or damaged") from None
        self._packed, self._begun = b"", True
        if self._stream.eof:
            # Zeros at the end fill a tape's block; anything else is another stream.
            self._packed = self._stream.unused_data.lstrip(b"\0")
            self._stream, self._begun = self._new(), bool(self._packed)

    def close(self) -> None:
        self._file.close()
        super().close()
