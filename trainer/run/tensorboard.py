"""The file that TensorBoard reads."""

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from trainer.system.files import require_regular, temporary_path

_FRAME_BYTES = 16
"""Bytes of a record beside its event: 8 of the length, 4 of the length's checksum, 4 of the event's checksum."""
_UNFINISHED = "events"
"""Name of an unfinished file, which TensorBoard ignores, without its suffix."""


class EventFile:
    """The only event file of a run that is not empty. It contains only the steps that the run has kept, because TensorBoard's
    readers differ in what they hide: the default one shows a value of a repeated step until its tag gets a new value.

    Each step is written at once. TensorBoard's own writer has a thread, which loses steps while the disk is full.
    """

    def __init__(self, folder: Path, last_step: float, buffer_bytes: int):
        """Open the file to append to it. Raise OSError if this fails.

        Args:
            folder: contains the file, and is created if necessary.
            last_step: later steps are removed.
            buffer_bytes: size of the file's buffer.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(f"{_UNFINISHED}.tmp-*"):
            unfinished.unlink()
        paths = sorted(folder.glob("*tfevents*"))  # TensorBoard reads them in this order
        kept, complete = _read(paths, last_step)
        self._wall_time = max((event.wall_time for event, _ in kept), default=0.0)
        path = paths[-1] if complete else _replace(folder, paths, [record for _, record in kept])
        self.file = path.open("ab", buffer_bytes)
        self._writer = RecordWriter(self.file)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Write the values of a step. scalars: tag -> value. Raise OSError if they cannot be written."""
        self._wall_time = max(time.time(), self._wall_time)  # the clock may have been set back
        event = Event(step=step, wall_time=self._wall_time)
        for tag, value in scalars.items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _read(paths: list[Path], last_step: float) -> tuple[list[tuple[Event, bytes]], bool]:
    """Return the events up to last_step with their records, and whether they are the content of the last file, which is intact,
    and all other files are empty."""
    kept, complete = [], bool(paths)
    for path in paths:
        require_regular(path)
        size = 0
        for event, record in _records(path.read_bytes()):
            size += len(record)
            if (
                event.session_log.status == SessionLog.START
            ):  # this file replaces what older files say about these steps
                kept = [(e, r) for e, r in kept if e.step < event.step]
            elif event.step > last_step:
                complete = False
            elif not event.file_version:
                kept.append((event, record))
        complete = complete and size == path.stat().st_size and (size > 0) == (path == paths[-1])
    return kept, complete


def _records(content: bytes) -> Iterator[tuple[Event, bytes]]:
    """Yield each event with its complete record, up to the end or to a damaged record: a killed process leaves an incomplete one.
    The checksums of events are not compared, which would take 0.2 ms for each step."""
    start = 0
    while start + _FRAME_BYTES <= len(content):
        length, checksum = content[start : start + 8], int.from_bytes(content[start + 8 : start + 12], "little")
        stop = start + _FRAME_BYTES + int.from_bytes(length, "little")
        if masked_crc32c(length) != checksum or stop > len(content):
            return
        try:
            yield Event.FromString(content[start + 12 : stop - 4]), content[start:stop]
        except DecodeError:
            return
        start = stop


def _replace(folder: Path, paths: list[Path], records: list[bytes]) -> Path:
    """Move the records of a folder's files to a new file and return its path. The other files become empty: if they were deleted,
    a running TensorBoard would wait for them. If this process is killed, they keep records that the new file repeats."""
    timestamps = [int(match[1]) for path in paths if (match := re.search(r"tfevents\.(\d+)", path.name))]
    # A running TensorBoard ignores a new file whose name is not the last one. The clock may have been set back.
    timestamp = max(int(time.time()), max(timestamps, default=0) + 1)
    path = folder / f"events.out.tfevents.{timestamp:010}.{socket.gethostname()}"
    unfinished = temporary_path(folder / _UNFINISHED)
    try:
        with unfinished.open("wb") as file:
            writer, now = RecordWriter(file), time.time()
            writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
            start = SessionLog(status=SessionLog.START)  # a running TensorBoard forgets the replaced files
            writer.write(Event(wall_time=now, session_log=start).SerializeToString())
            file.writelines(records)
        unfinished.rename(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    for old in paths:
        with suppress(OSError):  # the new file replaces its content anyway
            os.truncate(old, 0)
    return path
