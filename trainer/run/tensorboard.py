"""Files that TensorBoard reads."""

import socket
import struct
import time
from pathlib import Path

import google_crc32c
from tensorboard.compat.proto.event_pb2 import Event, SessionLog


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


def _checksum(data: bytes) -> bytes:
    """Return the four bytes after the length or data of a TFRecord: its CRC-32C, rotated and with an offset."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)
