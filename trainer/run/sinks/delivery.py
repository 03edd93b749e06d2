"""Delivery of metrics.jsonl to sinks that are slow, may be away, or cannot remove records."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Protocol

import xxhash

from trainer.base.system import console
from trainer.base.system.files import atomic_write, digest, is_moved, parse_json_object, read_json_object
from trainer.run.sinks.sink import METRICS_FILE, LoggedRun, Sink

_CLOSE_S = 30.0
"""Maximum time that the end of a run waits for all services together."""
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0
_EMPTY = digest(b"")
_ALL = -1
"""Step after which all records are removed."""


class HistoryLost(Exception):
    """A service no longer has the history whose id is in its state, for example because a user has deleted it."""


class Service(Sink, Protocol):
    """A sink for a Delivery. Its methods run in a thread of their own and may raise any exception; the call is then repeated.
    After HistoryLost, the service gets all records again, in a new history.

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
        self.last_line = b""
        """The last one of them."""
        self.saved_state: dict[str, Any] | None = None
        """The service's state in the run folder. None: the file of the process before is untouched."""
        self.is_outdated = False
        """Whether the service must get all records again."""
        self.has_warned = False
        self.rewound, self.work, self.closing = threading.Event(), threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def write(self, record: dict[str, Any]) -> None:
        """Wake the thread, which reads the record from metrics.jsonl.

        The first record starts it. If it started earlier, the first batch would fork data workers while the thread imports a
        package, and locks that are held during a fork stay locked in the child.
        """
        self.work.set()
        if self.thread.ident is None:
            self.thread.start()

    def rewind(self, step: int) -> None:
        """Let the thread find out whether the service has records that metrics.jsonl no longer contains."""
        self.rewound.set()
        self.work.set()

    def close(self) -> None:
        """Let the thread deliver the rest and end. `wait` waits for it."""
        self.closing.set()
        self.work.set()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        if self.thread.is_alive():
            self.thread.join(max(timeout_s, 0.0))
        if self.thread.is_alive():
            console.warning(
                f"{self.name} has not taken all records of {METRICS_FILE} in {_CLOSE_S:.0f} s; "
                "it gets them if this run trains further"
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
                    if self.saved_state is not None:
                        self._save_state(is_complete=True)
                    return
                retry_s = _FIRST_RETRY_S
            except Exception as error:  # of a package that this project does not know
                self._prepare_retry(error)
                if self.closing.wait(retry_s):
                    time.sleep(_FIRST_RETRY_S)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)

    def _prepare_retry(self, error: Exception) -> None:
        if isinstance(error, HistoryLost):
            self.service.state.clear()
            self.is_outdated = True
            console.warning(f"{self.name}: {error}; a new history gets all records")
        elif not self.has_warned:
            console.warning(f"{self.name} cannot be written ({first_line(error)}); the run continues and tries again")
            self.has_warned = True
        self.work.set()

    def _deliver(self) -> None:
        """Bring the service up to date with the file."""
        self._check_position()
        while True:
            if self.is_outdated:
                self.service.rewind(_ALL)
                self._open_after(0, _EMPTY)
                self._save_state()
                self.is_outdated = False
            line = self._next_line()
            if line:
                if self.saved_state is None:
                    self._save_state()  # first: if the process is killed now, it is unknown what the service has stored
                self.service.write(json.loads(line))
                self.position += len(line)
                self.delivered.update(line)
                self.last_line = line
            if self.saved_state not in (None, self.service.state):
                self._save_state()
            if not line and not self.is_outdated:
                return

    def _check_position(self) -> None:
        """Find the position up to which the service has what the file contains, at the start and after a rewind."""
        if self.file is None:
            self.rewound.clear()
            self._continue_or_replace()
        elif self.rewound.is_set():
            self.rewound.clear()
            try:
                self.is_outdated |= not self._open_after(self.position, self.delivered.hexdigest())
            except OSError:
                self.rewound.set()
                raise

    def _continue_or_replace(self) -> None:
        """Continue the history of the process before, if the service has exactly what the file contains up to a position."""
        try:
            saved = read_json_object(self.state_path)
        except (OSError, ValueError):
            saved = {}
        self.service.state.update(saved.get("service", {}))
        # A process that was killed, or a service whose history cannot be continued, has left no digest.
        self.is_outdated = not self._open_after(saved.get("bytes", 0), saved.get("digest", ""))

    def _open_after(self, position: int, expected: str) -> bool:
        """Open the file after its first `position` bytes. Return whether they have this digest. If not, nothing changes."""
        file, delivered, line = self.path.open("rb"), xxhash.xxh3_128(), b""
        while file.tell() < position and (next_line := file.readline()):
            line = next_line
            delivered.update(line)
        if file.tell() != position or delivered.hexdigest() != expected:
            file.close()
            return False
        if self.file:
            self.file.close()
        self.file, self.position, self.delivered, self.last_line = file, position, delivered, line
        return True

    def _next_line(self) -> bytes:
        """Return the next complete line of the file, or b"" if there is none or the file must be read again."""
        if self.rewound.is_set():
            return b""
        self.file.seek(self.position)
        line = self.file.readline()
        if not line and is_moved(self.file) and self.path.exists():
            self._open_successor()
            self.file.seek(self.position)
            line = b"" if self.is_outdated else self.file.readline()
        return line if line.endswith(b"\n") else b""

    def _open_successor(self) -> None:
        """Open the file that has taken the name of the open one: the same records after a rewrite, or a new file that continues a
        moved one, for example by logrotate. If it is neither, the service is outdated."""
        with self.path.open("rb") as file:
            first = file.readline()
        if self._open_after(self.position, self.delivered.hexdigest()) or not first.endswith(b"\n"):
            return
        if parse_json_object(first)["step"] > parse_json_object(self.last_line)["step"]:
            self._open_after(0, _EMPTY)
        else:
            self.is_outdated = True

    def _save_state(self, is_complete: bool = False) -> None:
        """Write the service's state. is_complete: whether the service has certainly stored all that was delivered."""
        state = dict(self.service.state)
        content: dict[str, Any] = {"service": state}
        if is_complete and self.service.can_continue:
            content |= {"bytes": self.position, "digest": self.delivered.hexdigest()}
        self.state_path.parent.mkdir(exist_ok=True)
        atomic_write(self.state_path, json.dumps(content), durable=False)
        self.saved_state = state


def close_sinks(sinks: Sequence[Sink]) -> None:
    """Close all sinks. The deliveries end at the same time, because a scheduler soon kills a process that it told to end."""
    end = time.monotonic() + _CLOSE_S
    for sink in sinks:
        sink.close()
    for sink in sinks:
        if isinstance(sink, Delivery):
            sink.wait(end - time.monotonic())


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
