"""Delivery of metrics.jsonl to sinks that are slow, may be away, or cannot remove records."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from trainer.base.system import console
from trainer.base.system.files import atomic_write, digest, is_moved, read_json_object, require_regular
from trainer.base.system.run_files import METRICS_FILE
from trainer.base.system.spelling import first_line
from trainer.run.sinks.sink import Ending, LoggedRun, Sink

_CLOSE_S = 30.0
"""Maximum time that the end of a run waits for all services together."""
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0


class HistoryLost(Exception):
    """A service no longer has the history whose id is in its state, for example because a user has deleted it."""


class HistoryUnknown(Exception):
    """It is unknown what a service has stored, for example because its own process was killed."""


class Refused(Exception):
    """A service will not accept the records of this run, however often they are sent. The message is its reason."""


class Service:
    """Base class of the sinks of a Delivery, which calls the methods in a thread. They may raise any exception; the call is then
    repeated. After HistoryLost or HistoryUnknown, the service gets all records again, in a new history. After Refused, it gets no
    more."""

    can_continue = False
    """Whether another process can append to the history. If not, it replaces the history by a complete one."""
    most_records = 1
    """Maximum number of records of one write."""

    def __init__(self, run: LoggedRun):
        self.run = run
        self.ending = Ending.FINISHED
        """How the run has ended, when the history is closed."""
        self.state: dict[str, Any] = {}
        """What another process needs to continue or to replace the history, such as its id. It is kept in the run folder."""
        self.history: Any = None
        """The open history."""

    def write(self, record: dict[str, Any]) -> None:
        raise NotImplementedError

    def write_all(self, records: Sequence[dict[str, Any]]) -> None:
        """Write several records, if `most_records` allows it."""
        for record in records:
            self.write(record)

    def description(self) -> dict[str, Any]:
        """Return what the run is, or {} after a warning: metrics do not need it."""
        try:
            return self.run.description()
        except Exception as error:  # a user may have changed the files
            console.warning(f"{type(self).__name__} gets no description of the run ({first_line(error)})")
            return {}

    def restart(self) -> None:
        """Remove or mark the history that `state` describes, because another one replaces it. The state is then cleared."""
        raise NotImplementedError

    def close(self) -> None:
        """Make sure that all records are stored."""
        if self.history is not None:
            self.history.finish()
        self.history = None


class Backlog:
    """The lines of a growing file that a service does not have yet: those after the first `position` bytes, as long as these
    have the digest of what was delivered. A rollback or a resumed run removes lines, and later ones may take their place, so the
    number of bytes would not tell."""

    def __init__(self, path: Path):
        self.path = path
        self.lock = threading.Lock()  # after a rewind, no line is read before the digest was compared
        self.reset(0, "")

    def reset(self, position: int, delivered: str) -> None:
        """Continue after the first bytes, if they have this digest. None has the digest ""."""
        with self.lock:
            self.file: BinaryIO | None = None  # None: the digest must be compared
            self.position, self.digest = position, delivered
            self.lines: list[bytes] = []

    def rewind(self) -> None:
        with self.lock:
            self.file = None

    def next_lines(self, most: int) -> list[bytes] | None:
        """Return the next complete lines, at most so many (the same until `lines` is emptied), and None if the service must
        get all lines again."""
        with self.lock:
            if (self.file is None or is_moved(self.file)) and not self._open():
                return None
            if not self.lines:
                self.file.seek(self.position)
                lines = itertools.islice(self.file, most)
                self.lines = [*itertools.takewhile(lambda line: line.endswith(b"\n"), lines)]
                added = b"".join(self.lines)
                self.position += len(added)
                self.hash.update(added)
                self.digest = self.hash.hexdigest()
            return self.lines

    def _open(self) -> bool:
        require_regular(self.path)
        file, self.file, self.hash = self.path.open("rb"), None, xxhash.xxh3_128()
        while file.tell() < self.position and (line := file.readline()):
            self.hash.update(line)
        if self.hash.hexdigest() == self.digest:
            self.file = file
        return self.file is not None


class Delivery:
    """Copies the records of metrics.jsonl to a service, in a thread, so that training never waits for the service.

    The file is the buffer: what a service that is away has missed is read from it later, by this process or the next one. A
    record is delivered at least once. If the service has records that the file no longer contains, or if a killed process leaves
    unknown how much the service has stored, the service gets all records again.
    """

    def __init__(self, service: Callable[[LoggedRun], Service], run: LoggedRun):
        self.service = service(run)
        self.name = type(self.service).__name__
        self.backlog = Backlog(run.folder / METRICS_FILE)
        self.state_path = run.folder / "sinks" / f"{self.name.lower()}.json"
        self.saved: dict[str, Any] | None = None  # content of this file; None: it was not read yet
        self.warned: set[type[Exception]] = set()
        """Kinds of errors that the user knows about."""
        self.work, self.closing = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def write(self, record: dict[str, Any]) -> None:
        """Wake the thread, which reads the record from metrics.jsonl.

        The first record starts it, so that a run without steps left imports no package of a service and opens no history.
        """
        self.work.set()
        if self.thread.ident is None:
            self.thread.start()

    def rewind(self, step: int) -> None:
        """Let the thread find out whether the service has records that metrics.jsonl no longer contains."""
        self.backlog.rewind()
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
                    self._end()
                    return
                retry_s = _FIRST_RETRY_S
            except Refused as refusal:
                console.warning(
                    f"{self.name} will not accept the records of this run ({refusal}); {METRICS_FILE} has them"
                )
                self.warned.add(Refused)
                self._end_refused()
                return
            except Exception as error:  # of a package that this project does not know
                self._prepare_retry(error)
                if self.closing.wait(retry_s):
                    time.sleep(_FIRST_RETRY_S)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)

    def _prepare_retry(self, error: Exception) -> None:
        kind, warning = (
            Exception,
            f"{self.name} cannot be written ({first_line(error)}); the run continues and tries again",
        )
        if isinstance(error, HistoryLost | HistoryUnknown):
            kind, warning = type(error), f"{self.name}: {error}; a new history gets all records"
            self.backlog.reset(0, "")
            if kind is HistoryLost:  # an unknown one, which the state names, is removed or marked
                self.service.state.clear()
        if kind not in self.warned:
            console.warning(warning)
            self.warned.add(kind)
        self.work.set()

    def _end_refused(self) -> None:
        """Let the history that a service has show at least how the run has ended."""
        if self.service.state:
            self.closing.wait()
            with suppress(Exception):
                last = json.loads(self.backlog.path.read_bytes().splitlines()[-1])
                self.service.ending = last.get("ending", Ending.FINISHED)
                self.service.close()

    def _deliver(self) -> None:
        """Bring the service up to date with the file."""
        if self.saved is None:
            self._load_state()
        lines = None
        while lines != []:
            lines = self.backlog.next_lines(self.service.most_records)
            if lines is None:
                self.service.restart()
                self.service.state.clear()
                self.backlog.reset(0, digest(b""))
                self._save_state()
            elif lines:
                self._save_state()  # first: if the process is killed now, it is unknown what the service has stored
                records = [*map(json.loads, lines)]
                self.service.write_all(records)
                self.service.ending = records[-1].get("ending", Ending.FINISHED)
                self.backlog.lines = []
            if self.service.state != self.saved.get("service", {}):
                self._save_state()

    def _end(self) -> None:
        self.service.close()
        delivered = {"bytes": self.backlog.position, "digest": self.backlog.digest}
        self._save_state(**(delivered if self.service.can_continue else {}))

    def _load_state(self) -> None:
        """Read what the process before has left. One that was killed has left no digest."""
        try:
            self.saved = read_json_object(self.state_path)
        except (OSError, ValueError):
            self.saved = {}
        self.service.state.update(self.saved.get("service", {}))
        self.backlog.reset(self.saved.get("bytes", 0), self.saved.get("digest", ""))

    def _save_state(self, **delivered: Any) -> None:
        """Write the service's state if it has changed. delivered: bytes and digest of what the service has certainly stored."""
        content = {"service": dict(self.service.state), **delivered}
        if content != self.saved:
            self.state_path.parent.mkdir(exist_ok=True)
            atomic_write(self.state_path, json.dumps(content), durable=False)
            self.saved = content


def close_sinks(sinks: Sequence[Sink]) -> None:
    """Close all sinks. The deliveries end at the same time, because a scheduler soon kills a process that it told to end."""
    end = time.monotonic() + _CLOSE_S
    for sink in sinks:
        sink.close()
    for sink in sinks:
        if isinstance(sink, Delivery):
            sink.wait(end - time.monotonic())
