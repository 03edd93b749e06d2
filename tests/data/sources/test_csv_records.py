"""Tables of comma-separated and tab-separated values."""

import gzip
import json

import pytest

from tests.data.sources.helpers import error_of, messages, open_dataset, read
from trainer.data.sources.source import InvalidDocument, Span


def write(path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize("chunk_bytes", [3, 2**40])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_rows_are_read_once_with_quotes_and_line_ends_in_values(tmp_path, delimiter, end, chunk_bytes):
    rows = ["id,text", "1,a", '2,"b, ""c""' + end + 'd"', "", "3,ünï"]
    content = end.join(row if "b," in row else row.replace(",", delimiter) for row in rows)
    content = "\ufeff" + content.replace('2,"', f'2{delimiter}"')
    write(tmp_path / "x.csv", content)
    write(tmp_path / "y.csv.gz", gzip.compress(b"text\nthe end\n"))
    assert read("csv", tmp_path, chunk_bytes) == ["a", f'b, "c"{end}d', "ünï", "the end"]


def test_the_column_of_texts_must_exist(tmp_path):
    file = write(tmp_path / "x.csv", "id,Texts\n1,a\n")
    assert error_of("csv", file) == (
        "data.text_field",
        f"{file} has no column 'text'; its first row, which must name the columns: id, Texts; did you mean 'Texts'?",
    )
    assert read("csv", file, text_field="Texts") == ["a"]
    write(tmp_path / "x.csv", "a,b,a\n1,2,3\n")
    assert error_of("chat", file) == ("data.path", f"{file}: its first row names two columns 'a'")


def test_a_first_row_without_a_known_name_is_suspected_to_be_data(tmp_path):
    def reject(_record):
        raise InvalidDocument("no conversation")

    hint = "; the first row must name the columns, with , ; or a tab between them"
    for first_row, expected in (("Paris,France", hint), ("question,answer", "")):
        file = write(tmp_path / "x.csv", f"{first_row}\na,b\nc,d\n")
        found = open_dataset("chat", file).read(Span(file, 0, 2**40), reject)
        assert [bad.reason for bad in found] == [f"no conversation{expected}", "no conversation"]


@pytest.mark.parametrize(
    ("dataset", "header"), [("chat", "question,answer"), ("preference", "prompt,chosen,rejected"), ("csv", "text")]
)
def test_of_a_table_without_a_header_the_only_advice_is_to_add_one(tmp_path, dataset, header):
    file = write(tmp_path / "x.csv", "What is it?,It is.\nWho?,He.\n")
    assert error_of(dataset, file) == (
        "data.path",
        f"{file}: its first row (What is it?, It is.) does not name the columns; add a first row with their names, such as "
        f"{header}",
    )


def test_rows_that_cannot_be_used_are_bad_documents_with_their_line(tmp_path):
    file = write(
        tmp_path / "x.csv",
        b'id,text\n1,"a\nb"\n2\n3,c,d\n4,\xff\n5,\n6,' + b"x" * 60 + b"\n7,end\n",
    )
    found = read("csv", file, max_document_bytes=40)
    assert messages(found) == [
        f"{file}:4: the row has 1 value, but the first row names 2 columns",
        f"{file}:5: the row has 3 values, but the first row names 2 columns",
        f"{file}:6: the row is not UTF-8 text",
        f"{file}:7: the document is empty",
        f"{file}:8: the table cannot be read from here on: the document is longer than data.max_document_bytes = 40",
    ]
    assert found[0] == "a\nb" and found[-1].ends_file


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ('1,"never closed\n2,b\n', "unexpected end of data"),
        ('1,"a" b\n2,b\n', "',' expected after '\"'"),
    ],
)
def test_a_table_with_a_wrong_quote_ends_there_in_a_bad_document(tmp_path, rows, reason):
    """The rows that follow would be read as a part of a value."""
    file = write(tmp_path / "x.csv", f"id,text\n0,first\n{rows}")
    first, bad = read("csv", file)
    assert first == "first" and bad.ends_file
    assert str(bad) == f"{file}:3: the table cannot be read from here on: {reason}"


def test_a_damaged_or_foreign_file_is_a_bad_document(tmp_path):
    file = write(tmp_path / "x.csv.gz", gzip.compress(b"text\n" + b"a\n" * 9)[:-12])
    assert messages(read("csv", file))[-1].endswith("the gzip data is truncated")
    file = write(tmp_path / "y.csv", "text\na\n".encode("utf-16"))
    assert messages(read("csv", file)) == [
        f"{file}: this is UTF-16 text, not a table of values; convert such files to UTF-8"
    ]
    assert read("csv", write(tmp_path / "empty.csv", "")) == []


def test_cells_are_texts_or_flags(tmp_path):
    """chat_layouts.py reads messages in their JSON text, in every format."""
    talk = [{"role": "user", "content": "q"}]
    quoted = json.dumps(talk).replace('"', '""')
    cells = f'"{quoted}"'
    file = write(tmp_path / "x.csv", f',prompt,completion,text,weight,train\n0,{cells},"[1, 2]",{cells},1.0,False\n')
    assert read("chat", file) == [
        {
            "column 1": "0",
            "prompt": json.dumps(talk),
            "completion": "[1, 2]",
            "text": json.dumps(talk),
            "weight": 1,
            "train": False,
        }
    ]
