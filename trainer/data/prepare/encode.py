"""How a document of each dataset becomes tokens."""

from collections.abc import Callable

import numpy as np

from trainer.config import DataConfig
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.sources.source import Document, InvalidDocument
from trainer.data.store.store import Encoded
from trainer.data.tokenizer.protocol import Tokenizer

Encode = Callable[[Document], Encoded]
"""Raises InvalidDocument for a document of which nothing can be made."""


def _text(config: DataConfig, tokenizer: Tokenizer) -> Encode:
    """Opened by the begin-of-text token and closed by the end-of-text token."""

    def encode(document: Document) -> Encoded:
        assert isinstance(document, str)
        inner = tokenizer.encode_array(document)
        tokens = np.empty(len(inner) + 2, np.uint32)
        tokens[0], tokens[1:-1], tokens[-1] = tokenizer.bos, inner, tokenizer.eos
        return Encoded(tokens)

    return encode


def _as_they_are(config: DataConfig, tokenizer: Tokenizer) -> Encode:
    def encode(document: Document) -> Encoded:
        assert isinstance(document, np.ndarray)
        return Encoded(document)

    return encode


def _chat(config: DataConfig, tokenizer: Tokenizer) -> Encode:
    """As the template writes it."""
    chat = chat_format(config, tokenizer)

    def encode(document: Document) -> Encoded:
        made = chat.encode_document(document)
        if isinstance(made, str):
            raise InvalidDocument(made)
        tokens, targets = made
        return Encoded(np.array(tokens, np.uint32), np.array(targets, np.uint8))

    return encode


def chat_format(config: DataConfig, tokenizer: Tokenizer) -> ChatFormat:
    """Raises ConfigError for a template that cannot be learned from."""
    chat = load_chat_format(config.chat_template, tokenizer, allowed_special=config.allowed_special)
    chat.validate_template()
    return chat


ENCODERS: dict[str, Callable[[DataConfig, Tokenizer], Encode]] = {
    "python_stdlib": _text,
    "text": _text,
    "jsonl": _text,
    "parquet": _text,
    "huggingface": _text,
    "tokens": _as_they_are,
    "chat": _chat,
}
"""By dataset, as DATASETS in sources/__init__.py."""
