"""The queue of committed checkpoints that a thread uploads."""

import threading
import time
from collections.abc import Callable

from trainer.base.system import console
from trainer.base.system.store_errors import StoreError
from trainer.checkpoint.commit import SaveRequest
from trainer.checkpoint.lease import LeaseLost
from trainer.checkpoint.manifest import CorruptError

_RETRY_S = (2.0, 60.0)
"""Time before an upload is tried again: the first one, and the longest."""


class Uploads:
    """Uploads in the background, one after the other. What cannot be uploaded waits."""

    def __init__(self, upload: Callable[[SaveRequest], None], limit: int, mib_per_second: float):
        """Describe a queue.

        Args:
            upload: Uploads one checkpoint. Raises StoreError or OSError if it should be tried again, CorruptError if not, and
                LeaseLost.
            limit: Maximum number of checkpoints that wait.
            mib_per_second: Limit of the bandwidth. 0: none.
        """
        self.upload, self.limit, self.bytes_per_second = upload, limit, mib_per_second * 2**20
        self.failure = ""
        """Why nothing more is uploaded, or ""."""
        self.lock = threading.Condition()
        self.ended = threading.Event()
        self._pending: list[SaveRequest] = []
        self._current: SaveRequest | None = None
        self._free_from_s = 0.0
        """When the next bytes may be sent."""

    def start(self, work: Callable[[], None] | None = None) -> None:
        """Start a thread. A bug in it ends the run, which would wait for it. work: what it does (default: the uploads)."""

        def guarded() -> None:
            try:
                (work or self._run)()
            except LeaseLost as lost:
                self.fail(str(lost))
            except BaseException as error:
                self.fail(f"the mirror has failed: {error!r}")
                raise

        threading.Thread(target=guarded, name="mirror", daemon=True).start()

    def fail(self, reason: str) -> None:
        """End the uploads. The run ends at its next save."""
        with self.lock:
            if not self.failure:
                self.failure = reason
                console.warning(reason)
            self.ended.set()
            self.lock.notify_all()

    def add(self, request: SaveRequest) -> list[SaveRequest]:
        """Upload a checkpoint in the background. Return those that are given up, the oldest ones, because too many wait."""
        with self.lock:
            self._pending.append(request)
            given_up, self._pending = self._pending[: -self.limit], self._pending[-self.limit :]
            self.lock.notify_all()
            return given_up

    @property
    def waiting(self) -> list[SaveRequest]:
        with self.lock:
            return [request for request in (self._current, *self._pending) if request is not None]

    def _run(self) -> None:
        wait_s = _RETRY_S[0]
        while not self.ended.is_set():
            with self.lock:
                while self._current is None and not self._pending:
                    self.lock.wait()
                self._current = self._current or self._pending.pop(0)
            try:
                self.upload(self._current)
            except CorruptError as error:
                console.warning(f"step {self._current.step} is not mirrored: {error}")
            except (StoreError, OSError) as error:
                console.warning(f"step {self._current.step} is not mirrored yet: {error}")
                self.ended.wait(wait_s)
                wait_s = min(2 * wait_s, _RETRY_S[1])
                continue
            wait_s = _RETRY_S[0]
            with self.lock:
                self._current = None
                self.lock.notify_all()

    def pace(self, num_bytes: int) -> None:
        """Wait so that no more bytes are sent than the limit allows."""
        if self.bytes_per_second:
            now = time.monotonic()
            self._free_from_s = max(self._free_from_s, now - 1) + num_bytes / self.bytes_per_second
            time.sleep(max(0.0, self._free_from_s - now))

    def finish(self, timeout_s: float) -> list[int]:
        """Wait for the uploads, then end. Return the steps that are not uploaded."""
        end = time.monotonic() + timeout_s
        with self.lock:
            while (self._pending or self._current) and not self.failure and (left := end - time.monotonic()) > 0:
                self.lock.wait(left)
            self.ended.set()
            return [request.step for request in self.waiting]
