"""Layouts of documents: the fields that hold a conversation or a preference pair, and other names of these fields."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from trainer.base.config.schema.data import DOCUMENT_COLUMNS, MESSAGE_COLUMNS, MESSAGE_LISTS
from trainer.base.system.spelling import did_you_mean, listed
from trainer.data.chat.fields import is_absent

QUESTIONS = {"instruction": "output", "question": "answer"}
"""Field with the text of the user -> field with the text of the assistant. `input` continues an instruction."""
CHAT = "messages; conversations; prompt and completion; instruction, input and output; question and answer"
PAIR = "chosen and rejected, with prompt, question, or instruction and input"
_SIMILAR = {
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
"""Field -> common names of it in other layouts, for suggestions."""


_NAMES = (*DOCUMENT_COLUMNS, *MESSAGE_COLUMNS, "from", "value")


class MalformedConversation(Exception):
    """Error whose message states in one line why a document is not a conversation."""


class UnknownLayout(MalformedConversation):
    """No field of the document holds a conversation."""


def renamed(document: Any, columns: Mapping[str, str]) -> tuple[Any, set[str]]:
    """Return a document with the names of data.columns, and the names of the fields that these replace.

    Fields that the document does not have are ignored, because other datasets of the run may have them.
    """
    if not columns or not isinstance(document, Mapping):
        return document, set()
    document, replaced = _renamed(document, {o: name for o, name in columns.items() if o not in MESSAGE_COLUMNS})
    of_messages = {ours: name for ours, name in columns.items() if ours in MESSAGE_COLUMNS}
    for name in MESSAGE_LISTS if of_messages else ():
        if name in ("messages", "conversations") and isinstance(document.get(name), str):
            with suppress(ValueError, RecursionError):  # otherwise parse_conversation explains the text
                document[name] = json.loads(document[name])
        if isinstance(document.get(name), list):
            pairs = [_renamed(message, of_messages) for message in document[name]]
            document[name] = [message for message, _ in pairs]
            replaced = replaced.union(*(names for _, names in pairs))
    return document, replaced


def _renamed(fields: Any, columns: Mapping[str, str]) -> tuple[Any, set[str]]:
    if not isinstance(fields, Mapping):
        return fields, set()
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


def question_of(document: Mapping[str, Any]) -> tuple[str, str, set[str]] | None:
    """Return the name and the text of the user's only message, and the names of its fields, or None if the document has another
    layout. Raises MalformedConversation if a field is not text."""
    names = [name for name in QUESTIONS if document.get(name) is not None]
    if not names:
        return None
    with_answer = [name for name in names if document.get(QUESTIONS[name]) is not None]
    name = next((name for name in with_answer or names if not is_absent(document[name])), names[0])
    text, used = text_of(document, name), {name}
    if name == "instruction":
        used.add("input")
        if not is_absent(document.get("input")):
            text = "\n\n".join(filter(str.strip, (text, text_of(document, "input"))))
    if not text.strip():
        raise MalformedConversation(f"the {name} is empty")
    return name, text, used


def text_of(document: Mapping[str, Any], name: str) -> str:
    """Return the text of a field. Raises MalformedConversation if the document does not have it, or if it is not text."""
    value = document.get(name)
    if not isinstance(value, str):
        raise MalformedConversation(
            f"the document has no {name}" if value is None else f"the document's {name} is not text"
        )
    return value


def unknown_layout(document: Mapping[str, Any], is_pair: bool = False) -> UnknownLayout:
    """Return the error of a document without any layout. It lists the layouts that are read, and suggests what to do."""
    names = [name for name, value in document.items() if not is_absent(value)]
    kind, layouts = ("preference pair", PAIR) if is_pair else ("conversation", CHAT)
    found = f"the document's fields ({listed(names)}) are not those of a {kind}: {layouts}"
    return UnknownLayout(f"{found}; {_suggestion(names, is_pair)}" if names else found)


def missing_field(fields: Mapping[str, Any], message: str, *wanted: str) -> UnknownLayout:
    """Return the error of a document, or of a message, that has only a part of a layout. It suggests names for the rest.

    Args:
        fields: The document or the message.
        message: What it lacks.
        wanted: The names of the fields that it lacks.
    """
    names = [name for name, value in fields.items() if not is_absent(value)]
    others = [name for name in names if name not in _NAMES]
    candidates = [name for name in names if name not in ("from", "value")]
    columns = {ours: name for ours in wanted if (name := _similar(ours, candidates))}
    if not columns and len(others) == 1 and wanted[0] in DOCUMENT_COLUMNS:
        columns = {wanted[0]: others[0]}
    found = f"; its fields: {listed(names)}" if len(names) > 1 else ""
    return UnknownLayout(message + found + (f"; {_columns_hint(columns)}" if columns else ""))


def _suggestion(names: Sequence[str], is_pair: bool) -> str:
    if {"chosen", "rejected"} <= set(names) and not is_pair:
        return 'dataset = "preference" reads pairs'
    if is_pair and {"messages", "conversations", "completion", "output", "answer"} & set(names):
        return 'dataset = "chat" reads conversations'
    if "text" in names and len(names) == 1:
        return 'dataset = "jsonl", "parquet" or "csv" reads texts'
    wanted = ("prompt", "chosen", "rejected") if is_pair else ("messages",)
    if not is_pair and not _similar("messages", names):
        wanted = ("instruction", "input", "output") if "instruction" in names else ("question", "answer")
    columns = {ours: _similar(ours, names) for ours in wanted if ours not in names}
    return _columns_hint({ours: name for ours, name in columns.items() if name} or {wanted[-1]: names[-1]})


def _columns_hint(columns: Mapping[str, str]) -> str:
    shown = ", ".join(f"{ours} = {_quoted(name)}" for ours, name in columns.items())
    return f"data.columns names other fields, such as data.columns = {{ {shown} }}"


def _similar(ours: str, names: Sequence[str]) -> str:
    """Return the name that a field most probably has, or ""."""
    found = next((name for name in _SIMILAR[ours] if name in names), "")
    return found or next((name for name in names if did_you_mean(name, [ours])), "")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '\\"') + '"'
