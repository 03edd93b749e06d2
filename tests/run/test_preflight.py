"""The order of the checks before the first step."""

import pytest
import torch

from trainer.base.config import ConfigError
from trainer.base.config.load import load_config
from trainer.run.preflight import check_run
from trainer.run.resolve import resolve


def error_of_checks(argv):
    """Return the setting and the message of the error that check_run finds without data."""
    config = load_config(argv)
    with pytest.raises(ConfigError) as error:
        check_run(config, resolve(config, 1), None, lambda *_: pytest.fail("prepares data"), [], torch.device("cpu"))
    return error.value.key, error.value.message


def test_a_wrong_mixture_is_found_before_data_are_prepared(ranks, tmp_path):
    (tmp_path / "words.txt").write_text("some words")
    flags = ["--config", "train_configs/debug.toml", "--data.datasets.web", f"text:{tmp_path}/words.txt"]
    ((key, message),) = ranks(1).run(error_of_checks, [*flags, "--data.mixture", "0: wb=1"])
    assert key == "data.mixture" and "did you mean 'web'" in message
