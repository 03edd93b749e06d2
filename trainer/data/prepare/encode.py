"""Encoders, which convert documents to tokens."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from trainer.base.config import DataConfig
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.chat.layouts import MalformedConversation, UnknownLayout, absent_columns, missing_columns, renamed
from trainer.data.chat.pairs import parse_preference
from trainer.data.chat.template import TemplateFailure
from trainer.data.sources.source import InvalidDocument
from trainer.data.store.store import SECOND_START, Encoded
from trainer.data.tokenizer.protocol import Tokenizer

COLUMNS = "data.columns."
"""Beginning of the names of entries of data.columns among the unused fields of a document that lacks their field."""
CHAT_DATASETS = ("chat", "preference")
"""Types of datasets that consist of conversations."""


def encoder(config: DataConfig, tokenizer: Tokenizer) -> Callable[[Any], Encoded]:
    """Return a function that encodes one Document, and raises InvalidDocument if the document cannot be encoded."""
    if config.dataset == "tokens":
        return Encoded
    if config.dataset in CHAT_DATASETS:
        encode = _encode_chat if config.dataset == "chat" else _encode_pair
        return partial(_valid, partial(encode, chat_format(config, tokenizer)), config.columns)
    return partial(_encode_text, tokenizer)


def _encode_text(tokenizer: Tokenizer, text: str) -> Encoded:
    """Encode a text, with EOS after it, and with BOS before it if the tokenizer adds one."""
    inner, start = tokenizer.encode_array(text), len(tokenizer.prefix)
    tokens = np.empty(start + len(inner) + 1, np.uint32)
    tokens[:start], tokens[start:-1], tokens[-1] = tokenizer.prefix, inner, tokenizer.eos
    return Encoded(tokens)


def _valid(encode: Callable[[Any], Encoded], columns: Mapping[str, str], record: Any) -> Encoded:
    """Encode a record whose fields have the names of data.columns."""
    try:
        document, replaced = renamed(record, columns)
        encoded = encode(document)
    except UnknownLayout as failure:
        raise InvalidDocument(f"{missing_columns(record, columns)}{failure}") from None
    except (MalformedConversation, TemplateFailure) as failure:
        raise InvalidDocument(str(failure)) from None
    except RecursionError:
        raise InvalidDocument("the document is nested too deeply") from None
    absent = {f"{COLUMNS}{ours}" for ours in absent_columns(record, columns)}
    return replace(encoded, unused_fields=tuple(sorted({*encoded.unused_fields, *replaced, *absent})))


def _encode_chat(chat: ChatFormat, record: Any) -> Encoded:
    """Render a conversation with the chat template, and encode the text."""
    (tokens, targets), unused_fields = chat.encode_document(record)
    return Encoded(np.array(tokens, np.uint32), np.array(targets, np.uint8), unused_fields)


def _encode_pair(chat: ChatFormat, record: Any) -> Encoded:
    """Encode the conversation with the chosen answer, followed by the conversation with the rejected answer."""
    record, unused_fields = chat.without_ignored_fields(record)
    *documents, names = parse_preference(record)
    answers = []
    for name, document in zip(("chosen", "rejected"), documents, strict=True):
        try:
            answers.append(_encode_chat(chat, document))
        except (MalformedConversation, TemplateFailure) as failure:
            raise MalformedConversation(f"{name}: {failure}") from None
    if np.array_equal(answers[0].tokens, answers[1].tokens):
        raise MalformedConversation(
            "the chosen and the rejected answer have the same tokens, so there is nothing to prefer"
        )
    answers[1].targets[0] = SECOND_START
    unused_fields |= {*names, *answers[0].unused_fields, *answers[1].unused_fields}
    tokens, targets = (np.concatenate([getattr(a, name) for a in answers]) for name in ("tokens", "targets"))
    return Encoded(tokens, targets, tuple(sorted(unused_fields)))


def chat_format(config: DataConfig, tokenizer: Tokenizer) -> ChatFormat:
    """Load and validate the chat template. Raises ConfigError if the template cannot be used for training."""
    chat = load_chat_format(
        config.chat_template,
        tokenizer,
        allowed_special=config.allowed_special,
        ignored_fields=config.ignored_fields,
    )
    chat.validate_template()
    return chat
