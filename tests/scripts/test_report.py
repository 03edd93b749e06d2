"""scripts/report.py: the file it writes, and its messages."""

import os
import sys

import pytest

from tests.commands import run_script
from tests.conftest import ROOT
from tests.tools.report.run_folders import train_record, write_run

pytest.importorskip("bokeh")


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", [train_record(1, 3.25), train_record(2, 3.125)])


def report(*words):
    done = run_script("scripts/report.py", *words)
    return done.returncode, done.stdout, done.stderr


def test_the_page_is_written_into_the_folder_of_the_first_run_and_replaced_later(run, tmp_path):
    other = write_run(tmp_path / "other", [train_record(1, 2.0)], ["--optimizer.lr", "0.5"])
    for _ in range(2):
        assert report(run, other, "--no-plan") == (0, f"{run}/report.html\n", "")
    page = (run / "report.html").read_text()
    assert "Report of run, other" in page and "3.125" in page and "0.5" in page


def test_a_checkpoint_marks_its_step(run, tmp_path):
    for step in (1, 2):
        checkpoint = run / "checkpoints" / f"step-{step:08}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").touch()
        (checkpoint / "train_state.json").write_text('{"best": ["held_out/0/", 1, 3.25]}')
    output, expected = tmp_path / "report.html", [2, 1, 1]
    for path, folder in ((checkpoint, ROOT), (f"{run}@best", ROOT), ("../step-00000001", checkpoint)):
        step = expected.pop(0)
        assert run_script("scripts/report.py", path, "--no-plan", "--output", output, folder=folder).returncode == 0
        page = output.read_text()
        assert f"<bdi>run</bdi>: the vertical line marks the checkpoint of step {step}." in page
        assert page.count(f'"location":{step},') or page.count(f'"location": {step},') >= 1
    assert report(run, "--no-plan")[0] == 0 and "the vertical line" not in (run / "report.html").read_text()


def test_a_folder_that_cannot_be_written_is_one_line(run, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write everywhere
    assert report(run, "--no-plan") == (2, "", f"{run} cannot be written; name another file with --output\n")


def test_no_other_file_is_replaced(run, tmp_path):
    (tmp_path / "notes.html").write_text("my notes")
    code, _, error = report(run, "--no-plan", "--output", tmp_path / "notes.html")
    assert (code, error) == (2, f"--output {tmp_path}/notes.html: exists and is not a report; choose another name\n")
    assert (tmp_path / "notes.html").read_text() == "my notes"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{folder}"], "{folder} is not the folder of a run: it has no metrics.jsonl; runs in it: run"),
        (["{folder}/no"], "{folder}/no: no such folder"),
        (["{folder}/no@best"], "{folder}/no@best: no such folder"),
        (["{folder}/run@best"], "{folder}/run/checkpoints contains no checkpoint"),
        (["{folder}/run", "s3://"], "argument RUN: s3://: names no bucket"),
        (["{folder}/run", "{folder}/run"], "{folder}/run: the same run is given twice"),
        (["{folder}/run"] * 33, "33 runs: a page shows at most 32"),
        (["{folder}/run", "--port", "80"], "--port 80: requires --watch"),
        (["{folder}/run", "--watch", "--output", "x.html"], "--watch: serves the page and writes no file; remove --output"),
        (["{folder}/run", "--output", "{folder}/no/x.html"], "argument --output: {folder}/no: no such folder"),
        ([], "the following arguments are required: RUN"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_line(run, tmp_path, words, message):
    code, out, error = report(*(word.format(folder=tmp_path) for word in words))
    assert (code, out, error) == (2, "", message.format(folder=tmp_path) + "\n")


def test_a_missing_package_is_one_line(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh", None)
    code, _, error = report(run, "--no-plan")
    assert (code, error) == (2, f"needs the package bokeh: {sys.executable} -m pip install bokeh\n")
    assert not (run / "report.html").exists()


def test_a_file_of_the_run_that_is_a_folder_is_one_line(run):
    (run / "config.toml").unlink()
    (run / "config.toml").mkdir()
    assert report(run, "--no-plan") == (2, "", f"{run}/config.toml is a folder, not a file\n")
