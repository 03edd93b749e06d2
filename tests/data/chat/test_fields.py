"""Names of fields that may change what is trained on, and fields that are ignored on request."""

import json

from tests.data.chat.examples import CHATML
from trainer.data.chat.fields import may_matter, without
from trainer.data.chat.format import load_chat_format

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}


def test_words_in_names_decide_whether_a_field_selects_what_is_trained_on():
    for name in (
        "weight",
        "sample_weights",
        "lossMask",
        "train",
        "is_trainable",
        "TrainOnInput",
        "assistant-masks",
        "Messages",
        "systemPrompt",
        "toolCalls",
        "skip",
    ):
        assert may_matter(name, 1), name
    for name in (
        "id",
        "trainer_version",
        "losses_url",
        "weighted",
        "message_id",
        "conversation_hash",
        "prompt_id",
        "score",
        "model",
    ):
        assert not may_matter(name, 1) and not may_matter(name, "x"), name


def test_ignored_fields_are_removed_everywhere_and_listed():
    chat = load_chat_format(
        "chatml", CHATML, ignored_fields=["history", "mask", "reasoning_content", "conversations", "absent"]
    )
    document = {
        "messages": [USER, ANSWER | {"mask": 1, "reasoning_content": "r"}],
        "history": ["h"],
        "id": 5,
    } | SHAREGPT
    encoded, unused = chat.encode_document(document)
    assert encoded == chat.encode([USER, ANSWER])
    assert unused == ("conversations", "history", "id", "mask", "reasoning_content")
    as_text = document | {"messages": json.dumps(document["messages"])}
    assert chat.encode_document(as_text) == (encoded, unused)
    assert without({"chosen": [{"mask": 1, "a": 2}], "mask": None}, ["mask"]) == ({"chosen": [{"a": 2}]}, {"mask"})
    for content in (
        '{"mask": 3, "answer": 1.0}',
        "[1, 2]",
        {"mask": 1, "v": 2},
        [{"mask": 1}],
        [1],
        5,
        None,
    ):  # texts and data
        document = {"messages": [USER | {"content": content}, ANSWER | {"content": content, "mask": 1}]}
        kept = {"messages": [USER | {"content": content}, ANSWER | {"content": content}]}
        assert without(document, ["mask", "answer"]) == (kept, {"mask"})
    part = {"type": "text", "text": "a"}
    assert without({"messages": [USER | {"content": [part | {"mask": 0}, "b"]}]}, ["mask"]) == (
        {"messages": [USER | {"content": [part, "b"]}]},
        {"mask"},
    )
    assert chat.fingerprint != load_chat_format("chatml", CHATML).fingerprint
