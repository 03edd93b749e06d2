"""Standard streams."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

BEGIN = "from trainer.base.system.streams import open_standard_streams, print_error; open_standard_streams()\n"


def run(program, closed=(), **variables):
    def close():
        for descriptor in closed:
            os.close(descriptor)

    command = [sys.executable, "-c", BEGIN + program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(command, cwd=ROOT, env=os.environ | variables, preexec_fn=close, timeout=60, **pipes)


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (1, 2), (0, 1, 2)])
def test_a_file_does_not_get_the_descriptor_of_a_closed_stream(closed, tmp_path):
    program = f"""
import os, sys
with open({str(tmp_path / "file")!r}, "w") as file:
    assert file.fileno() > 2
    print("out"), print_error("err"), os.system("echo child; echo child >&2")
    assert sys.stdin.read() == "" and not sys.stdout.isatty()
    file.write("content")
"""
    done = run(program, closed)
    assert (done.returncode, (tmp_path / "file").read_text()) == (0, "content")
    # Standard output is buffered, so that the line of the child may be the first.
    lines = [sorted(stream.split(b"\n")) for stream in (done.stdout, done.stderr)]
    assert lines == [[b""] if n in closed else sorted([b"", b"child", name]) for n, name in ((1, b"out"), (2, b"err"))]


def test_a_console_that_cannot_encode_a_name_shows_its_escape_sequences():
    done = run("print('ti\\xf1y \\U0001f600')", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, b"ti\\xf1y \\U0001f600\n")
