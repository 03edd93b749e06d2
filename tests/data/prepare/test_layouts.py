"""Equal conversations and pairs in all file formats and layouts have equal tokens and masks."""

import csv
import functools
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from tests.data.chat.examples import DEFAULT
from tests.data.sources.helpers import read
from trainer.base.config import DataConfig
from trainer.data.prepare.encode import encoder

Record = dict[str, Any]
TALKS = [
    ("What is 1 + 1?", "2"),
    ('A "quoted", question;\nin two lines, ünï', "An answer,\twith a tab"),
    ("Write a list", '["a", {"b": 1}]'),
]


def user(text: str) -> Record:
    return {"role": "user", "content": text}


def answer(text: str, **fields: Any) -> Record:
    return {"role": "assistant", "content": text, **fields}


def sharegpt(messages: list[Record]) -> list[Record]:
    senders = {"user": "human", "assistant": "gpt"}
    return [{"from": senders[m.pop("role")], "value": m.pop("content"), **m} for m in map(dict, messages)]


def each(make: Callable[[str, str], Record]) -> list[Record]:
    return [make(question, text) | {"id": i} for i, (question, text) in enumerate(TALKS)]


LONG = [user("q"), answer("no", weight=0), user("again"), answer("yes")]
CHATS: dict[str, tuple[list[Record], dict[str, str]]] = {
    "messages": (each(lambda q, a: {"messages": [user(q), answer(a)]}), {}),
    "ShareGPT": (each(lambda q, a: {"conversations": sharegpt([user(q), answer(a)])}), {}),
    "completion of messages": (each(lambda q, a: {"prompt": [user(q)], "completion": [answer(a)]}), {}),
    "Alpaca": (each(lambda q, a: {"instruction": q, "input": "", "output": a}), {}),
    "question and answer": (each(lambda q, a: {"question": q, "answer": a}), {}),
    "named columns": (
        each(lambda q, a: {"query": q, "reply": a, "answer": "another"}),
        {"question": "query", "answer": "reply"},
    ),
    "named messages": (
        each(lambda q, a: {"dialog": [{"speaker": "user", "text": q}, {"speaker": "assistant", "text": a}]}),
        {"messages": "dialog", "role": "speaker", "content": "text"},
    ),
}
OTHERS: dict[str, tuple[list[Record], dict[str, str]]] = {
    "completion of text": (each(lambda q, a: {"prompt": q, "completion": a}), {}),
    "long messages": ([{"messages": LONG, "system": None}, {"messages": LONG[2:], "system": "s"}], {}),
    "long ShareGPT": (
        [{"conversations": sharegpt(LONG), "system": None}, {"conversations": sharegpt(LONG[2:]), "system": "s"}],
        {},
    ),
}
PAIRS: dict[str, tuple[list[Record], dict[str, str]]] = {
    "messages": (each(lambda q, a: {"prompt": [user(q)], "chosen": [answer(a)], "rejected": [answer("worse")]}), {}),
    "shared messages": (
        each(lambda q, a: {"chosen": [user(q), answer(a)], "rejected": [user(q), answer("worse")]}),
        {},
    ),
    "ShareGPT": (
        each(
            lambda q, a: {
                "conversations": sharegpt([user(q)]),
                "chosen": sharegpt([answer(a)])[0],
                "rejected": sharegpt([answer("worse")])[0],
            }
        ),
        {},
    ),
    "question": (each(lambda q, a: {"question": q, "chosen": a, "rejected": "worse"}), {}),
    "instruction": (each(lambda q, a: {"instruction": q, "input": "", "chosen": a, "rejected": "worse"}), {}),
    "named columns": (
        each(lambda q, a: {"query": q, "good": a, "bad": "worse"}),
        {"question": "query", "chosen": "good", "rejected": "bad"},
    ),
}


def write_csv(path: Path, records: list[Record], delimiter: str) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        names = dict.fromkeys(name for record in records for name in record)
        writer = csv.DictWriter(file, names, delimiter=delimiter)
        writer.writeheader()
        for record in records:
            is_text = {name: isinstance(value, str) for name, value in record.items()}
            writer.writerow({n: v if v is None or is_text[n] else json.dumps(v) for n, v in record.items()})


def as_texts(record: Record) -> Record:
    """Return a record whose lists and objects are their JSON text."""
    return {name: json.dumps(v) if isinstance(v, list | dict) else v for name, v in record.items()}


def write_stream(path: Path, records: list[Record]) -> None:
    table = pa.Table.from_pylist(records)
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


FORMATS: dict[str, tuple[str, Callable[[Path, list[Record]], Any]]] = {
    "JSON lines": ("x.jsonl", lambda path, records: path.write_text("\n".join(map(json.dumps, records)))),
    "compressed": (
        "x.jsonl.gz",
        lambda path, records: path.write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode())),
    ),
    "array in a line": ("x.json", lambda path, records: path.write_text(json.dumps(records))),
    "pretty array": ("x.json", lambda path, records: path.write_text(json.dumps(records, indent=2))),
    "array of lines": (
        "x.json",
        lambda path, records: path.write_text("[" + ",\n".join(map(json.dumps, records)) + "]"),
    ),
    "texts in JSON lines": (
        "x.jsonl",
        lambda path, records: path.write_text("\n".join(json.dumps(as_texts(record)) for record in records)),
    ),
    "texts in Parquet": (
        "x.parquet",
        lambda path, records: pa.parquet.write_table(pa.Table.from_pylist([*map(as_texts, records)]), path),
    ),
    "Parquet": ("x.parquet", lambda path, records: pa.parquet.write_table(pa.Table.from_pylist(records), path)),
    "Arrow stream": ("x.arrow", write_stream),
    "Arrow file": ("x.feather", lambda path, records: pa.feather.write_feather(pa.Table.from_pylist(records), path)),
    "save_to_disk": ("x", lambda path, records: datasets.Dataset.from_list(records).save_to_disk(str(path))),
    "splits": (
        "x",
        lambda path, records: datasets.DatasetDict(train=datasets.Dataset.from_list(records)).save_to_disk(str(path)),
    ),
    "CSV": ("x.csv", lambda path, records: write_csv(path, records, ",")),
    "CSV with semicolons": ("x.csv", lambda path, records: write_csv(path, records, ";")),
    "TSV": ("x.tsv", lambda path, records: write_csv(path, records, "\t")),
}


@functools.cache
def encode_with(dataset: str, columns: tuple[tuple[str, str], ...]) -> Callable[[Any], Any]:
    return encoder(DataConfig(dataset=dataset, columns=dict(columns)), DEFAULT)


def encoded(dataset: str, path: Path, columns: dict[str, str]) -> list[tuple[list[int], list[int]]]:
    documents = read(dataset, path, columns=columns)
    encode = encode_with(dataset, tuple(columns.items()))
    return [(document.tokens.tolist(), document.targets.tolist()) for document in map(encode, documents)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Callable[[str, list[Record]], list]:
    """Function that encodes records in JSON lines."""

    @functools.cache
    def encode(dataset: str, text: str) -> list:
        path = tmp_path_factory.mktemp("expected") / "x.jsonl"
        path.write_text(text)
        return encoded(dataset, path, {})

    return lambda dataset, records: encode(dataset, "\n".join(map(json.dumps, records)))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("dataset", "layout"), [*(("chat", n) for n in CHATS), *(("preference", n) for n in PAIRS)])
def test_equal_content_has_equal_tokens_and_targets(tmp_path, expected, dataset, layout, format):
    layouts = CHATS if dataset == "chat" else PAIRS
    name, write = FORMATS[format]
    records, columns = layouts[layout]
    write(tmp_path / name, records)
    found = encoded(dataset, tmp_path / name, columns)
    assert found == expected(dataset, layouts["messages"][0])
    assert len(found) == 3 and all(any(targets) for _, targets in found)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", OTHERS)
def test_other_layouts_have_equal_tokens_in_all_formats(tmp_path, expected, layout, format):
    name, write = FORMATS[format]
    records, columns = OTHERS[layout]
    write(tmp_path / name, records)
    reference = OTHERS["long messages"] if layout.startswith("long") else OTHERS[layout]
    assert encoded("chat", tmp_path / name, columns) == expected("chat", reference[0])
