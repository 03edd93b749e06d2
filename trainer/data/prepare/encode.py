"""Encoders, which convert documents to tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from trainer.config import DataConfig
from trainer.data.chat.conversations import MalformedConversation
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.chat.template import TemplateFailure
from trainer.data.sources.source import InvalidDocument
from trainer.data.store.store import Encoded
from trainer.data.tokenizer.protocol import Tokenizer


def encoder(config: DataConfig, tokenizer: Tokenizer) -> Callable[[Any], Encoded]:
    """Return a function that encodes one Document, and raises InvalidDocument if the document cannot be encoded."""
    if config.dataset == "tokens":
        return Encoded
    if config.dataset == "chat":
        return partial(_encode_chat, chat_format(config, tokenizer))
    return partial(_encode_text, tokenizer)


def _encode_text(tokenizer: Tokenizer, text: str) -> Encoded:
    """Encode a text, with BOS before it and EOS after it."""
    inner = tokenizer.encode_array(text)
    tokens = np.empty(len(inner) + 2, np.uint32)
    tokens[0], tokens[1:-1], tokens[-1] = tokenizer.bos, inner, tokenizer.eos
    return Encoded(tokens)


def _encode_chat(chat: ChatFormat, record: dict[str, Any]) -> Encoded:
    """Render a conversation with the chat template, and encode the text."""
    try:
        tokens, targets = chat.encode_document(record)
    except (MalformedConversation, TemplateFailure) as failure:
        raise InvalidDocument(str(failure)) from None
    return Encoded(np.array(tokens, np.uint32), np.array(targets, np.uint8))


def chat_format(config: DataConfig, tokenizer: Tokenizer) -> ChatFormat:
    """Load and validate the chat template. Raises ConfigError if the template cannot be used for training."""
    chat = load_chat_format(config.chat_template, tokenizer, allowed_special=config.allowed_special)
    chat.validate_template()
    return chat
