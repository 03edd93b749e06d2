"""Encoding of documents as tokens."""

import pytest

from tests.data.chat.examples import DEFAULT, TALK
from trainer.config import DataConfig
from trainer.data.prepare.encode import encoder
from trainer.data.sources.source import InvalidDocument


def nested():
    """Return an empty list inside 100,000 lists."""
    value = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("dataset", "document"),
    [
        ("chat", {"messages": [TALK[1] | {"extra": nested()}, TALK[2]]}),
        ("preference", {"prompt": "q", "chosen": nested(), "rejected": nested()}),
    ],
)
def test_a_document_nested_too_deeply_is_invalid(dataset, document):
    encode = encoder(DataConfig(dataset=dataset, chat_template="llama3"), DEFAULT)
    with pytest.raises(InvalidDocument, match="the document is nested too deeply"):
        encode(document)
