"""A server on this machine that shows the page of runs which are being written."""

import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

from trainer.base.config import ConfigError
from trainer.tools.report.page import Watch

HOST = "127.0.0.1"
_INTERVAL_S = 5.0
"""Time between two checks of a page for new records."""


class Pages:
    """The current page. It is built again when it is asked for and a file of its runs has changed."""

    def __init__(self, version: Callable[[], str], build: Callable[[Watch], str]):
        """Create the pages of the runs.

        Args:
            version: Returns a text that changes with the files.
            build: Returns the page.
        """
        self.version, self.build = version, build
        self.lock = Lock()
        self.built, self.page, self.interval_s = "", b"", _INTERVAL_S

    def current(self) -> bytes:
        with self.lock:
            version = self.version()
            if version != self.built:
                start = time.monotonic()
                self.page = self.build(Watch(version, self.interval_s)).encode()
                # Large runs take longer to read: building takes at most a tenth of the time.
                self.interval_s = max(_INTERVAL_S, 10 * (time.monotonic() - start))
                self.built = version
            return self.page


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, pages: Pages):
        """port: 0 for any free port. Raises ConfigError if the port cannot be used."""
        self.pages = pages
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError("", f"--port {port}: {error.strerror}") from None

    def handle_error(self, *request: Any) -> None:
        """Do nothing if a browser has closed its connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*request)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        # A page of another site could reach this server under a name of its own that leads to this machine.
        if self.headers.get("Host") not in {f"{host}:{self.server.server_port}" for host in (HOST, "localhost")}:
            self.send_error(403)
        elif self.path == "/":
            self._send("text/html", self.server.pages.current())
        elif self.path == "/version":
            self._send("text/plain", self.server.pages.version().encode())
        else:
            self.send_error(404)

    def _send(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Do nothing: requests are of no interest to the user."""
