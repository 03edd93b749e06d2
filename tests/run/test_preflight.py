"""The order of the checks before the first step."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from trainer.base.config import ConfigError
from trainer.base.config.load import load_config
from trainer.base.config.schema.condition import Known
from trainer.base.config.schema.facts import FLOAT8_DEVICE, FLOAT8_GPU
from trainer.run.preflight import check_run
from trainer.run.resolve import resolve
from trainer.runtime import device


def error_of_checks(argv):
    """Return the setting and the message of the error that check_run finds without data."""
    config = load_config(argv)
    with pytest.raises(ConfigError) as error:
        check_run(config, resolve(config, 1), None, lambda *_: pytest.fail("prepares data"), [], torch.device("cpu"))
    return error.value.key, error.value.message


@pytest.mark.parametrize(
    ("flags", "key", "message"),
    [
        (["--data.mixture", "0: wb=1"], "data.mixture", "did you mean 'web'"),
        (
            ["--evaluation.keep_best_on", "wb"],
            "evaluation.keep_best_on",
            "available: web, books, idioms; did you mean 'web'?",
        ),
        (
            ["--evaluation.datasets.web", "text:{words}"],
            "evaluation.datasets.web",
            "this name is taken by the held-out",
        ),
    ],
)
def test_a_wrong_name_is_found_before_data_are_prepared(ranks, tmp_path, flags, key, message):
    (tmp_path / "words.txt").write_text("some words")
    argv = ["--config", "train_configs/debug.toml", "--data.datasets.web", "text:{words}"]
    argv += ["--evaluation.datasets.books", "text:{words}", *flags]
    argv = [word.format(words=tmp_path / "words.txt") for word in argv]
    ((found, text),) = ranks(1).run(error_of_checks, argv)
    assert found == key and message in text


def error_without_float8(argv):
    missing = {FLOAT8_DEVICE: Known(False, "this GPU has none"), FLOAT8_GPU: Known(True)}
    with mock.patch.object(device, "float8_facts", lambda choice: missing):
        return error_of_checks(argv)


def test_float8_is_refused_in_a_program_too(ranks):
    ((key, text),) = ranks(1).run(
        error_without_float8, ["--training.float8", "tensorwise", "--model.overrides.hidden_dim", "384"]
    )
    assert key == "training.float8" and "(this GPU has none)" in text


def error_of_entry(entry):
    config = load_config([])
    config = replace(config, data=replace(config.data, datasets={"web": entry}))
    with pytest.raises(ConfigError) as error:
        check_run(config, resolve(config, 1), None, lambda *_: pytest.fail("prepares data"), [], torch.device("cpu"))
    return error.value.key, error.value.message


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("web.jsonl", "expected TYPE:PATH"),
        ("jsnl:web", "did you mean 'jsonl'?"),
        ("text:", "expected a path after text:"),
        ("python_stdlib:/x", "python_stdlib does not take a path"),
        ("s3://bucket/x", "expected TYPE:PATH"),
    ],
)
def test_an_entry_of_a_program_is_checked_as_one_of_a_file(ranks, entry, message):
    ((key, text),) = ranks(1).run(error_of_entry, entry)
    assert key == "data.datasets.web" and message in text
