"""Detection of any damage, by the name of the file."""

import json
import random
import shutil

import pytest

from trainer.base.system.run_files import MANIFEST
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


def test_manifest_round_trip(tmp_path):
    folder = make(tmp_path / "c")
    assert manifest.find_damage(folder) == ""
    assert manifest.read(folder).metadata == {"step": 7, "share": 0.1}
    (folder / ".DS_Store").touch()
    assert manifest.find_damage(folder) == ""


def test_every_flipped_bit_is_reported_with_its_file(tmp_path):
    folder = make(tmp_path / "c")
    draw = random.Random(0)
    for name in [*CONTENT, MANIFEST]:
        data = (folder / name).read_bytes()
        for _ in range(60):
            position, bit = draw.randrange(len(data)), draw.randrange(8)
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            (folder / name).write_bytes(flipped)
            assert name in manifest.find_damage(folder), (name, position, bit)
        (folder / name).write_bytes(data)
    assert manifest.find_damage(folder) == ""


def truncate(folder, name):
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


@pytest.mark.parametrize("name", [*CONTENT, MANIFEST])
@pytest.mark.parametrize(
    "damage", [truncate, lengthen, zero, swap, link, make_folder, lambda folder, name: (folder / name).unlink()]
)
def test_every_damage_to_every_file_is_reported(tmp_path, damage, name):
    folder = make(tmp_path / "c")
    if (damage, name) == (zero, "c.bin"):
        return  # the file consists of zeros
    if (damage, name) == (link, MANIFEST):
        return  # the content is unchanged
    damage(folder, name)
    assert manifest.find_damage(folder) != ""


def test_unlisted_file_is_reported(tmp_path):
    folder = make(tmp_path / "c")
    (folder / "d.bin").touch()
    assert manifest.find_damage(folder) == "d.bin is not in the manifest"


def test_each_share_compares_only_its_files(tmp_path):
    folder = make(tmp_path / "c")
    zero(folder, "a.bin")
    assert [manifest.find_damage(folder, (i, 3)) != "" for i in range(3)] == [True, False, False]


@pytest.mark.parametrize("name", ["../a.bin", "/etc/passwd", "..", ".", "", "x/../../a", "a\\b", "a\nb"])
def test_manifest_with_a_path_out_of_its_folder_is_rejected(tmp_path, name):
    folder = make(tmp_path / "c")
    (tmp_path / "a.bin").write_bytes(b"x")
    manifest.write(folder, Manifest({name: File(1, "0")}, {}))
    assert manifest.find_damage(folder) == f"manifest.json names {name!r}, which is not a plain file name"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", '{"content": 1}', "[" * 100_000, '{"content": {"files": {"a": 1}}}', "1" * 5000, "\ud800"],
)
def test_invalid_manifest_is_reported(tmp_path, text):
    folder = make(tmp_path / "c")
    (folder / MANIFEST).write_bytes(text.encode(errors="surrogatepass"))
    assert manifest.find_damage(folder) in ("manifest.json is not a valid manifest", "manifest.json is not UTF-8 text")


def test_huge_manifest_is_not_read(tmp_path):
    folder = make(tmp_path / "c")
    with (folder / MANIFEST).open("r+b") as file:
        file.truncate(10 * 2**30)
    assert manifest.find_damage(folder) == "manifest.json is larger than the limit of 67108864 bytes"


def test_folder_without_a_manifest_is_damaged(tmp_path):
    folder = make(tmp_path / "c")
    (folder / MANIFEST).unlink()
    assert manifest.find_damage(folder) == "manifest.json cannot be read (No such file or directory)"
    shutil.rmtree(folder)
    assert "manifest.json" in manifest.find_damage(folder)


def test_another_format_version_is_named(tmp_path):
    folder = make(tmp_path / "c")
    document = json.loads((folder / MANIFEST).read_text()) | {"version": 1}
    (folder / MANIFEST).write_text(json.dumps(document))
    assert manifest.find_damage(folder) == f"manifest.json has format version 1, expected {manifest.VERSION}"


def test_reformatted_manifest_is_damaged(tmp_path):
    folder = make(tmp_path / "c")
    content = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(content))
    assert manifest.find_damage(folder) == "manifest.json is not a valid manifest"
