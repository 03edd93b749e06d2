"""The datasets of a configuration."""

import pytest

from trainer.base.config import ConfigError
from trainer.data.datasets import blame_setting


@pytest.mark.parametrize(
    ("setting", "key", "blamed"),
    [
        ("data.datasets.web", "data.path", "data.datasets.web"),
        ("evaluation.datasets.web", "data.dataset", "evaluation.datasets.web"),  # a package that the type needs
        ("data.path", "data.dataset", "data.dataset"),
        ("data.datasets.web", "data.columns", "data.columns"),
    ],
)
def test_an_error_names_the_setting_of_the_dataset(setting, key, blamed):
    with pytest.raises(ConfigError) as error, blame_setting(setting):
        raise ConfigError(key, "wrong")
    assert (error.value.key, error.value.message) == (blamed, "wrong")
