"""Names of fields: those of data.columns, and suggestions for documents whose fields have other names."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from trainer.base.config.schema.data import DOCUMENT_COLUMNS, MESSAGE_COLUMNS
from trainer.base.system.spelling import did_you_mean, listed
from trainer.data.chat.fields import MalformedConversation, is_absent, with_changed_fields

_SIMILAR = {
    "instruction": ("input",),
    "messages": ("conversation", "dialog", "dialogue", "chat", "turns", "message_list"),
    "question": ("query", "problem", "user", "human", "input_text", "task"),
    "answer": ("response", "reply", "solution", "assistant", "output_text", "target"),
    "output": ("response", "reply", "answer", "completion", "target"),
    "input": ("context",),
    "chosen": ("accepted", "preferred", "winner", "better", "chosen_response"),
    "rejected": ("dispreferred", "loser", "worse", "rejected_response"),
    "prompt": ("query", "question", "instruction", "context"),
    "completion": ("response", "reply", "answer", "output", "target"),
    "role": ("speaker", "sender", "author", "who"),
    "content": ("text", "message", "value", "utterance", "body"),
}
"""Field -> common names of it in other datasets, for suggestions."""
_NAMES = (*DOCUMENT_COLUMNS, *MESSAGE_COLUMNS, "from", "value")


class MissingField(MalformedConversation):
    """A field that would hold a conversation, or a part of it, is missing. data.columns may name another one."""


def renamed(document: Any, columns: Mapping[str, str]) -> tuple[Any, set[str]]:
    """Return a document with the names of data.columns, and the names of the fields that these replace.

    Fields that the document does not have are ignored, because other datasets of the run may have them.
    """
    of_message = {ours: name for ours, name in columns.items() if ours in MESSAGE_COLUMNS}
    of_document = {ours: name for ours, name in columns.items() if ours not in of_message}
    change = partial(_renamed, of_message) if of_message else None
    return with_changed_fields(document, partial(_renamed, of_document), change, ("role", "from", *of_message.values()))


def _renamed(columns: Mapping[str, str], fields: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    present = {ours: name for ours, name in columns.items() if name in fields}
    kept = {name: value for name, value in fields.items() if name not in present.values()}
    replaced = {ours for ours in present if not is_absent(kept.get(ours))}
    return kept | {ours: fields[name] for ours, name in present.items()}, replaced


def absent_columns(document: Any, columns: Mapping[str, str]) -> list[str]:
    """Return the entries of data.columns whose field a document does not have, without those of messages."""
    return [ours for ours, name in columns.items() if ours not in MESSAGE_COLUMNS and name not in document]


def missing_columns(document: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    """Return which names of data.columns a document does not have, as the start of a message, or ""."""
    missing = [columns[ours] for ours in absent_columns(document, columns)]
    if not missing:
        return ""
    hint = did_you_mean(missing[0], list(document))
    return f"the document has no field {missing[0]!r}, which data.columns names{hint}; "


def missing_field(fields: Mapping[str, Any], message: str, *wanted: str, hint: str = "") -> MissingField:
    """Return the error of a document, or of a message, that lacks a layout or a part of one.

    Args:
        fields: The document or the message.
        message: What it lacks.
        wanted: The names of the fields that it lacks.
        hint: The way out. Default: names of other fields for data.columns, if some may be meant.
    """
    names = [name for name, value in fields.items() if not is_absent(value)]
    shown = f"; its fields: {listed(names)}" if names else ""
    if not hint:
        columns = _similar(wanted, [name for name in names if name not in ("from", "value", *wanted)])
        others = [name for name in names if name not in _NAMES]
        if not columns and len(others) == 1 and wanted[0] in DOCUMENT_COLUMNS:
            columns = {wanted[0]: others[0]}
        entries = ", ".join(f"{ours} = {_quoted(name)}" for ours, name in columns.items())
        hint = f"data.columns names other fields, such as data.columns = {{ {entries} }}" if entries else ""
    return MissingField("; ".join(filter(None, (f"{message}{shown}", hint))))


def _similar(wanted: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return the fields that are probably meant, by the names of ours: `messages`, or the others."""
    found = {}
    for ours in wanted:
        close = [name for name in _SIMILAR[ours] if name in names] or [n for n in names if did_you_mean(n, [ours])]
        if close:
            found[ours] = close[0]
    return {"messages": found["messages"]} if "messages" in found else found


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '\\"') + '"'
