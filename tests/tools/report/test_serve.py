"""The server of a page that is watched."""

import json
import re
import threading
import urllib.error
import urllib.request

import pytest

from scripts.report import version_of
from tests.tools.report.run_folders import train_record, write_run
from trainer.base.config import ConfigError
from trainer.tools.report.page import render
from trainer.tools.report.run import read_run
from trainer.tools.report.serve import Pages, Server

pytest.importorskip("bokeh")


@pytest.fixture
def served(tmp_path):
    """The folder of a run and the server of its page."""
    folder = write_run(tmp_path / "run", [train_record(1, 3.25)])
    build = lambda watch: render([read_run(folder, "run")], [None], watch)  # noqa: E731
    with Server(0, Pages(lambda: version_of([folder]), build)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield folder, server
        server.shutdown()
        thread.join()


def get(server: Server, path: str = "", **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(server.url + path, headers=headers), timeout=10) as answer:
        return answer.read().decode()


def test_a_new_record_changes_the_version_and_the_page(served):
    folder, server = served
    page, version = get(server), get(server, "version")
    assert json.loads(re.search(r'"watch": (\{.*?\})', page)[1])["version"] == version
    assert "3.125" not in page
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(train_record(2, 3.125)) + "\n")
    assert get(server, "version") != version
    assert "3.125" in get(server)


def test_an_unchanged_run_is_not_read_again(served):
    server = served[1]
    first = server.pages.current()
    assert server.pages.current() is first


@pytest.mark.parametrize(("path", "headers", "code"), [("x", {}, 404), ("", {"Host": "evil.example"}, 403)])
def test_other_paths_and_names_of_the_machine_are_refused(served, path, headers, code):
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(served[1], path, **headers)
    assert refused.value.code == code


def test_a_port_that_is_taken_is_one_line(served):
    port = served[1].server_port
    with pytest.raises(ConfigError, match=f"^--port {port}: Address already in use$"):
        Server(port, served[1].pages)


def test_a_file_that_is_removed_is_another_version(served):
    folder, server = served
    before = server.pages.version()
    (folder / "config.toml").unlink()
    assert server.pages.version() != before
    assert "config.toml cannot be read" in get(server)


def test_the_server_is_reached_from_this_machine_only(served):
    assert served[1].server_address[0] == "127.0.0.1"
