"""Conversations with fields at random depths, under published templates. None differs from transformers in silence.

A conversation is refused by a reason that names a field, or its tokens are those of transformers and each field is used, honoured
or counted.
"""

import copy
import functools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="the tokens are compared with those of transformers")
pytest.importorskip("trl", reason="the templates are those of the package trl")

from tests.data.chat.families import Loaded, load
from tests.data.chat.shapes import CALL, PARTS, SYSTEM, TALK2, TOOL, A, Q, answer, turns, user
from tests.data.chat.test_corpus import Day
from tests.fuzz.check import record, refusal_of
from trainer.data.chat.fields import REASONING, MalformedConversation, is_absent
from trainer.data.chat.template import TemplateFailure
from trainer.data.chat.written_check import REASONING_OMITTED

_FAMILIES = (
    "llama3",
    "chatml",
    "Llama 3.1",
    "Qwen 2.5",
    "Qwen 3",
    "Phi 4 mini",
    "Ministral 3",
    "gpt-oss",
    "DeepSeek V3",
)
_DOCUMENTS = {
    "talk": turns(SYSTEM, *TALK2),
    "calls": turns(*CALL, tools=[TOOL]),
    "parts": turns(user(PARTS), answer([{"type": "text", "text": "It is 4."}])),
    "thoughts": turns(Q, A | {"reasoning_content": "Two and two."}),
}
NAMES = st.sampled_from(
    ["weight", "train", "loss", "mask", "ignored", "target", "reasoning", "reasoning_content", "thinking", "scratchpad",
     "system_instruction", "choices", "functions", "tools", "image_url", "images", "name", "id", "quality", "score", "note",
     "lang", "meta", "recipient", "channel", "prefix", "strict", "format", "title", "custom", "系统", "x"]
)  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(
        [None, "", [], {}, True, False, 0, 1, 0.5, 7, "word", "two words", "真", "true", "x" * 90, "ünïcödé\n"]
    ),
    st.lists(st.sampled_from(["a", "b", 1]), min_size=1, max_size=2),
    st.dictionaries(st.sampled_from("ab"), st.sampled_from([1, "text", True]), min_size=1, max_size=2),
)
ALSO_NAMED = {
    "functions": ["tools", "a function"],
    "tools": ["a tool"],
    "weight": ["not to be trained on", "no assistant message to train on"],
    "train": ["not to be trained on", "no assistant message to train on"],
}
"""Name of a field -> what a refusal because of it may say instead."""
_DATA = ("arguments", "parameters")
"""Fields that hold objects whose names belong to the user, not to the format."""


@functools.cache
def _loaded(family: str) -> Loaded:
    return load(family, Path(tempfile.mkdtemp()) / "family")


def objects(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of each object in a document whose fields have a meaning."""
    if isinstance(value, Mapping):
        yield path
        for name, entry in value.items():
            if name not in _DATA:
                yield from objects(entry, (*path, name))
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            yield from objects(entry, (*path, i))


def at(document: Any, path: tuple) -> Any:
    return functools.reduce(lambda value, key: value[key], path, document)


def _rendered(loaded: Loaded, document: Mapping[str, Any]) -> str | None:
    """Return transformers' text of a document, or None if the template fails."""
    functions = [{"type": "function", "function": function} for function in document.get("functions") or ()]
    tools = document.get("tools") or functions or None
    for missing in ({}, {"content": None}, {"content": ""}):
        messages = [
            missing | {n: v for n, v in message.items() if not is_absent(v) or n == "content"}
            for message in document["messages"]
        ]
        try:
            text = loaded.peer.apply_chat_template(
                messages, tools=tools, chat_template=loaded.family.text, tokenize=False
            )
        except (TypeError, AttributeError, KeyError, ValueError, jinja2.TemplateError):
            continue
        if "{'" not in text:
            return text
    return None


@pytest.fixture(scope="module", autouse=True)
def fixed_date() -> Iterator[None]:
    """Let transformers' templates see the date that ours see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.utils.chat_template_utils.datetime", Day)
        yield


@functools.cache
def _base(family: str, kind: str) -> tuple[str | None, Any]:
    """Return transformers' text of a document without further fields, and what we return for it, or None if it is refused."""
    loaded = _loaded(family)
    try:
        ours = loaded.chat.encode_document(copy.deepcopy(_DOCUMENTS[kind]))
    except (MalformedConversation, TemplateFailure):
        ours = None
    return _rendered(loaded, _DOCUMENTS[kind]), ours


@given(
    st.sampled_from(_FAMILIES),
    st.sampled_from(sorted(_DOCUMENTS)),
    st.data(),
    st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=2),
)
def test_no_field_of_a_conversation_changes_or_vanishes_in_silence(family, kind, data, fields):
    loaded, (base_text, base) = _loaded(family), _base(family, kind)
    document = copy.deepcopy(_DOCUMENTS[kind])
    places = list(objects(document))
    added = []
    for name, value in fields:
        path = data.draw(st.sampled_from(places))
        if name not in at(document, path):
            at(document, path)[name] = value
            added.append((path, name, value))
    try:
        (tokens, targets), unused = loaded.chat.encode_document(copy.deepcopy(document))
    except (MalformedConversation, TemplateFailure) as refusal:
        record("refused")
        line = refusal_of(refusal)
        words = {word for _, name, _ in added for word in (name, *ALSO_NAMED.get(name, ()))}
        assert base is None or any(word in line for word in words), line
        return
    record("accepted")
    assert base is not None, "a field has turned a refused conversation into an accepted one"
    text = _rendered(loaded, document)
    is_context = REASONING_OMITTED in unused
    is_honoured = is_context or any(name in ("weight", "train") for _, name, _ in added)
    if text == base_text:
        assert tokens == base[0][0]
        assert targets == base[0][1] or is_honoured
    else:
        assert loaded.chat.tokenizer.decode(tokens) == text
    for path, name, value in added:
        is_used = text != base_text or is_absent(value) or name in ("weight", "train", "tools", "functions", "system")
        is_used = is_used or (is_context and name in REASONING)
        assert is_used or any(n.rpartition(".")[2] == name for n in unused), f"{name} at {path} vanished: {unused}"
