"""Files that TensorBoard reads."""

import socket
import struct
import time
from functools import cache
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

_POLYNOMIAL = 0x82F63B78
"""Polynomial of CRC-32C, with its bits reversed."""


class EventFile:
    """File of scalars. Each step is written at once, without TensorBoard's writer: the training loop would wait longer for its
    thread to release Python's lock, and for its checksums, than it waits for the write."""

    def __init__(self, folder: Path, first_step: int, buffer_bytes: int):
        """first_step: TensorBoard ignores the values of this step and of later ones in older files. buffer_bytes: size of the
        file's buffer. Raise OSError if the file cannot be created."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self._file = path.open("xb", buffer_bytes)
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.write(length + _checksum(length) + data + _checksum(data))
        self._file.flush()

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Write the values of a step. scalars: tag -> value. Raise OSError if they cannot be written."""
        event = Event(step=step)
        for tag, value in scalars.items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._add(event)

    def close(self) -> None:
        self._file.close()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (RFC 3720, appendix B.4) of at least four bytes."""
    values = np.frombuffer(data, np.uint8).copy()
    values[:4] ^= 0xFF  # the same as the initial value of the CRC
    following = np.arange(len(values))[::-1]
    return int(np.bitwise_xor.reduce(_contributions(1 << len(values).bit_length())[following, values])) ^ 0xFFFFFFFF


@cache
def _contributions(count: int) -> np.ndarray:
    """Return what a byte contributes to the CRC, (count, 256): by the number of bytes that follow, and by its value."""
    last = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        last = (last >> 1) ^ np.where(last & 1, _POLYNOMIAL, 0).astype(np.uint32)
    table, rows = last, [last]
    for _ in range(count - 1):
        last = (last >> 8) ^ table[last & 0xFF]
        rows.append(last)
    return np.stack(rows)


def _checksum(data: bytes) -> bytes:
    """Return the checksum of a record's length or data: the CRC, rotated and with an offset, in four bytes."""
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)
