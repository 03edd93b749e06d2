"""The text in one field of a record."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from trainer.base.config import ConfigError
from trainer.base.system.spelling import did_you_mean, listed
from trainer.data.json_text import has_lone_surrogate
from trainer.data.sources.source import Document, InvalidDocument

_TYPE_NAMES = {
    dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number",
}  # fmt: skip


def extractor(field: str) -> Callable[[Any], Document]:
    """Return a function from a record to its document: the text in `field`, or the record itself if `field` is "". The function
    raises InvalidDocument."""
    return partial(_text_field, field) if field else _entire_record


def no_column_error(path: str, column: str, names: Sequence[str], which: str = "its columns") -> ConfigError:
    """Return the error of a table without a text column of the name that is set. which: what `names` are."""
    message = f"{path} has no column {column!r}; {which}: {listed(names)}{_hint(column, names)}"
    return ConfigError("data.text_field", message)


def _hint(field: str, names: Sequence[str]) -> str:
    """Return which field a user probably meant, given the name that is set and the names of the fields."""
    if {"messages", "conversations"} & set(names):
        return '; dataset = "chat" reads conversations'
    if {"chosen", "rejected"} <= set(names):
        return '; dataset = "preference" reads pairs'
    return did_you_mean(field, names)


def _entire_record(record: Any) -> Any:
    return record


def _text_field(name: str, record: Any) -> str:
    """Return the text in one field of a record."""
    if not isinstance(record, dict):
        raise InvalidDocument(f"expected an object, found {_TYPE_NAMES.get(type(record), 'null')}")
    if name not in record:
        fields = f"its fields: {listed(list(record))}{_hint(name, list(record))}"
        raise InvalidDocument(f"the record has no field {name!r}, which data.text_field names; {fields}")
    text = record[name]
    if not isinstance(text, str):
        found = _TYPE_NAMES.get(type(text), "null")
        raise InvalidDocument(f"field {name!r}, which data.text_field names, is {found}, not a string")
    if not text:
        raise InvalidDocument("the document is empty")
    if not text.isascii() and has_lone_surrogate(text):
        raise InvalidDocument("the document contains a lone surrogate")
    return text
