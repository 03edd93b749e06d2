"""The event file of TensorBoard."""

import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from trainer.base.system.files import is_moved
from trainer.base.system.run_files import CONFIG_FILE
from trainer.run.sinks.delivery import Service
from trainer.run.sinks.sink import LoggedRun, code_block, scalars, texts, timestamp_s

CHARTS = {
    "losses": {
        "loss": ["train/loss", "eval/.*/loss"],
        "perplexity": ["eval/.*/perplexity"],
        "gradient norm": ["train/grad_norm"],
        "learning rate": ["train/learning_rate"],
    },
    "tasks": {"score": ["task/.*/(acc.*|exact_match|chance)"], "bits per byte": ["task/.*/bits_per_byte"]},
    "speed": {
        "tokens per second": ["train/tokens_per_second"],
        "MFU in percent": ["train/mfu_percent"],
        "seconds of a step, by phase": ["train/.*_time_s"],
        "seconds of a save": ["checkpoint/.*"],
    },
    "memory": {"GiB": ["train/memory_.*"]},
}
"""Group in TensorBoard's tab Custom Scalars -> chart -> regular expressions of its curves."""


class TensorBoard(Service):
    """The only event file of a run that is not empty. It contains only steps that the run has kept, because TensorBoard's readers
    differ in what they hide: the default one shows a value of a repeated step until its tag gets a new value.

    SummaryWriter cannot do this: its thread ends with a traceback if the disk is full, and it names a file by the clock, so a
    running TensorBoard ignores a file that was written after the clock was set back.
    """

    can_continue = True

    def __init__(self, run: LoggedRun):
        super().__init__(run)  # the state is the time of the last record
        self.folder = run.folder / "tb"
        self.config = run.folder / CONFIG_FILE
        self.is_described = False
        self.file: BinaryIO | None = None

    def write(self, record: dict[str, Any]) -> None:
        # Imported here, because only one rank writes.
        from tensorboard.compat.proto.event_pb2 import Event

        if self.file is None or is_moved(self.file):
            self._open()
        self.state["time_s"] = max(timestamp_s(record), self.state.get("time_s", 0.0))  # the clock may go back
        if not self.is_described:
            self._describe(record["step"])
        event = Event(step=record["step"], wall_time=self.state["time_s"])
        for tag, value in scalars(record).items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._append(event)
        for tag, text in texts(record).items():
            self._append_tensor("text", tag, text.encode(), record["step"])

    def restart(self) -> None:
        """Begin a file without records, and empty the others. If they were deleted, a running TensorBoard would wait for them."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self.close()
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
        self.is_described = False
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if content:
            self._append(Event(wall_time=time.time(), **content))

    def _describe(self, step: int) -> None:
        """Append the configuration as text, once in each process, and the groups of curves."""
        from tensorboard.plugins.custom_scalar.layout_pb2 import Layout, MultilineChartContent

        if self.config.exists():  # a program may have no run folder
            self._append_tensor("text", CONFIG_FILE, code_block(self.config.read_text()).encode(), step)
        layout = Layout()
        for group, charts in CHARTS.items():
            category = layout.category.add(title=group)
            for title, tags in charts.items():
                category.chart.add(title=title, multiline=MultilineChartContent(tag=tags))
        self._append_tensor("custom_scalars", "custom_scalars__config__", layout.SerializeToString(), step)
        self.is_described = True

    def _append_tensor(self, plugin: str, tag: str, content: bytes, step: int) -> None:
        """Append a value that a plugin shows. tensorboard's own function for the groups of curves needs TensorFlow."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        event = Event(step=step, wall_time=self.state["time_s"])
        value = event.summary.value.add(tag=tag)
        value.metadata.plugin_data.plugin_name = plugin
        value.tensor.dtype = DT_STRING
        value.tensor.string_val.append(content)
        if plugin == "text":
            value.tensor.tensor_shape.dim.add(size=1)
        self._append(event)

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
