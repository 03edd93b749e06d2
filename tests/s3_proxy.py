"""A proxy on the loopback between a run and an S3 server: requests that match a pattern fail in a given way."""

import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Exchange:
    """A request, whose answer a fault decides."""

    handler: "_Handler"
    body: bytes

    def forward(self) -> Answer:
        """Return the server's answer."""
        connection = http.client.HTTPConnection(self.handler.server.target, timeout=60)
        connection.putrequest(self.handler.command, self.handler.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.handler.headers.items():
            connection.putheader(name, value)
        connection.endheaders(self.body or None)
        response = connection.getresponse()
        answer = Answer(response.status, dict(response.getheaders()), response.read())
        connection.close()
        return answer

    def send(self, answer: Answer, length: int | None = None) -> None:
        """Send an answer. length: Content-Length, if not the number of bytes."""
        handler = self.handler
        handler.send_response_only(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                handler.send_header(name, value)
        is_head = handler.command == "HEAD"
        known = answer.headers.get("Content-Length", answer.headers.get("content-length", "0"))
        handler.send_header("Content-Length", known if is_head else str(length or len(answer.body)))
        handler.end_headers()
        if not is_head:
            handler.wfile.write(answer.body)

    def reset(self) -> None:
        self.handler.wfile.flush()
        self.handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.handler.connection.close()
        self.handler.close_connection = True


Act = Callable[[Exchange], None]


def passes(exchange: Exchange) -> None:
    exchange.send(exchange.forward())


def resets(exchange: Exchange) -> None:
    exchange.reset()


def loses_answer(exchange: Exchange) -> None:
    """The server has done what was asked, but nobody learns it."""
    exchange.forward()
    exchange.reset()


def slow(seconds: float) -> Act:
    def act(exchange: Exchange) -> None:
        time.sleep(seconds)
        passes(exchange)

    return act


def cut_at(num_bytes: int) -> Act:
    def act(exchange: Exchange) -> None:
        answer = exchange.forward()
        whole = len(answer.body)
        answer.body = answer.body[:num_bytes]
        exchange.send(answer, whole)
        exchange.reset()

    return act


def truncated(exchange: Exchange) -> None:
    """The content has lost its end, and all headers agree with that."""
    answer = exchange.forward()
    answer.body = answer.body[:-7]
    exchange.send(answer)


def flipped(exchange: Exchange) -> None:
    answer = exchange.forward()
    middle = len(answer.body) // 2
    answer.body = answer.body[:middle] + bytes([answer.body[middle] ^ 1]) + answer.body[middle + 1 :]
    exchange.send(answer)


def says(status: int, code: str = "", **headers: str) -> Act:
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>' if code else ""
    answer = Answer(status, {name.replace("_", "-"): value for name, value in headers.items()}, body.encode())
    return lambda exchange: exchange.send(answer)


def replaced_by(body: bytes) -> Act:
    def act(exchange: Exchange) -> None:
        answer = exchange.forward()
        answer.body = body
        exchange.send(answer)

    return act


@dataclass
class S3Proxy:
    address: str = ""
    fault: Act = passes
    pattern: str = "(?!)"
    """Of METHOD PATH?QUERY of the requests that fail."""
    skip: int = 0
    """Number of matching requests that pass first."""
    times: int = 10**9
    """Number of requests that fail."""
    requests: list[str] = field(default_factory=list)
    faults: int = 0
    """Number of requests that have failed."""
    on_request: Callable[[str], None] = lambda request: None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def choose(self, request: str) -> Act:
        self.on_request(request)
        with self._lock:
            self.requests.append(request)
            if not re.search(self.pattern, request):
                return passes
            self.skip -= 1
            self.times -= self.skip < 0
            fails = self.skip < 0 <= self.times
            self.faults += fails
            return self.fault if fails else passes


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    target: str
    proxy: S3Proxy

    def handle_error(self, *_: object) -> None:
        """A client that was killed, or whose connection was reset, is no error of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.proxy.choose(f"{self.command} {self.path}")(Exchange(self, body))

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _do


@contextmanager
def s3_proxy(endpoint: str) -> Iterator[S3Proxy]:
    """Context manager with a proxy in front of the server at this address."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.target = urlsplit(endpoint).netloc
        server.proxy = S3Proxy(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.proxy
        server.shutdown()
