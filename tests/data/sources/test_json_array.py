"""JSON files that hold one array."""

import gzip
import io
import json
import os
import tracemalloc
from random import Random

import pytest

from tests.data.sources.helpers import error_of, messages, read
from tests.data.sources.test_streams import compress
from trainer.data.sources import json_array
from trainer.data.sources.json_array import BrokenArray, read_array

TEXTS = ["one", 'two "quoted" \\', "\\", "[{,}]", "ünï\nnew line", "x" * 50, '\\"']
LAYOUTS = {
    "one line": lambda records: json.dumps(records),
    "pretty-printed": lambda records: json.dumps(records, indent=2, ensure_ascii=False),
    "one object per line": lambda records: "[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n",
    "commas first": lambda records: "\n [" + "\n,".join(map(json.dumps, records)) + "]\r\n\n",
    "a comma at the end": lambda records: "[" + "".join(f"{json.dumps(record)},\n" for record in records) + "]",
}


@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, 2**40])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_each_element_is_a_document_once_in_spans_of_any_size(tmp_path, layout, name, chunk_bytes):
    content = LAYOUTS[layout]([{"text": text, "n": [1, {"a": "]"}]} for text in TEXTS])
    (tmp_path / name).write_text(content)
    (tmp_path / "y.jsonl").write_text('{"text": "a line"}\n')
    assert read("jsonl", tmp_path, chunk_bytes) == [*TEXTS, "a line"]
    (tmp_path / name).write_text("\ufeff" + content)
    assert read("jsonl", tmp_path / name, chunk_bytes) == TEXTS


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_array_reads_like_a_plain_one(tmp_path, suffix):
    content = LAYOUTS["pretty-printed"]([{"text": text} for text in TEXTS])
    (tmp_path / f"x.json{suffix}").write_bytes(compress(suffix, content.encode()))
    assert read("jsonl", tmp_path, 10) == TEXTS


def test_conversations_and_pairs_are_read_from_an_array(tmp_path):
    records = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(24)]
    (tmp_path / "x.json").write_text(LAYOUTS["one object per line"](records))
    for dataset in ("chat", "preference"):
        assert read(dataset, tmp_path) == records


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 64])
def test_random_arrays_are_split_at_the_same_places_as_by_json(monkeypatch, chunk_bytes):
    monkeypatch.setattr(json_array, "_CHUNK_BYTES", chunk_bytes)
    random = Random(chunk_bytes)

    def value(depth: int):
        kind = random.randrange(6 if depth else 3)
        text = "".join(random.choice('\\"[]{},: \nü') for _ in range(random.randrange(6)))
        if kind < 3:
            return (text, random.random(), None)[kind]
        values = [value(depth - 1) for _ in range(random.randrange(4))]
        return values if kind < 5 else {f"{i}{text}": v for i, v in enumerate(values)}

    for _ in range(300):
        records = [value(3) for _ in range(random.randrange(5))]
        content = json.dumps(records, indent=random.choice((None, 0, 2)), ensure_ascii=random.random() < 0.5).encode()
        elements = list(read_array(io.BytesIO(content), 10**6))
        assert [json.loads(element.content) for element in elements] == records
        if len(content.splitlines()) > 1:
            lines = content.splitlines()
            for element in elements:
                assert lines[element.line - 1].strip().startswith(element.content.splitlines()[0].strip()[:1])
        with pytest.raises(BrokenArray, match="the array has no end"):
            list(read_array(io.BytesIO(content[: random.randrange(1, len(content))]), 10**6))


@pytest.mark.parametrize("chunk_bytes", [1, 50, 2**40])
def test_a_bad_element_has_its_line_and_number(tmp_path, chunk_bytes):
    file = tmp_path / "x.json"
    file.write_text(
        '[\n  {"text": "a"},\n  {\n    "text": 5\n  },\n\n  {\'text\': 1},\n  {"text": "b"},, 3,\n  {"text": "'
        + "x" * 100
        + '"},\n  {"text": "\\ud800"}, {"text": "c"} {"text": "d"},\n  {"text": "'
        + "y" * 88
        + '"}\n]'
    )
    found = read("jsonl", file, chunk_bytes, max_document_bytes=100)
    assert [document for document in found if isinstance(document, str)] == ["a", "b", "y" * 88]
    assert messages(found) == [
        f"{file}:3: element 2: field 'text', which data.text_field names, is a number, not a string",
        f"{file}:7: element 3: the element is not valid JSON: Expecting property name enclosed in double quotes (character 2); "
        "Python's notation is not JSON",
        f"{file}:8: element 5: the element is not valid JSON: Expecting value (character 1)",
        f"{file}:8: element 6: expected an object, found a number",
        f"{file}:9: element 7: the document is longer than data.max_document_bytes = 100",
        f"{file}:10: element 8: the document contains a lone surrogate",
        f"{file}:10: element 9: the element is not valid JSON: Extra data (character 15)",
    ]


def test_an_element_that_is_not_utf8_is_a_bad_document(tmp_path):
    (tmp_path / "x.json").write_bytes(b'[{"text": "a"},\n{"text": "\xff"}]')
    assert messages(read("jsonl", tmp_path)) == [
        f"{tmp_path}/x.json:2: element 2: the element is not UTF-8 text (byte 10)"
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[\n{"text": "a"},\n{"text": "b', "the array has no end: element 2, in line 3, is incomplete"),
        ('[{"text": "a"}, {"text": "b"}', "the array has no end: element 2, in line 1, is incomplete"),
        ('[{"text": "a"},\n', "the array has no end: element 2, in line 2, is incomplete"),
        ("[", "the array has no end: element 1, in line 1, is incomplete"),
        ('[{"text": "a", {"text": "b"}]', "the array has no end: element 1, in line 1, is incomplete"),
        ('[{"text": "a"}},\n{"text": "b"}]', "element 1, in line 1, is followed by } instead of ]"),
        ('[{"text": "a"}]\n\n{"text": "b"}\n', "more text follows the array, which ends in line 1"),
        (
            '[{"text": "a"}]\n[{"text": "b"}]\n',
            "more text follows the array, which ends in line 1; a document of JSON lines must be an object",
        ),
        ('[\n{"text": "a"},\n\n}', "element 2, in line 4, is followed by } instead of ]"),
        ("[INFO] a log\n", "more text follows the array, which ends in line 1"),
    ],
)
def test_a_file_that_is_not_one_complete_array_is_an_error(tmp_path, content, reason):
    """Regardless of on_bad_document, because any number of documents may be missing."""
    file = tmp_path / "x.json"
    file.write_text(content)
    for chunk_bytes in (1, 2**40):
        expected = ("data.path", f"{file} is not one complete JSON array: {reason}")
        assert error_of("jsonl", file, chunk_bytes=chunk_bytes) == expected
    (tmp_path / "y.json.gz").write_bytes(gzip.compress(content.encode()))
    assert error_of("jsonl", tmp_path / "y.json.gz")[1].endswith(reason)


def test_a_truncated_compressed_array_is_an_error(tmp_path):
    file = tmp_path / "x.json.gz"
    file.write_bytes(
        gzip.compress(LAYOUTS["one line"]([{"text": os.urandom(9).hex()} for _ in range(999)]).encode())[:-99]
    )
    message = f"{file} is not one complete JSON array: the gzip data is truncated"
    assert error_of("jsonl", file) == ("data.path", message)


@pytest.mark.parametrize("content", ["[]", " [\n] ", "[,]"])
def test_an_empty_array_has_no_documents(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    assert len(read("jsonl", tmp_path)) == content.count(",")


def test_an_array_is_read_in_bounded_memory(tmp_path):
    file = tmp_path / "x.json"
    with file.open("w") as out:
        out.write(" " * 5000 + "[" + ",".join(f'{{"text": "{i}"}}' for i in range(3000)))
        out.write(',{"text": "')
        for _ in range(50):
            out.write("\\\\" * 2**19)
        out.write('"}, {"text": "after"}]')
    tracemalloc.start()
    found = read("jsonl", file, max_document_bytes=2**20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found[0], found[-1], len(found)) == ("0", "after", 3002)
    assert messages(found) == [f"{file}:1: element 3001: the document is longer than data.max_document_bytes = 1048576"]
    assert peak < 2**24


def test_an_object_with_a_list_inside_is_a_bad_document_that_names_the_list(tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"version": 1, "data": [{"text": "a"}, {"text": "b"}]}))
    hint = "field 'data' holds a list of {}records; the file must hold this list only"
    assert messages(read("jsonl", file)) == [f"{file}:1: {hint.format('2 ')}"]
    file.write_text(json.dumps({"data": [{"text": "a"}]}, indent=1))
    assert messages(read("jsonl", file))[0] == (
        f"{file}:1: the line is not valid JSON: Expecting property name enclosed in double quotes (column 2); "
        f"a file must hold one complete object per line, or one array; {hint.format('')}"
    )
    file.write_text(json.dumps({"info": {"authors": [{"name": "a"}]}, "data": [{"text": "a"}]}, indent=1))
    assert messages(read("jsonl", file))[0].endswith(hint.format("")), "the list in an inner object is not meant"
