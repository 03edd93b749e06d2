"""Sources, read from front to back in pieces of any size."""

import os

import pytest

from trainer.config import ConfigError, DataConfig, TokenizerConfig
from trainer.data.sources import BadDocument, Source, open_source
from trainer.data.tokenizer.backends import load_tokenizer


def opened(dataset: str, path, **settings) -> Source:
    return open_source(DataConfig(dataset=dataset, path=str(path), **settings), load_tokenizer(TokenizerConfig()))


def read_all(source: Source, step: int = 2**40) -> list:
    spans = (span for path in source.files for span in source.spans(path, os.path.getsize(path), step))
    return [found for span in spans for found in source.read(span, lambda document: document)]


def read(dataset: str, path, step: int = 2**40, **settings) -> list:
    return read_all(opened(dataset, path, **settings), step)


def told(found: list) -> list[str]:
    """The problems, as users see them."""
    return [str(problem) for problem in found if isinstance(problem, BadDocument)]


def refused(dataset: str, path, **settings) -> tuple[str, str]:
    """Setting and rule of the ConfigError that opening or reading ends with."""
    with pytest.raises(ConfigError) as error:
        read(dataset, path, **settings)
    return error.value.key, error.value.rule
