"""Time in which a process runs."""

import threading
import time


class RunningClock:
    """Clock that does not count time in which this process is suspended, as by SIGSTOP, a scheduler or a frozen container.

    A process gets no message that it was suspended. The clock therefore counts only a part of the time between two readings that
    are far apart.
    """

    def __init__(self, interval_s: float):
        """interval_s: maximum time between two readings of a process that runs. A thread must read the clock so often."""
        self._longest_s = 2 * interval_s  # a process under load is late
        self._lock = threading.Lock()
        self._seconds, self._last = 0.0, time.monotonic()

    def now(self) -> float:
        """Return the seconds that this process has run since the clock was created."""
        with self._lock:
            now = time.monotonic()
            self._seconds += min(now - self._last, self._longest_s)
            self._last = now
            return self._seconds
