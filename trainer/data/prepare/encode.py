"""Encoders, which convert documents to tokens."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from trainer.base.config import DataConfig
from trainer.base.config.schema.data import CHAT_DATASETS
from trainer.data.chat.chat_layouts import PAIRS, read_document
from trainer.data.chat.columns import MissingField, absent_columns, missing_columns, renamed
from trainer.data.chat.fields import MalformedConversation
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.chat.template import TemplateFailure
from trainer.data.prepare.records_in_text import records_in
from trainer.data.sources.source import InvalidDocument
from trainer.data.store.store import SECOND_START, Encoded
from trainer.data.tokenizer.protocol import Tokenizer

COLUMNS = "data.columns."
"""Beginning of the names of entries of data.columns among the unused fields of a document that lacks their field."""


def encoder(config: DataConfig, tokenizer: Tokenizer) -> Callable[[Any], Encoded]:
    """Return a function that encodes one Document, and raises InvalidDocument if the document cannot be encoded."""
    if config.dataset == "tokens":
        return Encoded
    if config.dataset in CHAT_DATASETS:
        encode = _encode_chat if config.dataset == "chat" else _encode_pair
        return partial(_valid, partial(encode, chat_format(config, tokenizer)), config.columns)
    return partial(_encode_text, tokenizer, config)


def plain_text(config: DataConfig, text: str) -> str:
    """Return a text of the dataset. Raises InvalidDocument if it holds records."""
    if records := records_in(text, is_file=config.dataset == "text"):
        raise InvalidDocument(records)
    return text


def _encode_text(tokenizer: Tokenizer, config: DataConfig, text: str) -> Encoded:
    """Encode a text, with EOS after it, and with BOS before it if the tokenizer adds one."""
    inner, start = tokenizer.encode_array(plain_text(config, text)), len(tokenizer.prefix)
    tokens = np.empty(start + len(inner) + 1, np.uint32)
    tokens[:start], tokens[start:-1], tokens[-1] = tokenizer.prefix, inner, tokenizer.eos
    return Encoded(tokens)


def _valid(encode: Callable[[Any], Encoded], columns: Mapping[str, str], record: Any) -> Encoded:
    """Encode a record whose fields have the names of data.columns."""
    try:
        document, replaced = renamed(record, columns)
        encoded = encode(document)
    except MissingField as failure:
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
    answers = []
    for name, found in zip(("chosen", "rejected"), read_document(record, PAIRS), strict=True):
        try:
            encoded, names = chat.encode_answer(found)
        except (MalformedConversation, TemplateFailure) as failure:
            raise MalformedConversation(f"{name}: {failure}") from None
        answers.append(encoded)
        unused_fields |= names
    (chosen, chosen_targets), (rejected, rejected_targets) = answers
    if chosen == rejected:
        raise MalformedConversation(
            "the chosen and the rejected answer have the same tokens, so there is nothing to prefer"
        )
    targets = np.array([*chosen_targets, *rejected_targets], np.uint8)
    targets[len(chosen)] = SECOND_START
    return Encoded(np.array([*chosen, *rejected], np.uint32), targets, tuple(sorted(unused_fields)))


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
