"""Delivery of metrics.jsonl to sinks that are slow, may be away, or cannot remove records."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

import xxhash

from trainer.run.sinks.sink import METRICS_FILE, LoggedRun, Sink
from trainer.system import console
from trainer.system.files import atomic_write, is_moved, read_json_object

_CLOSE_S = 30.0
"""Maximum time that the end of a run waits for a service."""
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0
_ALL = -1
"""Step after which all records are removed."""


class Service(Sink, Protocol):
    """A sink for a Delivery. Its methods run in a thread of their own and may raise any exception; the call is then repeated.

    `rewind` is only asked to remove everything; the kept records are then written again. A service without a way to remove
    values begins a new history that replaces the old one.
    """

    state: dict[str, Any]
    """What another process needs to continue or to replace the history, such as its id. It is kept in the run folder."""
    can_continue: bool
    """Whether another process can append to the history. If not, it replaces the history by a complete one."""


class Delivery:
    """Copies the records of metrics.jsonl to a service, in a thread, so that training never waits for the service.

    The file is the buffer: what a service that is away has missed is read from it later, by this process or the next one.
    The service shows the content of the file up to some position. If a rollback, or a resumed run, removed records before this
    position, or if a killed process leaves unknown how much the service has stored, the service gets all records again.
    """

    def __init__(self, service: Callable[[LoggedRun], Service], run: LoggedRun):
        self.service = service(run)
        self.name = type(self.service).__name__
        self.path = run.folder / METRICS_FILE
        self.state_path = run.folder / "sinks" / f"{self.name.lower()}.json"
        self.file: BinaryIO | None = None
        self.delivered = xxhash.xxh3_128()
        """Hash of the lines that the service has."""
        self.position = 0
        """Number of bytes of these lines."""
        self.saved_state: dict[str, Any] | None = None
        self.is_outdated = False
        """Whether the service must get all records again."""
        self.has_warned = False
        self.rewound, self.work, self.closing = threading.Event(), threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def write(self, record: dict[str, Any]) -> None:
        """Wake the thread, which reads the record from metrics.jsonl."""
        self.work.set()

    def rewind(self, step: int) -> None:
        """Let the thread find out whether the service has records that metrics.jsonl no longer contains."""
        self.rewound.set()
        self.work.set()
        if not self.thread.is_alive():
            self.thread.start()

    def close(self) -> None:
        self.closing.set()
        self.work.set()
        if self.thread.is_alive():
            self.thread.join(_CLOSE_S)
        if self.thread.is_alive():
            console.warning(
                f"{self.name} has not taken all records in {_CLOSE_S:.0f} s; it gets them if the run is resumed"
            )

    def _run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            self.work.wait()
            self.work.clear()
            is_last = self.closing.is_set()  # read first: a record precedes the end
            try:
                self._deliver()
                if is_last:
                    self.service.close()
                    self._save_state(is_complete=True)
                    return
                retry_s = _FIRST_RETRY_S
            except Exception as error:  # of a package that this project does not know
                if not self.has_warned:
                    lines = str(error).strip().splitlines() or [type(error).__name__]
                    console.warning(f"{self.name} cannot be written ({lines[0]}); the run continues and tries again")
                self.has_warned = True
                self.work.set()
                if self.closing.wait(retry_s):
                    time.sleep(_FIRST_RETRY_S)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)

    def _deliver(self) -> None:
        """Bring the service up to date with the file."""
        if self.saved_state is None:
            self._continue_or_replace()
        elif self.rewound.is_set():
            self.rewound.clear()
            self.is_outdated |= not self._open_after(self.position, self.delivered.hexdigest())
        if self.is_outdated:
            self.service.rewind(_ALL)
            self._open_after(0, xxhash.xxh3_128().hexdigest())
            self._save_state()
            self.is_outdated = False
        while line := self._next_line():
            self.service.write(json.loads(line))
            self.position += len(line)
            self.delivered.update(line)
            if self.service.state != self.saved_state:
                self._save_state()

    def _continue_or_replace(self) -> None:
        """Continue the history of the process before, if the service has exactly what the file contains up to a position."""
        self.rewound.clear()
        try:
            saved = read_json_object(self.state_path)
        except (OSError, ValueError):
            saved = {}
        self.service.state.update(saved.get("service", {}))
        # A process that was killed, or a service whose history cannot be continued, has left no digest.
        self.is_outdated = not self._open_after(saved.get("bytes", 0), saved.get("digest", ""))
        self._save_state()

    def _open_after(self, position: int, digest: str) -> bool:
        """Open the file after its first `position` bytes. Return whether they have the digest. If not, nothing changes."""
        file, delivered = self.path.open("rb"), xxhash.xxh3_128()
        while chunk := file.read(min(2**20, position - file.tell())):
            delivered.update(chunk)
        if file.tell() != position or delivered.hexdigest() != digest:
            file.close()
            return False
        if self.file:
            self.file.close()
        self.file, self.position, self.delivered = file, position, delivered
        return True

    def _next_line(self) -> bytes:
        """Return the next complete line of the file, or b"" if there is none or the file must be read again."""
        if self.rewound.is_set():
            return b""
        self.file.seek(self.position)
        line = self.file.readline()
        if not line and is_moved(self.file):  # for example by logrotate: a new file continues it
            self._open_after(0, xxhash.xxh3_128().hexdigest())
            line = self.file.readline()
        return line if line.endswith(b"\n") else b""

    def _save_state(self, is_complete: bool = False) -> None:
        """Write the service's state. is_complete: whether the service has certainly stored all that was delivered."""
        self.saved_state = dict(self.service.state)
        content: dict[str, Any] = {"service": self.saved_state}
        if is_complete and self.service.can_continue:
            content |= {"bytes": self.position, "digest": self.delivered.hexdigest()}
        self.state_path.parent.mkdir(exist_ok=True)
        atomic_write(self.state_path, json.dumps(content), durable=False)
