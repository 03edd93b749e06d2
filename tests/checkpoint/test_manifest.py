"""Any damage is told, by the file."""

import json
import random
import shutil

import pytest

from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import File, Manifest

CONTENT = {"a.bin": bytes(range(256)) * 40, "b.json": b'{"x": 1}', "c.bin": b"\x00" * 5000}


def make(folder, content=CONTENT):
    folder.mkdir()
    files = {}
    for name, data in content.items():
        (folder / name).write_bytes(data)
        files[name] = File(len(data), manifest.digest_of(folder / name))
    manifest.write(folder, Manifest(files, {"step": 7, "share": 0.1}))
    return folder


def test_what_was_written_is_read(tmp_path):
    made = make(tmp_path / "c")
    assert manifest.find_damage(made) == ""
    assert manifest.read(made).metadata == {"step": 7, "share": 0.1}
    (made / ".DS_Store").touch()
    assert manifest.find_damage(made) == ""


def test_every_flipped_bit_is_told_by_the_name_of_its_file(tmp_path):
    made = make(tmp_path / "c")
    draw = random.Random(0)
    for name in [*CONTENT, manifest.NAME]:
        data = (made / name).read_bytes()
        for _ in range(60):
            place, bit = draw.randrange(len(data)), draw.randrange(8)
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            (made / name).write_bytes(flipped)
            assert name in manifest.find_damage(made), (name, place, bit)
        (made / name).write_bytes(data)
    assert manifest.find_damage(made) == ""


def cut(folder, name):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-1])


def lengthen(folder, name):
    with (folder / name).open("ab") as file:
        file.write(b" ")


def zero(folder, name):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(bytes(len(data) // 2) + data[len(data) // 2 :])


def swap(folder, name):
    other = next(n for n in CONTENT if n != name)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes((folder / other).read_bytes())
    (folder / other).write_bytes(data)


def link(folder, name):
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")


def make_folder(folder, name):
    (folder / name).unlink()
    (folder / name).mkdir()


@pytest.mark.parametrize("name", [*CONTENT, manifest.NAME])
@pytest.mark.parametrize(
    "damage", [cut, lengthen, zero, swap, link, make_folder, lambda folder, name: (folder / name).unlink()]
)
def test_every_damage_to_every_file_is_told(tmp_path, damage, name):
    made = make(tmp_path / "c")
    if (damage, name) == (zero, "c.bin"):
        return  # it is zeros
    if (damage, name) == (link, manifest.NAME):
        return  # its content is what was written
    damage(made, name)
    assert manifest.find_damage(made) != ""


def test_what_does_not_belong_is_told(tmp_path):
    made = make(tmp_path / "c")
    (made / "d.bin").touch()
    assert manifest.find_damage(made) == "d.bin does not belong to it"


def test_contents_are_looked_at_in_shares(tmp_path):
    made = make(tmp_path / "c")
    zero(made, "a.bin")
    assert [manifest.find_damage(made, (i, 3)) != "" for i in range(3)] == [True, False, False]


@pytest.mark.parametrize("name", ["../a.bin", "/etc/passwd", "..", ".", "", "x/../../a", "a\\b", "a\nb"])
def test_a_manifest_that_leads_out_of_its_folder_is_refused(tmp_path, name):
    made = make(tmp_path / "c")
    (tmp_path / "a.bin").write_bytes(b"x")
    manifest.write(made, Manifest({name: File(1, "0")}, {}))
    assert manifest.find_damage(made) == f"manifest.json names {name!r}, which is no name of a file in it"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", '{"content": 1}', "[" * 100_000, '{"content": {"files": {"a": 1}}}', "1" * 5000, "\ud800"],
)
def test_what_is_no_manifest_is_told_and_not_believed(tmp_path, text):
    made = make(tmp_path / "c")
    (made / manifest.NAME).write_bytes(text.encode(errors="surrogatepass"))
    assert manifest.find_damage(made) in ("manifest.json is not what was written", "manifest.json is no text")


def test_a_huge_manifest_is_not_read(tmp_path):
    made = make(tmp_path / "c")
    with (made / manifest.NAME).open("r+b") as file:
        file.truncate(10 * 2**30)
    assert manifest.find_damage(made) == "manifest.json has more than 67108864 bytes, more than any of its kind"


def test_without_a_manifest_it_was_never_finished(tmp_path):
    made = make(tmp_path / "c")
    (made / manifest.NAME).unlink()
    assert manifest.find_damage(made) == "manifest.json cannot be read (No such file or directory)"
    shutil.rmtree(made)
    assert "manifest.json" in manifest.find_damage(made)


def test_another_format_version_is_named(tmp_path):
    made = make(tmp_path / "c")
    document = json.loads((made / manifest.NAME).read_text()) | {"version": 1}
    (made / manifest.NAME).write_text(json.dumps(document))
    assert manifest.find_damage(made) == f"manifest.json has format version 1, expected {manifest.VERSION}"


def test_another_spelling_of_the_same_content_is_damage(tmp_path):
    made = make(tmp_path / "c")
    content = json.loads((made / manifest.NAME).read_text())
    (made / manifest.NAME).write_text(json.dumps(content))
    assert manifest.find_damage(made) == "manifest.json is not what was written"
