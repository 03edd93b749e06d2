"""Pairs with fields at random depths, and random conversations in the cells of tables. Nothing changes or vanishes in silence."""

import copy
import csv
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from tests.data.chat.examples import DEFAULT
from tests.data.chat.shapes import A2, CALL, PARTS, Q2, SYSTEM, TOOL, A, Q, answer, turns, user
from tests.data.sources.helpers import read
from tests.fuzz.check import record, refusal_of
from tests.fuzz.test_conversations import ALSO_NAMED, NAMES, VALUES, at, objects
from trainer.base.config import DataConfig
from trainer.data.chat.fields import is_absent
from trainer.data.prepare.encode import encoder
from trainer.data.sources.source import BadDocument, InvalidDocument
from trainer.data.store.store import SECOND_START, Encoded

_WORSE = answer("It is five.")
_PAIRS = {
    "prompt": {"prompt": [SYSTEM, Q], "chosen": [A], "rejected": [_WORSE]},
    "shared": {"chosen": [Q, A, Q2, A2], "rejected": [Q, A, Q2, _WORSE]},
    "parts": {"prompt": [user(PARTS)], "chosen": [A], "rejected": [_WORSE]},
}


@functools.cache
def _encoder(dataset: str) -> Callable[[Any], Encoded]:
    return encoder(DataConfig(dataset=dataset), DEFAULT)


def _encoded(dataset: str, document: Any) -> Encoded | str:
    """Return what a document becomes, or the line that refuses it."""
    if isinstance(document, BadDocument):
        return refusal_of(InvalidDocument(document.reason))
    try:
        return _encoder(dataset)(copy.deepcopy(document))
    except InvalidDocument as refusal:
        return refusal_of(refusal)


def _with_fields(data: st.DataObject, document: Any, fields: list[tuple[str, Any]], least: int = 0) -> list[tuple]:
    """Add fields to objects of a document that lie at least so deep. Return the path, the name and the value of each."""
    places, added = [path for path in objects(document) if len(path) >= least], []
    for name, value in fields:
        path = data.draw(st.sampled_from(places))
        if name not in at(document, path):
            at(document, path)[name] = value
            added.append((path, name, value))
    return added


_FIELDS = st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=2)


@given(st.sampled_from(sorted(_PAIRS)), st.data(), _FIELDS)
def test_both_conversations_of_a_pair_have_the_tokens_that_they_have_alone(kind, data, fields):
    document = copy.deepcopy(_PAIRS[kind])
    added = _with_fields(data, document, fields)
    pair = _encoded("preference", document)
    talks = [{"messages": [*document.get("prompt", []), *document[name]]} for name in ("chosen", "rejected")]
    more = {name: value for name, value in document.items() if name not in ("prompt", "chosen", "rejected")}
    alone = [_encoded("chat", talk | more) for talk in talks]
    if isinstance(pair, str):
        record("refused")
        words = {word for _, name, _ in added for word in (name, *ALSO_NAMED.get(name, ()))}
        assert any(word in pair for word in words), pair
        return
    record("accepted")
    assert not any(isinstance(talk, str) for talk in alone), f"accepted in a pair, but refused alone: {alone}"
    second = pair.targets.tolist().index(SECOND_START)
    assert [pair.tokens[:second].tolist(), pair.tokens[second:].tolist()] == [talk.tokens.tolist() for talk in alone]
    base = _encoded("preference", _PAIRS[kind])
    is_used = pair.tokens.tolist() != base.tokens.tolist() or pair.targets.tolist() != base.targets.tolist()
    for path, name, value in added:
        is_counted = name in ("weight", "train")  # True is the default
        is_counted |= any(unused.rpartition(".")[2] == name for unused in pair.unused_fields)
        assert is_used or is_absent(value) or is_counted, f"{name} at {path} vanished: {pair.unused_fields}"


_TALKS = {
    "talk": turns(SYSTEM, Q, A, Q2, A2),
    "calls": turns(*CALL, tools=[TOOL]),
    "parts": turns(user(PARTS), answer([{"type": "text", "text": "It is 4."}])),
}
_ODD = st.sampled_from(
    [
        float("nan"),
        float("inf"),
        1e308,
        2**70,
        "\ud800",
        "\\ud800",
        '{"a": 1, "a": 2}',
        "[",
        "null",
        "\u2028",
        "\x00",
        '""',
        "1e5",
    ]
)
"""Values that JSON text, cells of tables or programs that write them treat specially."""


def _cells(document: dict[str, Any]) -> dict[str, str]:
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in document.items()}


def _write_csv(path: Path, document: dict[str, Any]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([document.keys(), _cells(document).values()])


_FORMATS: dict[str, tuple[str, Callable[[Path, dict[str, Any]], Any]]] = {
    "array": ("x.json", lambda path, document: path.write_text(json.dumps([document]))),
    "pretty array": ("y.json", lambda path, document: path.write_text(json.dumps([document], indent=1))),
    "CSV": ("x.csv", _write_csv),
    "cells of Parquet": (
        "x.parquet",
        lambda path, document: parquet.write_table(pa.Table.from_pylist([_cells(document)]), path),
    ),
}


def _read(folder: Path, file: str) -> Encoded | str:
    (document,) = read("chat", folder / file)
    return _encoded("chat", document)


@given(st.sampled_from(sorted(_TALKS)), st.data(), st.lists(st.tuples(NAMES, VALUES | _ODD), min_size=1, max_size=2))
def test_a_conversation_is_the_same_in_the_lines_of_a_file_and_in_the_cells_of_a_table(kind, data, fields):
    """Its lists are JSON text in cells. What is refused in one is refused in all."""
    document = copy.deepcopy(_TALKS[kind])
    _with_fields(data, document, fields, least=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "x.jsonl").write_text(json.dumps(document) + "\n")
        expected = _read(folder, "x.jsonl")
        record("refused" if isinstance(expected, str) else "accepted")
        for format, (file, write) in _FORMATS.items():
            write(folder / file, document)
            found = _read(folder, file)
            if isinstance(expected, str):
                assert isinstance(found, str), f"{format}: accepted, but JSON lines are refused: {expected}"
                continue
            assert not isinstance(found, str), f"{format}: {found}"
            assert found.tokens.tolist() == expected.tokens.tolist(), format
            assert found.targets.tolist() == expected.targets.tolist(), format
            assert found.unused_fields == expected.unused_fields, format
