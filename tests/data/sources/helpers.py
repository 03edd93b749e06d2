"""Read datasets in spans of any size."""

import os

import pytest

from tests.data.chat.examples import DEFAULT
from trainer.base.config import ConfigError, DataConfig
from trainer.data.sources import BadDocument, Source, open_source


def open_dataset(dataset: str, path, **settings) -> Source:
    return open_source(DataConfig(dataset=dataset, path=str(path), **settings), DEFAULT)


def read(dataset: str, path, chunk_bytes: int = 2**40, **settings) -> list:
    """Return the documents and bad documents of all spans, in order."""
    source = open_dataset(dataset, path, **settings)
    spans = (span for file in source.files for span in source.spans(file, os.path.getsize(file), chunk_bytes))
    return [document for span in spans for document in source.read(span, lambda document: document)]


def messages(documents: list) -> list[str]:
    """Return the messages of the bad documents, as users see them."""
    return [str(document) for document in documents if isinstance(document, BadDocument)]


def error_of(dataset: str, path, **settings) -> tuple[str, str]:
    """Return the setting and the message of the ConfigError that opening or reading raises."""
    with pytest.raises(ConfigError) as error:
        read(dataset, path, **settings)
    return error.value.key, error.value.message
