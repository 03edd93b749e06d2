"""Corpora in every format. The documents of an accepted corpus are those of its files, read with other libraries."""

import codecs
import gzip
import io
import itertools
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pyarrow
from pyarrow import parquet

from scripts.dev.fuzz_cases.damage import SAMPLES, damage_bytes, damage_json, require
from trainer.config import ConfigError, DataConfig, TokenizerConfig
from trainer.data.prepare.prepare import prepare
from trainer.data.store.store import SPLITS, check_content, open_store, read_description
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.data.tokenizer.protocol import Tokenizer

_TOKENIZER = TokenizerConfig()


def _text(random: Random) -> str:
    characters = (chr(random.randrange(1, 0xD7FF)) for _ in range(random.randrange(30)))
    return random.choice((*SAMPLES, "".join(characters))) * random.choice((1, 1, 2, 0))


def _utf8(content: bytes) -> list[str]:
    """Return the text, or nothing if it is empty or not UTF-8."""
    try:
        text = content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError:
        return []
    return [text] if text else []


def _json_line(line: bytes) -> list[str]:
    try:
        record = json.loads(line.decode())
        text = record["text"]
        text.encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return [text] if isinstance(text, str) and text else []


def _json_lines(content: bytes) -> list[str]:
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    return [text for line in lines for text in _json_line(line)]


def _tokens_of(random: Random, tokenizer: Tokenizer) -> np.ndarray:
    documents = ([*tokenizer.encode(_text(random)), tokenizer.eos] for _ in range(random.randrange(1, 5)))
    return np.array(
        [token for document in documents for token in document], random.choice(("<u2", "<u4", "<i8", ">i4"))
    )


def _megatron(random: Random, tokenizer: Tokenizer) -> tuple[bytes, bytes, list[list[int]]]:
    """Return the content of a .bin file and of its .idx file, and the documents that are not empty."""
    documents = [np.array(tokenizer.encode(_text(random)), "<u2") for _ in range(random.randrange(1, 5))]
    lengths = np.array([len(document) for document in documents], "<i4")
    pointers = np.cumsum(np.append(0, 2 * lengths))[:-1].astype("<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(documents), len(documents) + 1)
    boundaries = np.arange(len(documents) + 1, dtype="<i8")
    index = header + lengths.tobytes() + pointers.tobytes() + boundaries.tobytes()
    return b"".join(d.tobytes() for d in documents), index, [d.tolist() for d in documents if len(d)]


def _split_at_eos(tokens: np.ndarray, eos: int) -> Iterator[list[int]]:
    document: list[int] = []
    for token in tokens.tolist():
        document.append(token)
        if token == eos:
            yield document
            document = []
    if document:
        yield document


def _stored(folder: Path) -> list[list[int]]:
    """Return all documents of a store."""
    documents = []
    for split in SPLITS:
        store = open_store(folder, split)
        ends = store.documents.tolist()
        documents += [store.tokens[a:b].tolist() for a, b in itertools.pairwise(ends)]
    return documents


def _write(
    random: Random, kind: str, damaged: bool, tokenizer: Tokenizer, folder: Path
) -> tuple[str, list[str] | list[list[int]] | None]:
    """Write a corpus. Return its path, and its documents as other libraries read them, or None if they may be anything."""
    texts = [_text(random) for _ in range(random.randrange(1, 6))]

    def write(name: str, content: bytes) -> bytes:
        for _ in range(random.choice((1, 1, 2, 5)) if damaged else 0):
            content = damage_bytes(random, content)
        (folder / name).write_bytes(content)
        return content

    match kind:
        case "text":
            contents = [write(f"{i}.txt", text.encode()) for i, text in enumerate(texts)]
            return str(folder), [text for content in contents for text in _utf8(content)]
        case "jsonl":
            records = [{"text": text, "id": i} for i, text in enumerate(texts)]
            records = [damage_json(random, record) if damaged else record for record in records]
            content = b"\n".join(json.dumps(record).encode() for record in records)
            return str(folder / "a.jsonl"), _json_lines(write("a.jsonl", content))
        case "array":
            records = [{"text": text, "id": i} for i, text in enumerate(texts)]
            records = [
                damage_json(random, record) if damaged and random.random() < 0.5 else record for record in records
            ]
            content = json.dumps(records, indent=random.choice((None, 0, 2)), ensure_ascii=random.random() < 0.5)
            content = write("a.json", content.encode("utf-8", "surrogatepass"))
            try:
                elements = json.loads(content.decode())
            except (ValueError, RecursionError):
                return str(folder), None
            if not isinstance(elements, list):
                return str(folder), None
            return str(folder), [text for element in elements for text in _json_line(json.dumps(element).encode())]
        case "gzip":
            content = write("a.jsonl.gz", gzip.compress(b"\n".join(json.dumps({"text": t}).encode() for t in texts)))
            try:
                return str(folder), _json_lines(gzip.decompress(content))
            except (OSError, EOFError, zlib.error):
                return str(folder), None
        case "parquet":
            buffer = io.BytesIO()
            parquet.write_table(
                pyarrow.table({"text": texts}), buffer, compression=random.choice(("none", "snappy", "zstd"))
            )
            content = write("a.parquet", buffer.getvalue())
            return str(folder), None if damaged or not content else [text for text in texts if text]
        case "npy":
            buffer = io.BytesIO()
            np.save(buffer, _tokens_of(random, tokenizer))
            content = write("a.npy", buffer.getvalue())
            try:
                tokens = np.load(io.BytesIO(content))
            except Exception:  # numpy evaluates the header as Python
                return str(folder), []
            return str(folder), [] if tokens.ndim != 1 else list(_split_at_eos(tokens, tokenizer.eos))
        case "bin":
            content = write("a.bin", _tokens_of(random, tokenizer).astype("<u2").tobytes())
            whole = b"" if len(content) % 2 else content
            return str(folder), list(_split_at_eos(np.frombuffer(whole, "<u2"), tokenizer.eos))
        case "megatron":
            tokens, index, documents = _megatron(random, tokenizer)
            write("a.bin", tokens)
            write("a.idx", index)
            return str(folder), None if damaged else documents
        case _:
            records = [
                {"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": t}]} for t in texts
            ]
            records = [damage_json(random, record) if damaged else record for record in records]
            write("a.jsonl", b"\n".join(json.dumps(record).encode() for record in records))
            return str(folder / "a.jsonl"), None


_DATASETS = {"text": "text", "jsonl": "jsonl", "array": "jsonl", "gzip": "jsonl", "parquet": "parquet", "chat": "chat"}
_DATASETS |= dict.fromkeys(("npy", "bin", "megatron"), "tokens")


def run(random: Random, fixtures: Path, folder: Path) -> str:
    tokenizer = load_tokenizer(_TOKENIZER)
    kind, damaged = random.choice(list(_DATASETS)), random.random() < 0.7
    corpus = folder / "corpus"
    corpus.mkdir()
    path, expected = _write(random, kind, damaged, tokenizer, corpus)
    stores, held_out = str(folder / "stores"), random.choice((0.0, 0.3))
    data = DataConfig(
        dataset=_DATASETS[kind],
        path=path,
        store_folder=stores,
        held_out_fraction=held_out,
        max_bad_documents_percent=100.0,
    )
    try:
        store = prepare(data, _TOKENIZER, tokenizer)
    except ConfigError as error:
        require(damaged or not expected, f"{kind}: an intact corpus with documents was refused: {error}")
        raise
    check_content(store)
    documents = _stored(store)
    count = sum(read_description(store)["splits"][split]["documents"] for split in SPLITS)
    require(count == len(documents), f"store.json lists {count} documents, but there are {len(documents)}")
    require(
        all(0 <= token < tokenizer.vocab_size for document in documents for token in document),
        "a token is out of range",
    )
    if expected is None:
        return ""
    if _DATASETS[kind] != "tokens":
        start = len(tokenizer.prefix)
        ends = {(tuple(document[:start]), document[-1]) for document in documents}
        require(ends <= {(tokenizer.prefix, tokenizer.eos)}, "a document has no BOS or EOS")
        documents = [tokenizer.decode(document[start:-1]) for document in documents]
    require(sorted(documents) == sorted(expected), f"{kind}: expected {expected}, stored {documents}")
    return ""
