"""Resolution of data.path to files."""

import gzip
import os

import pytest

from tests.data.sources.helpers import error_of, read


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "deep/a.md", "deep/c.txt", "other.bin"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_a_folder_is_searched_recursively_and_a_file_or_pattern_is_taken_literally(folder):
    assert read("text", folder) == ["b.txt", "deep/a.md", "deep/c.txt"]
    assert read("text", folder / "b.txt") == ["b.txt"]
    assert read("text", f"{folder}/**/*.md") == ["deep/a.md"]
    assert read("text", f"{folder}/*") == ["b.txt", "other.bin"]


def test_patterns_are_relative_to_the_current_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert read("text", "*.txt") == ["b.txt"]
    assert read("text", "deep/*") == ["deep/a.md", "deep/c.txt"]


def test_a_path_without_matching_files_is_rejected(tmp_path):
    compressed = {
        "text": ".txt.gz or .md.gz or .txt.zst or .md.zst",
        "jsonl": ".jsonl.gz or .json.gz or .jsonl.zst or .json.zst",
    }
    for dataset, suffixes in (
        ("text", f".txt or .md or {compressed['text']}"),
        ("jsonl", f".jsonl or .json or {compressed['jsonl']}"),
        ("parquet", ".parquet"),
        ("tokens", ".bin or .npy"),
        ("chat", ".jsonl or .json or .parquet or .arrow or .feather or .csv or .tsv"),
    ):
        assert error_of(dataset, tmp_path) == ("data.path", f"this path holds no file ending in {suffixes}")
        assert error_of(dataset, f"{tmp_path}/*.none") == ("data.path", f"this path holds no file ending in {suffixes}")


def test_a_manifest_lists_files_folders_and_patterns_relative_to_itself(folder, monkeypatch):
    (folder / "list.manifest").write_text("# the corpus\n\nb.txt\ndeep\n")
    assert read("text", folder / "list.manifest") == ["b.txt", "deep/a.md", "deep/c.txt"]
    (folder / "list.manifest").write_text(f"deep/*.md\r\n{folder}/b.txt\r\n")
    monkeypatch.chdir(folder)
    assert read("text", "list.manifest") == ["b.txt", "deep/a.md"]


def test_an_error_in_a_manifest_names_its_line(folder):
    manifest = folder / "list.manifest"
    manifest.write_text("b.txt\n\nnone/*.txt\n")
    assert error_of("text", manifest) == ("data.path", f"{manifest}:3: none/*.txt matches no file")
    manifest.write_text("b.txt\ndeep/a.md\n*.txt\n")
    assert error_of("text", manifest) == ("data.path", f"{manifest}:3: {folder}/b.txt is already listed on line 1")
    manifest.write_text("# nothing\n")
    assert error_of("text", manifest)[1].startswith("this path holds no file ending in .txt or .md")
    manifest.write_bytes(b"b\xff.txt\n")
    assert error_of("text", manifest) == ("data.path", f"{manifest} is not UTF-8 text (byte 1)")


def test_an_unreadable_folder_is_an_error(folder, monkeypatch):
    scandir = os.scandir

    def locked(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    assert error_of("text", folder) == ("data.path", f"{folder}/deep cannot be read (Permission denied)")


def test_a_broken_link_is_an_error(folder):
    (folder / "broken.txt").symlink_to(folder / "nowhere")
    assert error_of("text", folder) == ("data.path", f"{folder}/broken.txt is a broken link")


# ---------------------------------------------------------------- links


def test_a_linked_folder_is_searched(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "web").mkdir()
    (other / "web" / "w.txt").write_text("web")
    (folder / "linked").symlink_to(other)
    assert read("text", folder) == ["b.txt", "deep/a.md", "deep/c.txt", "web"]
    assert read("text", f"{folder}/**/w.txt") == ["web"], "a pattern follows links too"
    (folder / "list.manifest").write_text("linked\n")
    assert read("text", folder / "list.manifest") == ["web"], "and so does a manifest"


def test_a_link_to_a_folder_that_contains_it_is_not_followed(folder, capsys):
    (folder / "deep" / "up").symlink_to(folder)
    (folder / "self").symlink_to(".")
    assert read("text", folder) == ["b.txt", "deep/a.md", "deep/c.txt"]
    out = capsys.readouterr().out
    for link in ("deep/up", "self"):
        assert f"{folder}: {folder}/{link} is not followed, because it leads to a folder that contains it" in out
    assert read("text", f"{folder}/**/*.md") == ["deep/a.md"]


def test_two_folders_that_link_to_each_other_are_not_followed_forever(tmp_path):
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
        (tmp_path / name / "other").symlink_to(f"../{other}")
    assert error_of("text", tmp_path) == same_file(f"{tmp_path}/b/b.txt", f"{tmp_path}/a/other/b.txt")
    assert read("text", tmp_path / "a") == ["a", "b"]


def same_file(second, first) -> tuple[str, str]:
    message = (
        f"{second} and {first} are the same file, whose documents would be read twice; "
        "remove one of them, or list the files in a manifest"
    )
    return "data.path", message


def test_a_file_that_is_reached_twice_is_an_error_that_names_both_ways(folder):
    (folder / "d.txt").symlink_to("b.txt")
    expected = same_file(f"{folder}/d.txt", f"{folder}/b.txt")
    assert error_of("text", folder) == expected
    assert error_of("text", f"{folder}/*.txt") == expected
    (folder / "list.manifest").write_text("b.txt\nd.txt\n")
    assert error_of("text", folder / "list.manifest") == expected
    (folder / "d.txt").unlink()
    (folder / "latest").symlink_to("deep")
    assert error_of("text", folder) == same_file(f"{folder}/latest/a.md", f"{folder}/deep/a.md")
    assert read("text", folder / "latest") == ["deep/a.md", "deep/c.txt"], "a link to the folder itself is followed"


def test_hard_links_are_reported_but_links_to_them_are_errors(folder, capsys):
    os.link(folder / "b.txt", folder / "copy.txt")
    assert read("text", folder) == ["b.txt", "b.txt", "deep/a.md", "deep/c.txt"]
    message = (
        f"2 files are hard links, such as {folder}/b.txt and {folder}/copy.txt: their documents are read repeatedly"
    )
    assert message in capsys.readouterr().err
    (folder / "d.txt").symlink_to("copy.txt")
    assert error_of("text", folder) == same_file(f"{folder}/d.txt", f"{folder}/copy.txt")


def test_a_broken_link_that_a_pattern_or_manifest_reaches_is_an_error(folder):
    (folder / "x.txt").symlink_to(folder / "nowhere")
    (folder / "shard-1").symlink_to(folder / "unmounted")
    (folder / "list.manifest").write_text("b.txt\nx.txt\n")
    for path in (f"{folder}/*.txt", f"{folder}/**/*.txt", folder / "list.manifest", folder / "x.txt"):
        assert error_of("text", path)[1] in (f"{folder}/x.txt is a broken link", f"{folder}/shard-1 is a broken link")
    assert error_of("text", f"{folder}/shard-*/*.txt") == ("data.path", f"{folder}/shard-1 is a broken link")


def test_an_unreadable_folder_below_a_pattern_is_an_error(folder, monkeypatch):
    listdir = os.listdir

    def locked(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", locked)
    message = f"{folder}/deep cannot be read (Permission denied)"
    assert error_of("text", f"{folder}/*/*.md") == ("data.path", message)


def test_a_pipe_is_not_a_file_of_documents(folder):
    os.mkfifo(folder / "x.txt")
    for path in (folder, folder / "x.txt", f"{folder}/*.txt"):
        assert error_of("text", path) == ("data.path", f"{folder}/x.txt is not a regular file")


# ---------------------------------------------------------------- hidden and other files


def test_hidden_copies_are_not_data(folder, capsys):
    for name in (".ipynb_checkpoints/b-checkpoint.txt", ".git/x.txt", "deep/.a.txt", "__MACOSX/._b.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("hidden")
    (folder / ".#b.txt").symlink_to("root@host.1")  # Emacs marks a file that is being edited with a broken link
    (folder / "b.txt~").write_text("backup")
    assert read("text", folder) == ["b.txt", "deep/a.md", "deep/c.txt"]
    out = capsys.readouterr().out
    assert f"{folder}: ignored 5 hidden files and folders, such as {folder}/.#b.txt" in out
    assert f"{folder}: ignored 2 files with other endings: 1 .txt~, 1 .bin" in out
    assert read("text", f"{folder}/*") == ["b.txt", "backup", "other.bin"]
    assert read("text", f"{folder}/**/*.txt") == ["b.txt", "deep/c.txt"]
    (folder / "list.manifest").write_text("deep/.a.txt\n.git\n")
    assert read("text", folder / "list.manifest") == ["hidden", "hidden"], "a path that is named is not hidden"
    assert read("text", f"{folder}/.g*/*") == ["hidden"]


def test_a_folder_of_hidden_files_only_is_an_error_that_says_so(tmp_path):
    (tmp_path / ".x.bin").touch()
    assert error_of("tokens", tmp_path)[1] == (
        f"this path holds no file ending in .bin or .npy; hidden files and folders are ignored, such as {tmp_path}/.x.bin"
    )


def test_folders_that_a_pattern_matches_are_reported(folder, capsys):
    assert read("text", f"{folder}/*") == ["b.txt", "other.bin"]
    assert f"ignored 1 folders that match the pattern, such as {folder}/deep" in capsys.readouterr().out
    assert error_of("parquet", f"{folder}/d*")[1] == (
        f"this path holds no file ending in .parquet; the pattern matches only folders, such as {folder}/deep; "
        "append /** to select the files below them"
    )
    assert read("text", f"{folder}/d*/**") == ["deep/a.md", "deep/c.txt"]


@pytest.mark.parametrize("name", ["A.TXT", "A.Md", "A.TXT.GZ", "A.txt.Gz"])
def test_endings_in_capital_letters_are_read(tmp_path, name):
    content = b"loud"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.lower().endswith("gz") else content)
    (tmp_path / "LIST.MANIFEST").write_text(f"{name}\n")
    for path in (tmp_path, tmp_path / name, tmp_path / "LIST.MANIFEST", tmp_path / "A*"):
        assert read("text", path) == ["loud"]


def test_a_hidden_file_with_an_ending_in_capital_letters_is_reported(tmp_path):
    (tmp_path / ".X.TXT").touch()
    assert error_of("text", tmp_path)[1].endswith(f"hidden files and folders are ignored, such as {tmp_path}/.X.TXT")


# ---------------------------------------------------------------- names that look like patterns


@pytest.fixture
def runs(tmp_path):
    """The folders run1 and run[12], each with a file of its name."""
    for name in ("run1", "run[12]", "what?", "*"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name)
    return tmp_path


def test_an_existing_path_is_not_a_pattern(runs, capsys):
    assert read("text", runs / "run[12]") == ["run[12]"]
    assert read("text", runs / "run[12]" / "x.txt") == ["run[12]"]
    assert read("text", runs / "run[12]" / "*.txt") == ["run[12]"]
    message = f"warning: {runs}/run[12] exists, so it is not a pattern, which would match other names too"
    assert message in capsys.readouterr().err
    assert read("text", runs / "what?" / "*") == ["what?"]
    assert read("text", runs / "*" / "x.txt") == ["*"]
    assert read("text", runs / "run[0-9]" / "x.txt") == ["run1"], "a name that does not exist is a pattern"
    (runs / "run[12]" / "[a].txt").write_text("a")
    (runs / "run[12]" / "a.txt").write_text("wrong")
    assert read("text", runs / "run[12]" / "[a].txt") == ["a"]
    (runs / "run[12]" / "[b].txt").symlink_to("nowhere")
    assert error_of("text", runs / "run[12]" / "[b].txt")[1] == f"{runs}/run[12]/[b].txt is a broken link"


def test_a_manifest_in_a_folder_with_brackets_reads_this_folder(runs):
    manifest = runs / "run[12]" / "list.manifest"
    for line in ("x.txt", "*.txt", ".", "../run[12]/x.txt", f"{runs}/run[12]/x.txt"):
        manifest.write_text(f"{line}\n")
        assert read("text", manifest) == ["run[12]"]


def test_a_manifest_cannot_list_a_manifest(folder):
    (folder / "inner.manifest").write_text("b.txt\n")
    (folder / "list.manifest").write_text("inner.manifest\n")
    assert error_of("text", folder / "list.manifest")[1] == (
        f"{folder}/list.manifest:1: {folder}/inner.manifest is another manifest; list its lines here"
    )


# ---------------------------------------------------------------- files of another type


CONVERT = "convert such files to JSON lines, for example with to_json of the package datasets"


@pytest.mark.parametrize(
    ("dataset", "name", "expected"),
    [
        ("jsonl", "x.parquet", 'its files: 1 .parquet; dataset = "parquet" reads such files'),
        ("parquet", "x.jsonl", 'its files: 1 .jsonl; dataset = "jsonl" reads such files'),
        ("text", "x.JSON", 'its files: 1 .json; dataset = "jsonl" reads such files'),
        ("text", "x.jsonl.gz", 'its files: 1 .jsonl.gz; dataset = "jsonl" reads such files'),
        ("jsonl", "deep/x.csv", 'its files: 1 .csv; dataset = "csv" reads such files'),
        ("jsonl", "x.tar.gz", "its files: 1 .tar.gz; unpack such files"),
        ("jsonl", "x.jsonl.bz2", "its files: 1 .bz2; decompress such files, or let their names end in .gz or .zst"),
        ("chat", "x.xlsx", "its files: 1 .xlsx; save such files as CSV"),
        ("chat", "x.bin", f"its files: 1 .bin; {CONVERT}"),
        ("chat", "x.ndjson", "its files: 1 .ndjson; let the names of such files end in .jsonl"),
        ("tokens", "x.pt", "its files: 1 .pt"),
    ],
)  # fmt: skip
def test_a_folder_without_matching_files_is_described(tmp_path, dataset, name, expected):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")
    assert error_of(dataset, tmp_path)[1].partition("; ")[2] == expected


def test_a_folder_with_empty_folders_only_holds_no_file(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert error_of("parquet", tmp_path) == ("data.path", "this path holds no file ending in .parquet")


def test_a_folder_with_several_formats_gives_the_files_of_the_first_and_counts_the_others(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"question": "a"}')
    (tmp_path / "b.csv").write_text("question\nb\n")
    assert read("chat", tmp_path) == [{"question": "a"}]
    assert f"{tmp_path}: ignored 1 file with other endings: 1 .csv" in capsys.readouterr().out
    assert read("chat", f"{tmp_path}/*") == [{"question": "a"}, {"question": "b"}], "a pattern selects all files"
