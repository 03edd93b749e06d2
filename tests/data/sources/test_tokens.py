"""Token files. The default tokenizer has 2048 tokens, and 1793 is EOS."""

import io
import pickle
import struct

import numpy as np
import pytest

from tests.data.sources.helpers import error_of, messages, open_dataset, read

EOS = 1793
ROW = [5, 6, EOS, 7, EOS, EOS, *range(200), EOS, 8, 9]
DOCUMENTS = [[5, 6, EOS], [7, EOS], [EOS], [*range(200), EOS], [8, 9]]
CHUNK_SIZES = [2, 6, 50, 2**40]
NO_NPY = "{} is truncated, or it is not a .npy file of numbers (Python objects are never loaded)"


def header(shape):
    """Return a .npy file of uint16 with any shape in its header, and two tokens."""
    text = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + bytes(4)


def lists(documents):
    return [f.tolist() if isinstance(f, np.ndarray) else str(f) for f in documents]


def write_index(path, lengths, boundaries=None, version=1, code=8, item=2):
    pointers = np.cumsum([0, *lengths])[:-1] * item
    boundaries = range(len(lengths) + 1) if boundaries is None else boundaries
    path.write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, len(lengths), len(boundaries))
        + np.array(lengths, "<i4").tobytes()
        + np.array(pointers, "<i8").tobytes()
        + np.array(boundaries, "<i8").tobytes()
    )


@pytest.mark.parametrize("chunk_bytes", CHUNK_SIZES)
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_raw_file_is_split_after_each_eos_in_spans_of_any_size(tmp_path, chunk_bytes, dtype):
    np.array(ROW, dtype).tofile(tmp_path / "x.bin")
    assert lists(read("tokens", tmp_path / "x.bin", chunk_bytes, token_dtype=dtype)) == DOCUMENTS
    np.array([*ROW, EOS], dtype).tofile(tmp_path / "x.bin")
    assert lists(read("tokens", tmp_path / "x.bin", chunk_bytes, token_dtype=dtype)) == [*DOCUMENTS[:-1], [8, 9, EOS]]


@pytest.mark.parametrize("chunk_bytes", CHUNK_SIZES)
@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_the_header_of_llm_c_is_not_read_as_tokens(tmp_path, chunk_bytes, magic, version, dtype):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ROW)
    file = tmp_path / "x.bin"
    file.write_bytes(header.tobytes() + np.array(ROW, dtype).tobytes())
    assert lists(read("tokens", file, chunk_bytes)) == DOCUMENTS
    file.write_bytes(header.tobytes() + np.array(ROW[:-1], dtype).tobytes())
    assert error_of("tokens", file) == ("data.path", f"{file} holds 208 tokens, but its header states 209")


@pytest.mark.parametrize("chunk_bytes", CHUNK_SIZES)
@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i8", ">u2", "|u1"])
def test_an_npy_file_is_split_after_each_eos(tmp_path, chunk_bytes, dtype):
    row, documents = (ROW, DOCUMENTS) if dtype != "|u1" else ([*range(200)], [[*range(200)]])
    np.save(tmp_path / "x.npy", np.array(row, dtype))
    assert lists(read("tokens", tmp_path, chunk_bytes)) == documents


@pytest.mark.parametrize("chunk_bytes", CHUNK_SIZES)
@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4)])
def test_megatron_documents_end_where_the_index_says(tmp_path, chunk_bytes, dtype, code):
    """The documents have one, two, zero and one sequences; one sequence has no tokens."""
    np.array(ROW, dtype).tofile(tmp_path / "x.bin")
    write_index(tmp_path / "x.idx", [100, 50, 40, 0, 19], [0, 1, 3, 3, 4, 5], code=code, item=np.dtype(dtype).itemsize)
    found = lists(read("tokens", tmp_path / "x.bin", chunk_bytes))
    empty = [f"{tmp_path}/x.bin:{n}: the document is empty" for n in (3, 4)]
    assert found == [ROW[:100], ROW[100:190], *empty, ROW[190:]]
    assert open_dataset("tokens", tmp_path / "x.bin").auxiliary_files == (str(tmp_path / "x.idx"),)


@pytest.mark.parametrize("names", [("X.BIN", "X.IDX"), ("X.BIN", "X.idx"), ("x.bin", "x.IDX")])
def test_the_index_of_a_file_with_capital_letters_is_not_overlooked(tmp_path, names):
    file, idx = (tmp_path / name for name in names)
    np.array(ROW, "<u2").tofile(file)
    write_index(idx, [100, len(ROW) - 100])
    for path in (tmp_path, file):
        assert lists(read("tokens", path)) == [ROW[:100], ROW[100:]]
    assert open_dataset("tokens", tmp_path).auxiliary_files == (str(idx),)


def test_an_npy_file_with_capital_letters_is_no_raw_file(tmp_path):
    np.save(tmp_path / "x.npy", np.array(ROW, "<u2"))
    (tmp_path / "x.npy").rename(tmp_path / "X.NPY")
    assert lists(read("tokens", tmp_path)) == DOCUMENTS


def test_the_last_megatron_document_may_be_empty(tmp_path):
    np.array(ROW, "<u2").tofile(tmp_path / "x.bin")
    write_index(tmp_path / "x.idx", [len(ROW), 0])
    for chunk_bytes in CHUNK_SIZES:
        assert lists(read("tokens", tmp_path / "x.bin", chunk_bytes)) == [
            ROW,
            f"{tmp_path}/x.bin:2: the document is empty",
        ]


def test_an_index_with_a_mode_for_each_sequence_is_read(tmp_path):
    np.array(ROW, "<u2").tofile(tmp_path / "x.bin")
    write_index(tmp_path / "x.idx", [200, 9])
    (tmp_path / "x.idx").write_bytes((tmp_path / "x.idx").read_bytes() + b"\0\0")
    assert lists(read("tokens", tmp_path / "x.bin")) == [ROW[:200], ROW[200:]]


def test_an_inconsistent_index_is_rejected(tmp_path):
    file, idx = tmp_path / "x.bin", tmp_path / "x.idx"
    np.array(ROW, "<u2").tofile(file)
    idx.write_bytes(b"MMIDIDX")
    assert error_of("tokens", file) == ("data.path", f"{idx} is not a Megatron index")
    idx.write_bytes(b"TNTIDX\0\0" + b"\0" * 100)
    assert error_of("tokens", file) == ("data.path", f"{idx} is not a Megatron index")
    for version, code in ((2, 8), (1, 7)):
        write_index(idx, [209], version=version, code=code)
        message = f"{idx} has Megatron version {version} and type {code}; expected version 1 and an integer type"
        assert error_of("tokens", file) == ("data.path", message)
    write_index(idx, [209])
    idx.write_bytes(idx.read_bytes()[:-1])
    assert error_of("tokens", file) == ("data.path", f"{idx} has 61 bytes, but 1 sequences and 2 boundaries need 62")
    write_index(idx, [200])
    assert error_of("tokens", file) == ("data.path", f"{file} has 418 bytes, but its index describes 400")
    write_index(idx, [-1, 210])
    assert error_of("tokens", file) == ("data.path", f"{file}: the sequences in its index are not contiguous")
    for boundaries in ([0, 1], [0, 2, 1, 2], [1, 2], []):
        write_index(idx, [200, 9], boundaries)
        message = f"{file}: the documents in its index do not cover its 2 sequences"
        assert error_of("tokens", file) == ("data.path", message)
    idx.write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 2**60, 2**60))
    assert error_of("tokens", file)[1].startswith(
        f"{idx} has 34 bytes, but {2**60} sequences and {2**60} boundaries need "
    )


def test_truncated_files_are_rejected(tmp_path):
    file = tmp_path / "x.bin"
    np.array(ROW, "<u2").tofile(file)
    file.write_bytes(file.read_bytes()[:-1])
    message = f"{file} is truncated or does not hold uint16: 417 bytes are not a multiple of 2"
    assert error_of("tokens", file) == ("data.path", message)
    file.write_bytes(struct.pack("<3i", 20240801, 7, 1))
    message = f"{file} is truncated: it has 12 bytes, but its header alone has 1024"
    assert error_of("tokens", file) == ("data.path", message)
    npy = tmp_path / "x.npy"
    np.save(npy, np.array(ROW, "<u2"))
    content = npy.read_bytes()
    npy.write_bytes(content[:-1])
    assert error_of("tokens", npy) == ("data.path", NO_NPY.format(npy))
    npy.write_bytes(content + b"\0\0")
    assert error_of("tokens", npy) == ("data.path", f"{npy}: expected 418 bytes of tokens, found 420")


def test_tokens_outside_the_vocabulary_are_rejected_with_their_offset(tmp_path):
    file = tmp_path / "x.bin"
    np.array([*ROW, 2048], "<u2").tofile(file)
    message = f"{file}: token 2048 at byte 418 (read as uint16) is outside the tokenizer's vocabulary of 2048"
    assert error_of("tokens", file) == ("data.path", message)
    np.save(tmp_path / "x.npy", np.array([5, -1, 5], "<i4"))
    message = f"{tmp_path}/x.npy: token -1 at byte 132 (read as int32) is outside the tokenizer's vocabulary of 2048"
    assert error_of("tokens", tmp_path / "x.npy") == ("data.path", message)


def test_a_raw_file_of_another_width_is_rejected(tmp_path):
    file = tmp_path / "x.bin"
    np.array(ROW, "<u4").tofile(file)
    message = f"{file} looks like uint32 data, because every second uint16 is at most 0"
    assert error_of("tokens", file) == ("data.token_dtype", message)
    np.array(ROW[:-1], "<u2").tofile(file)
    message = f"{file}: token 393221 at byte 0 (read as uint32) is outside the tokenizer's vocabulary of 2048"
    assert error_of("tokens", file, token_dtype="uint32") == ("data.path", message)


def test_npy_files_without_a_row_of_tokens_are_rejected(tmp_path):
    file = tmp_path / "x.npy"
    np.save(file, np.zeros(3))
    found = f"{file}: expected one row of integers, found"
    assert error_of("tokens", file) == ("data.path", f"{found} float64 of shape (3,)")
    np.save(file, np.zeros((2, 3), "<u2"))
    assert error_of("tokens", file) == ("data.path", f"{found} uint16 of shape (2, 3)")
    np.save(file, np.array([{"a": 1}], object), allow_pickle=True)
    assert error_of("tokens", file) == ("data.path", NO_NPY.format(file))
    archive = io.BytesIO()
    np.savez(archive, tokens=np.array(ROW))
    for content in (
        archive.getvalue(),
        pickle.dumps([1]),
        header("(2**62,)"),
        header(f"({2**62},)"),
        header(f"({10**30},)"),
        header("(-1,)"),
        b"",
        b"\x93NUMPY\x01",
        b"something else",
        b"\x93NUMPY\x09\x00" + b"\0" * 100,
        b"\x93NUMPY\x01\x00\x06\x00((((((",
    ):
        file.write_bytes(content)
        assert error_of("tokens", file) == ("data.path", NO_NPY.format(file))


def test_documents_that_are_too_long_are_reported_with_their_offset(tmp_path):
    file = tmp_path / "x.bin"
    np.array(ROW, "<u2").tofile(file)
    documents = read("tokens", file, max_document_bytes=100)
    assert messages(documents) == [
        f"{file}: the document is longer than data.max_document_bytes = 100 and begins at byte 12"
    ]
    assert len(documents) == 5


def test_only_token_files_may_be_named(tmp_path):
    (tmp_path / "x.idx").touch()
    message = f"{tmp_path}/x.idx: expected the name of a .bin or .npy file"
    assert error_of("tokens", tmp_path / "x.idx") == ("data.path", message)


@pytest.mark.parametrize("num_tokens", [1, 3, 5])
def test_a_raw_file_may_be_shorter_than_a_header(tmp_path, num_tokens):
    np.array(ROW[:num_tokens], "<u2").tofile(tmp_path / "x.bin")
    documents = lists(read("tokens", tmp_path / "x.bin"))
    assert [token for document in documents for token in document] == ROW[:num_tokens]


def test_an_empty_token_file_holds_no_documents(tmp_path):
    (tmp_path / "x.bin").touch()
    np.save(tmp_path / "y.npy", np.zeros(0, "<u2"))
    assert read("tokens", tmp_path) == []
