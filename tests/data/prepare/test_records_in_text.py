"""Records are not read as texts: a file of them as one text, or a field with messages as JSON text."""

import json

import pytest

from trainer.base.config import ConfigError, DataConfig, TokenizerConfig
from trainer.data.prepare.prepare import prepare
from trainer.data.prepare.records_in_text import records_in
from trainer.data.tokenizer.backends import load_tokenizer

TALK = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "id": 1}
PAIR = {"prompt": "p", "chosen": "c", "rejected": "r"}
LINES = {
    "chat": [
        TALK,
        SHAREGPT,
        {"prompt": "p", "completion": "c"},
        {"question": "q", "answer": "a"},
        {"instruction": "i", "output": "o"},
    ],
    "preference": [PAIR, {"chosen": TALK["messages"], "rejected": SHAREGPT["conversations"]}],
    "jsonl": [{"text": "t"}, {"id": 1, "text": "t"}],
}


@pytest.mark.parametrize(
    ("reader", "record"), [(reader, record) for reader, records in LINES.items() for record in records]
)
def test_json_records_in_a_file_are_no_text(reader, record):
    one = json.dumps(record)
    for text in (
        one,
        f"{one}\n{one}\n",
        f"\n  {one}\n",
        f"[{one},\n{one}]",
        f" [\n {one}]",
        json.dumps(record, indent=2),
    ):
        line = records_in(text, is_file=True)
        assert line.startswith("this is no text, but JSON of records with the fields ") and line.endswith(
            f'; dataset = "{reader}" reads them'
        ), text


def test_a_table_in_a_file_is_no_text():
    for header, reader in (
        ("question,answer", "chat"),
        ("id\ttext", "csv"),
        ("prompt,chosen,rejected,id", "preference"),
        ("question;answer", "chat"),
        (",question,answer", "chat"),
        ("Unnamed: 0\tquestion\tanswer", "chat"),
    ):
        separator = next(c for c in "\t;," if c in header)
        rows = f"{header}\n{separator.join('x' for _ in header.split(separator))}\n"
        assert records_in(rows, is_file=True).endswith(f'; dataset = "{reader}" reads them')
        assert records_in(rows, is_file=False) == ""


def test_messages_as_json_text_are_no_text():
    for messages in (TALK["messages"], SHAREGPT["conversations"]):
        line = 'this is no text, but the JSON text of records with the fields messages; dataset = "chat" reads them'
        assert records_in(json.dumps(messages), is_file=False) == line


@pytest.mark.parametrize(
    "text",
    [
        "a text",
        "{not json",
        '{"name": "package", "version": 1}',
        '[{"name": "x"}]',
        "[1, 2]",
        "[" * 100_000,
        '{"a":' * 100_000,
        "Dear reader, this is\na letter",
        "name,age\nann,5\n",
        "question, and\nanswer",
        "",
        " \n",
        "import json, text\nx",
    ],
)
def test_other_texts_are_texts(text):
    assert records_in(text, is_file=True) == records_in(text, is_file=False) == ""


def test_a_file_of_conversations_is_refused_as_a_text(tmp_path):
    (tmp_path / "chats.jsonl").write_text(json.dumps(TALK) * 3)
    data = DataConfig(dataset="text", path=str(tmp_path / "chats.jsonl"), store_folder=str(tmp_path / "stores"))
    with pytest.raises(ConfigError, match=r'chats.jsonl: this is no text, but JSON .* dataset = "chat" reads them'):
        prepare(data, TokenizerConfig(), load_tokenizer(TokenizerConfig()))
