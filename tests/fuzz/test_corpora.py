"""Corpora in every format. The documents of an accepted corpus are those of its files, read with other libraries."""

import codecs
import csv
import gzip
import io
import itertools
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from tests.fuzz.check import limits, may_refuse
from tests.fuzz.strategies import SAMPLES, ByteChange, JsonChange, apply, byte_changes, json_changes, sometimes
from trainer.base.config import DataConfig, TokenizerConfig
from trainer.data.prepare.prepare import prepare
from trainer.data.store.store import SPLITS, check_content, open_store, read_description
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.data.tokenizer.protocol import Tokenizer

_TOKENIZER = TokenizerConfig()
_TOKEN_TYPES = ["<u2", "<u4", "<i8", ">i4"]
Expected = list[str] | list[list[int]] | None
"""Texts or tokens of the documents in any order, or None if they may be anything."""


@dataclass(frozen=True)
class Case:
    kind: str
    texts: tuple[str, ...]
    changes: tuple[ByteChange, ...]
    """Of each file."""
    record_changes: tuple[JsonChange, ...]
    """Of each record in JSON."""
    number: int
    """Selects an option of the format."""
    held_out_fraction: float

    @property
    def is_intact(self) -> bool:
        return not self.changes and not self.record_changes

    def write(self, path: Path, content: bytes) -> bytes:
        """Write a file with the changes, and return its content."""
        content = apply(self.changes, content)
        path.write_bytes(content)
        return content

    def records(self, make: Callable[[int, str], Any]) -> list[Any]:
        """Return the record of each text with the changes. make: function (number, text) -> record."""
        records = [make(i, text) for i, text in enumerate(self.texts)]
        for change in self.record_changes:
            records = [change.apply(record) for record in records]
        return records

    def tokens(self, tokenizer: Tokenizer, dtype: str) -> np.ndarray:
        documents = [[*tokenizer.encode(text), tokenizer.eos] for text in self.texts]
        return np.array(list(itertools.chain(*documents)), dtype)


def _text_record(number: int, text: str) -> dict[str, Any]:
    return {"text": text, "id": number}


def _utf8(content: bytes) -> list[str]:
    """Return the text, or nothing if it is empty or not UTF-8."""
    try:
        text = content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError:
        return []
    return [text] if text else []


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("two fields have one name")
    return dict(pairs)


def _json_line(line: bytes) -> list[str]:
    try:
        text = json.loads(line.decode(), object_pairs_hook=_object)["text"]
        text.encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return [text] if isinstance(text, str) and text else []


def _json_lines(content: bytes) -> list[str]:
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    return [text for line in lines for text in _json_line(line)]


def _split_at_eos(tokens: np.ndarray, eos: int) -> Iterator[list[int]]:
    document: list[int] = []
    for token in tokens.tolist():
        document.append(token)
        if token == eos:
            yield document
            document = []
    if document:
        yield document


def _write_text(case: Case, folder: Path, tokenizer: Tokenizer) -> Expected:
    contents = [case.write(folder / f"{i}.txt", text.encode()) for i, text in enumerate(case.texts)]
    return [text for content in contents for text in _utf8(content)]


def _write_jsonl(case: Case, folder: Path, tokenizer: Tokenizer) -> Expected:
    content = b"\n".join(json.dumps(record).encode() for record in case.records(_text_record))
    return _json_lines(case.write(folder / "a.jsonl", content))


def _write_array(case: Case, folder: Path, tokenizer: Tokenizer) -> Expected:
    indent, ascii = (None, 0, 2)[case.number % 3], case.number % 2 == 0
    content = json.dumps(case.records(_text_record), indent=indent, ensure_ascii=ascii)
    content = case.write(folder / "a.json", content.encode("utf-8", "surrogatepass"))
    try:
        elements = json.loads(content.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(elements, list):
        return None
    return [text for element in elements for text in _json_line(json.dumps(element).encode())]


def _write_gzip(case: Case, folder: Path, tokenizer: Tokenizer) -> Expected:
    content = b"\n".join(json.dumps(record).encode() for record in case.records(_text_record))
    content = case.write(folder / "a.jsonl.gz", gzip.compress(content))
    try:
        return _json_lines(gzip.decompress(content))
    except (OSError, EOFError, zlib.error):
        return None


def _write_parquet(case: Case, folder: Path, tokenizer: Tokenizer) -> Expected:
    buffer, compression = io.BytesIO(), ("none", "snappy", "zstd")[case.number % 3]
    parquet.write_table(pyarrow.table({"text": list(case.texts)}), buffer, compression=compression)
    case.write(folder / "a.parquet", buffer.getvalue())
    return [text for text in case.texts if text] if case.is_intact else None


def _write_csv(case: Case, folder: Path, tokenizer: Tokenizer) -> Expected:
    out = io.StringIO()
    csv.writer(out, delimiter=",;\t"[case.number % 3]).writerows([("id", "text"), *enumerate(case.texts)])
    case.write(folder / "a.csv", out.getvalue().encode())
    return [text for text in case.texts if text] if case.is_intact else None


def _write_npy(case: Case, folder: Path, tokenizer: Tokenizer) -> Expected:
    buffer = io.BytesIO()
    np.save(buffer, case.tokens(tokenizer, _TOKEN_TYPES[case.number % 4]))
    content = case.write(folder / "a.npy", buffer.getvalue())
    try:
        tokens = np.load(io.BytesIO(content))
    except Exception:  # numpy evaluates the header as Python
        return []
    return [] if tokens.ndim != 1 else list(_split_at_eos(tokens, tokenizer.eos))


def _write_bin(case: Case, folder: Path, tokenizer: Tokenizer) -> Expected:
    content = case.write(folder / "a.bin", case.tokens(tokenizer, "<u2").tobytes())
    return list(_split_at_eos(np.frombuffer(b"" if len(content) % 2 else content, "<u2"), tokenizer.eos))


def _write_megatron(case: Case, folder: Path, tokenizer: Tokenizer) -> Expected:
    documents = [np.array(tokenizer.encode(text), "<u2") for text in case.texts]
    lengths = np.array([len(document) for document in documents], "<i4")
    pointers = np.cumsum(np.append(0, 2 * lengths))[:-1].astype("<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(documents), len(documents) + 1)
    boundaries = np.arange(len(documents) + 1, dtype="<i8")
    case.write(folder / "a.bin", b"".join(document.tobytes() for document in documents))
    case.write(folder / "a.idx", header + lengths.tobytes() + pointers.tobytes() + boundaries.tobytes())
    return [document.tolist() for document in documents if len(document)] if case.is_intact else None


def _write_chat(case: Case, folder: Path, tokenizer: Tokenizer) -> Expected:
    def record(number: int, text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}

    content = b"\n".join(json.dumps(record).encode() for record in case.records(record))
    case.write(folder / "a.jsonl", content)
    return None


_KINDS = {
    "text": ("text", _write_text),
    "jsonl": ("jsonl", _write_jsonl),
    "array": ("jsonl", _write_array),
    "gzip": ("jsonl", _write_gzip),
    "parquet": ("parquet", _write_parquet),
    "csv": ("csv", _write_csv),
    "npy": ("tokens", _write_npy),
    "bin": ("tokens", _write_bin),
    "megatron": ("tokens", _write_megatron),
    "chat": ("chat", _write_chat),
}
"""Kind of corpus -> data.dataset, function that writes the files and returns the documents that a correct reader finds."""

_texts = st.one_of(
    st.sampled_from(SAMPLES),
    st.text(st.characters(min_codepoint=1, max_codepoint=0xD7FE), max_size=30),
    st.sampled_from(SAMPLES).map(lambda text: text * 2),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    damaged = draw(sometimes(70))
    return Case(
        kind=draw(st.sampled_from([*list(_KINDS)[:-1] * 2, "chat"])),  # each chat starts processes of its template
        texts=tuple(draw(st.lists(_texts, min_size=1, max_size=5))),
        changes=tuple(draw(st.lists(byte_changes, max_size=4))) if damaged else (),
        record_changes=tuple(draw(st.lists(json_changes, max_size=2))) if damaged else (),
        number=draw(st.integers(0, 11)),
        held_out_fraction=draw(st.sampled_from([0.0, 0.3])),
    )


def _stored(folder: Path) -> list[list[int]]:
    """Return all documents of a store."""
    check_content(folder)
    documents = []
    for split in SPLITS:
        store = open_store(folder, split)
        documents += [store.tokens[a:b].tolist() for a, b in itertools.pairwise(store.documents[:].tolist())]
    count = sum(read_description(folder)["splits"][split]["documents"] for split in SPLITS)
    assert count == len(documents)
    return documents


@given(cases())
def test_a_corpus_is_refused_with_one_line_or_its_documents_are_stored(case):
    tokenizer = load_tokenizer(_TOKENIZER)
    with limits() as folder:
        corpus = folder / "corpus"
        corpus.mkdir()
        dataset, write = _KINDS[case.kind]
        expected = write(case, corpus, tokenizer)
        data = DataConfig(
            dataset=dataset,
            path=str(corpus),
            store_folder=str(folder / "stores"),
            held_out_fraction=case.held_out_fraction,
            max_bad_documents_percent=100.0,
        )
        with may_refuse(expected=not case.is_intact or not expected) as refusals:
            store = prepare(data, _TOKENIZER, tokenizer)
        if refusals:
            return
        documents = _stored(store)
        assert all(0 <= token < tokenizer.vocab_size for document in documents for token in document)
        if expected is None:
            return
        if dataset != "tokens":
            start = len(tokenizer.prefix)
            assert all(document[:start] == [*tokenizer.prefix] for document in documents)
            assert all(document[-1] == tokenizer.eos for document in documents)
            documents = [tokenizer.decode(document[start:-1]) for document in documents]
        assert sorted(documents) == sorted(expected)
