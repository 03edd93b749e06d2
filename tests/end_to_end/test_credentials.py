"""Credentials in addresses appear in no message and no file of a run, nor in what services get."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_python_page import OF_TORCHRUN
from tests.training_runs import in_folder
from trainer.base.system.streams import without_credentials

SECRET = "hunter2"
ADDRESSES = {
    "http://127.0.0.1:5000/x": "http://127.0.0.1:5000/x",
    "sqlite:///a@b.db": "sqlite:///a@b.db",
    "https://host:80/path@v1": "https://host:80/path@v1",
    "mail me@host now": "mail me@host now",
    "http://user:hunter2@host:5000": "http://...@host:5000",
    "postgresql+psycopg2://u:hunter2@h/db?sslmode=x": "postgresql+psycopg2://...@h/db?sslmode=x",
    "http://hunter2@host, and more": "http://...@host, and more",
    "http://u:a@hunter2@host": "http://...@host",
    "http://u:a/hunter2@host": "http://...@host",
    "http://u:a?hunter2#@host": "http://...@host",
    "https://host/a?access_token=hunter2&x=1": "https://host/a?access_token=...&x=1",
    "https://host/a?x=1&X-Amz-Signature=hunter2": "https://host/a?x=1&X-Amz-Signature=...",
    "https://host/a?tokenizer=llama&monkey=1&design=2&signal=3": "https://host/a?tokenizer=llama&monkey=1&design=2&signal=3",
    "https://host/a?apiKey=hunter2&tokens=hunter2": "https://host/a?apiKey=...&tokens=...",
    "s3://b/k?AWSAccessKeyId=hunter2 'end'": "s3://b/k?AWSAccessKeyId=... 'end'",
    'uri = "http://u:hunter2@h"\nnext = "http://hunter2@i"': 'uri = "http://...@h"\nnext = "http://...@i"',
}


@pytest.mark.parametrize("text", ADDRESSES)
def test_credentials_are_removed_from_a_text(text):
    assert without_credentials(text) == ADDRESSES[text]
    assert SECRET not in without_credentials(text)


def found(folder: Path) -> list[str]:
    """Return the files below a folder that contain the secret."""
    return [str(file) for file in folder.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]


def command(argv, folder, **variables):
    kept = {name: value for name, value in os.environ.items() if name not in OF_TORCHRUN}
    local = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio")}
    words = [sys.executable, str(ROOT / "train.py"), *map(str, argv)]
    return subprocess.run(words, env=kept | local | variables, cwd=folder, capture_output=True, text=True, timeout=300)


def test_no_file_and_no_line_of_a_run_contains_a_password(tiny, tmp_path):
    services = [name for name in ("wandb", "mlflow", "trackio") if find_spec(name)]
    sinks = ",".join(["console", "jsonl", "tensorboard", *services])
    argv = [*tiny, *in_folder(tmp_path / "run"), "--training.steps", "2", "--metrics.sinks", sinks]
    argv += ["--checkpoint.export_huggingface", "true"]
    address = f"http://user:{SECRET}@127.0.0.1:1/"
    if "mlflow" in services:
        argv += ["--metrics.mlflow_tracking_uri", address]
    done = command(argv, tmp_path, MLFLOW_TRACKING_URI=address, HF_ENDPOINT=address)
    assert done.returncode == 0, done.stderr
    assert ("MLflow cannot be written" in done.stderr) == ("mlflow" in services)
    assert SECRET not in done.stdout + done.stderr
    assert found(tmp_path) == []
    assert "...@127.0.0.1" in (tmp_path / "run" / "config.toml").read_text() or "mlflow" not in services


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--metrics.sinks", "jsonl,mlflow"],
            "MLFLOW_TRACKING_URI=htp://...@127.0.0.1:1/: htp: is no scheme that MLflow knows",
        ),
        (["--from", "nobody/nothing"], "htp://...@127.0.0.1:1"),
        (
            ["--metrics.mlflow_tracking_uri", f"http://u:{SECRET}@h"],
            "--metrics.mlflow_tracking_uri http://...@h: has an effect only",
        ),
    ],
)
def test_no_message_contains_a_password(tiny, tmp_path, words, line):
    address = f"htp://user:{SECRET}@127.0.0.1:1/"
    done = command(
        [*tiny, *in_folder(tmp_path / "run"), *words], tmp_path, MLFLOW_TRACKING_URI=address, HF_ENDPOINT=address
    )
    assert done.returncode == 2 and line in done.stderr and SECRET not in done.stdout + done.stderr, done.stderr
