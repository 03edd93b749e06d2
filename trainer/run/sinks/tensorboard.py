"""The event file of TensorBoard."""

import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from trainer.run.sinks.sink import LoggedRun, scalars, timestamp_s
from trainer.system.files import is_moved


class TensorBoard:
    """The only event file of a run that is not empty. It contains only steps that the run has kept, because TensorBoard's readers
    differ in what they hide: the default one shows a value of a repeated step until its tag gets a new value.

    SummaryWriter cannot do this: its thread ends with a traceback if the disk is full, and it names a file by the clock, so a
    running TensorBoard ignores a file that was written after the clock was set back.
    """

    can_continue = True

    def __init__(self, run: LoggedRun):
        self.folder = run.folder / "tb"
        self.state: dict[str, Any] = {}  # the time of the last record
        self.file: BinaryIO | None = None

    def write(self, record: dict[str, Any]) -> None:
        # Imported here, because only one rank writes.
        from tensorboard.compat.proto.event_pb2 import Event

        if self.file is None or is_moved(self.file):
            self._open()
        self.state["time_s"] = max(timestamp_s(record), self.state.get("time_s", 0.0))  # the clock may go back
        event = Event(step=record["step"], wall_time=self.state["time_s"])
        for tag, value in scalars(record).items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._append(event)

    def rewind(self, step: int) -> None:
        """Begin a file without records, and empty the others. If they were deleted, a running TensorBoard would wait for them."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self.close()
        self.state.clear()
        self.folder.mkdir(exist_ok=True)
        old = self._files()
        self._begin(old, session_log=SessionLog(status=SessionLog.START))  # a running TensorBoard forgets the others
        for path in old:
            os.truncate(path, 0)

    def close(self) -> None:
        if self.file:
            self.file.close()
        self.file = None

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*tfevents*"))  # TensorBoard reads them in this order

    def _open(self) -> None:
        """Open the last file, or a new one if there is none."""
        self.close()
        self.folder.mkdir(exist_ok=True)
        if files := self._files():
            self.file = files[-1].open("ab")
        else:
            self._begin([])

    def _begin(self, old: list[Path], **content: Any) -> None:
        """Open a new file. A running TensorBoard ignores one whose name is not the last, and the clock may have been set back.

        Args:
            old: The other files.
            content: Fields of the event that follows the file's version.
        """
        from tensorboard.compat.proto.event_pb2 import Event

        times = [int(match[1]) for path in old if (match := re.search(r"tfevents\.(\d+)", path.name))]
        time_s = max(int(time.time()), max(times, default=0) + 1)
        path = self.folder / f"events.out.tfevents.{time_s:010}.{socket.gethostname()}"
        self.file = path.open("ab")
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if content:
            self._append(Event(wall_time=time.time(), **content))

    def _append(self, event: Any) -> None:
        """Append an event at once. If this fails, remove what was written of it, because a reader stops at a damaged event."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        size = self.file.tell()
        try:
            RecordWriter(self.file).write(event.SerializeToString())
            self.file.flush()
        except OSError:
            path = self.file.name
            with suppress(OSError):
                self.close()
            self.file = None
            os.truncate(path, size)
            raise
