"""Recognition of texts that hold records, such as a file of conversations that is read as one text."""

import csv
import io
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

from trainer.base.system.spelling import listed
from trainer.data.chat.chat_layouts import CHATS, PAIRS

_BEGIN = re.compile(r"\s*(?P<list>\[)?\s*\{")
"""Beginning of a JSON object, or of a list of objects."""
_INDEX = ("", "Unnamed: 0")
"""Names of the first column of a table with an index."""
_LONGEST_HEADER = 1000
"""Maximum number of characters of the first line of a table of values."""


def records_in(text: str, is_file: bool) -> str:
    """Return what a text holds, if these are records that another type of dataset reads, and which one, or "".

    Args:
        text: A document.
        is_file: Whether it is a complete file. A field may also be a list of messages as JSON text.
    """
    first = _first_record(text, is_file)
    if first is None:
        return ""
    kind, record = first
    reader = _reader(record, kind == "a table")
    if not reader:
        return ""
    return f'this is no text, but {kind} of records with the fields {listed(list(record))}; dataset = "{reader}" reads them'


def _first_record(text: str, is_file: bool) -> tuple[str, Mapping[str, Any]] | None:
    """Return what the text is, and the first record in it."""
    begin = _BEGIN.match(text)
    try:
        if begin is None:
            return _table([*itertools.islice(io.StringIO(text), 2)]) if is_file else None
        if not (is_file or begin["list"]):
            return None
        record = json.JSONDecoder().raw_decode(text, begin.end() - 1)[0]
    except (ValueError, RecursionError, csv.Error):
        return None
    is_message = {"role", "content"} <= record.keys() or {"from", "value"} <= record.keys()
    if begin["list"] and is_message:
        return "the JSON text", {"messages": [record]}
    return ("JSON", record) if is_file else None


def _table(lines: list[str]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the header of a table of values, whose rows have as many values."""
    if len(lines) < 2 or len(lines[0]) > _LONGEST_HEADER:
        return None
    for delimiter in ",;\t":
        names, values = csv.reader(lines, delimiter=delimiter)
        names = names[1:] if names[0] in _INDEX else names  # pandas writes an index first
        if 1 < len(names) <= len(values) <= len(names) + 1 and all(name.isidentifier() for name in names):
            return "a table", dict.fromkeys(names, "x")
    return None


def _reader(record: Mapping[str, Any], is_table: bool) -> str:
    """Return the type of dataset that reads records with these fields, or ""."""
    for reader, layouts in (("chat", CHATS), ("preference", PAIRS)):
        if any(not layout.lacking(record) for layout in layouts.values()):
            return reader
    return ("csv" if is_table else "jsonl") if isinstance(record.get("text"), str) else ""
