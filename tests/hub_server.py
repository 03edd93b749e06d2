"""A server on loopback that answers like the Hugging Face Hub: descriptions of models, and files with ETag and ranges."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Hub:
    """Models of the server, and what it does wrong."""

    address: str = ""
    models: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    """Name -> commit -> file -> content. The last commit is the branch main."""
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Name of a model -> HTTP status and X-Error-Code of every answer about it."""
    cut_after: dict[str, int] = field(default_factory=dict)
    """File -> number of bytes after which the connection is lost, once."""
    replaced: dict[str, bytes] = field(default_factory=dict)
    """File -> content that is sent instead of its own."""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of each request."""

    def publish(self, name: str, folder: Path, **others: bytes) -> str:
        """Add a commit with the files of a folder and return its hash."""
        files = {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()} | others
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.models.setdefault(name, {})[commit] = files
        return commit

    def sent(self, file: str) -> list[str]:
        """Return the range of each request for the content of a file."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith(f"/{file}")]


class HubHandler(BaseHTTPRequestHandler):
    server: "HubServer"
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(\w+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/(\w+)/(.+)", path)
        name, revision = (api[1], api[3] or "main") if api else (file[1], file[2]) if file else ("", "")
        commits = self.server.hub.models.get(name, {})
        commit = list(commits)[-1] if revision == "main" and commits else revision
        if name in self.server.hub.refusals:
            self.refuse(*self.server.hub.refusals[name])
        elif not commits:
            self.refuse(404, "RepoNotFound")
        elif commit not in commits:
            self.refuse(404, "RevisionNotFound")
        elif api:
            self.describe(name, commit, commits[commit], api[2] == "tree")
        elif file[3] not in commits[commit]:
            self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        else:
            self.send_file(file[3], commits[commit][file[3]], commit)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, b"{}", {"X-Error-Code": code})

    def describe(self, name: str, commit: str, files: dict[str, bytes], as_tree: bool) -> None:
        entries = []
        for file, content in files.items():
            entry = {"size": len(content), "type": "file", "path": file, "oid": git_sha1(content)}
            entry |= {"rfilename": file, "blobId": git_sha1(content)}
            if file.endswith(".safetensors"):
                oid = sha256(content)
                entry["lfs"] = {"oid": oid, "sha256": oid, "size": len(content), "pointerSize": 130}
            entries.append(entry)
        described = entries if as_tree else {"id": name, "modelId": name, "sha": commit, "siblings": entries}
        self.answer(200, json.dumps(described).encode(), {"Content-Type": "application/json"})

    def send_file(self, file: str, content: bytes, commit: str) -> None:
        etag = sha256(content) if file.endswith(".safetensors") else git_sha1(content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        content = self.server.hub.replaced.get(file, content)
        start, status = 0, 200
        if span := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start, status = int(span[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.answer(status, content[start:], headers, file)

    def answer(self, status: int, body: bytes, headers: dict[str, str], file: str = "") -> None:
        self.send_response(status)
        for header, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        limit = self.server.hub.cut_after.pop(file, None)
        self.wfile.write(body[:limit])
        if limit is not None:
            self.close_connection = True


class HubServer(ThreadingHTTPServer):
    hub: Hub


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()
    server = HubServer(("127.0.0.1", 0), HubHandler)
    server.hub = hub
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
