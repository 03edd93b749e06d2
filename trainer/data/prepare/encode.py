"""Encoders, which convert the documents of each dataset format to tokens."""

from collections.abc import Callable

import numpy as np

from trainer.config import DataConfig
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.sources.source import Document, InvalidDocument
from trainer.data.store.store import Encoded
from trainer.data.tokenizer.protocol import Tokenizer

Encode = Callable[[Document], Encoded]
"""Function that encodes a document. It raises InvalidDocument if the document cannot be encoded."""


def _text(config: DataConfig, tokenizer: Tokenizer) -> Encode:
    """Return an encoder of text that prepends BOS and appends EOS."""

    def encode(document: Document) -> Encoded:
        assert isinstance(document, str)
        inner = tokenizer.encode_array(document)
        tokens = np.empty(len(inner) + 2, np.uint32)
        tokens[0], tokens[1:-1], tokens[-1] = tokenizer.bos, inner, tokenizer.eos
        return Encoded(tokens)

    return encode


def _pretokenized(config: DataConfig, tokenizer: Tokenizer) -> Encode:
    def encode(document: Document) -> Encoded:
        assert isinstance(document, np.ndarray)
        return Encoded(document)

    return encode


def _chat(config: DataConfig, tokenizer: Tokenizer) -> Encode:
    """Return an encoder that renders conversations by the chat template."""
    chat = chat_format(config, tokenizer)

    def encode(document: Document) -> Encoded:
        result = chat.encode_document(document)
        if isinstance(result, str):
            raise InvalidDocument(result)
        tokens, targets = result
        return Encoded(np.array(tokens, np.uint32), np.array(targets, np.uint8))

    return encode


def chat_format(config: DataConfig, tokenizer: Tokenizer) -> ChatFormat:
    """Load and validate the chat template. Raises ConfigError if the template cannot be used for training."""
    chat = load_chat_format(config.chat_template, tokenizer, allowed_special=config.allowed_special)
    chat.validate_template()
    return chat


ENCODERS: dict[str, Callable[[DataConfig, Tokenizer], Encode]] = {
    "python_stdlib": _text,
    "text": _text,
    "jsonl": _text,
    "parquet": _text,
    "huggingface": _text,
    "tokens": _pretokenized,
    "chat": _chat,
}
"""Dataset format -> function that returns its encoder. The keys are those of DATASETS in sources/__init__.py."""
