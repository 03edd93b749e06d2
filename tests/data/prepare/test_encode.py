"""Encoding of documents as tokens."""

import pytest

from tests.data.chat.examples import CHATML, DEFAULT, TALK
from tests.data.tokenizer.test_backends import train_sentencepiece
from trainer.base.config import DataConfig
from trainer.data.prepare.encode import encoder
from trainer.data.sources.source import InvalidDocument
from trainer.data.tokenizer.backends import load_tokenizer


def nested():
    """Return an empty list inside 100,000 lists."""
    value = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("dataset", "document"),
    [
        ("chat", {"messages": [TALK[1] | {"extra": nested()}, TALK[2]]}),
        ("preference", {"prompt": "q", "chosen": nested(), "rejected": nested()}),
    ],
)
def test_a_document_nested_too_deeply_is_invalid(dataset, document):
    encode = encoder(DataConfig(dataset=dataset, chat_template="llama3"), DEFAULT)
    with pytest.raises(InvalidDocument, match="the document is nested too deeply"):
        encode(document)


USER = {"role": "user", "content": "q"}


def answer(content: str, **fields) -> list[dict]:
    return [{"role": "assistant", "content": content, **fields}]


def call(arguments) -> list[dict]:
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


@pytest.mark.parametrize(
    ("template", "chosen", "rejected"),
    [
        ("llama3", answer("a"), answer(" a\n")),
        ("llama3", answer("a", id=1), answer("a", id=2)),
        ("llama3", answer("a"), answer([{"type": "text", "text": "a"}])),
        ("llama3", answer("a", weight=1), answer("a")),
        ("chatml", call('{"x": 1}'), call('{"x":1}')),
        ("chatml", call({}), call("")),
    ],
)
def test_a_pair_whose_answers_have_equal_tokens_is_invalid(template, chosen, rejected):
    """Such a pair has no gradient."""
    encode = encoder(DataConfig(dataset="preference", chat_template=template), CHATML)
    with pytest.raises(InvalidDocument) as invalid:
        encode({"prompt": [USER], "chosen": chosen, "rejected": rejected})
    assert (
        str(invalid.value) == "the chosen and the rejected answer have the same tokens, so there is nothing to prefer"
    )


@pytest.mark.parametrize(
    ("chosen", "rejected"), [("the  fox", "the fox"), ("the fox ", "the fox"), ("\ufb01ne", "fine")]
)
def test_a_pair_that_the_tokenizer_normalizes_alike_is_invalid(tmp_path, chosen, rejected):
    """By default, sentencepiece normalizes characters and removes spaces."""
    encode = encoder(
        DataConfig(dataset="preference", chat_template="llama2"), load_tokenizer(train_sentencepiece(tmp_path))
    )
    with pytest.raises(InvalidDocument, match="have the same tokens, so there is nothing to prefer"):
        encode({"prompt": "jumps over", "chosen": chosen, "rejected": rejected})
    encode({"prompt": "jumps over", "chosen": "the fox", "rejected": "the quick fox"})


def test_a_pair_that_differs_in_white_space_that_is_kept_is_valid():
    encode = encoder(DataConfig(dataset="preference", chat_template="chatml"), CHATML)
    assert (encode({"prompt": [USER], "chosen": answer("a"), "rejected": answer(" a")}).targets == 2).sum() == 1
    assert len(encode({"prompt": "p", "chosen": "a", "rejected": " a"}).tokens) > 4


@pytest.mark.parametrize(
    ("dataset", "document"),
    [
        ("chat", {"messages": [USER, *answer("a", stamp=3)], "id": 1, "mask": [0]}),
        (
            "preference",
            {"prompt": [USER | {"mask": 1}], "chosen": answer("a", stamp=3), "rejected": answer("b"), "id": 1},
        ),
    ],
)
def test_the_names_of_unused_fields_are_returned(dataset, document):
    config = DataConfig(dataset=dataset, chat_template="llama3", ignored_fields=("mask",))
    assert encoder(config, DEFAULT)(document).unused_fields == ("id", "mask", "stamp")


def test_a_field_that_data_columns_replaces_is_counted_and_a_missing_one_is_named():
    encode = encoder(DataConfig(dataset="chat", columns={"question": "query", "answer": "solution"}), DEFAULT)
    encoded = encode({"query": "q", "solution": "s", "answer": "another", "id": 1})
    assert encoded.unused_fields == ("answer", "id")
    assert encoded.tokens.tolist() == encode({"messages": [USER, *answer("s")]}).tokens.tolist()
    with pytest.raises(InvalidDocument) as invalid:
        encode({"qeury": "q", "solution": "s"})
    assert str(invalid.value).startswith(
        "the document has no field 'query', which data.columns names; did you mean 'qeury'?; the document has no field question; "
    )
