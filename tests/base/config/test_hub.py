"""Downloads by the package huggingface_hub from a server on loopback."""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.hub_server import hub_server
from trainer.base.config import ConfigError
from trainer.base.config.hub import fetch, is_hub_name

NAME = "someone/tiny"
huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with hub_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
        yield server


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the names of a published model, in two files."""
    folder = tmp_path / "published"
    folder.mkdir()
    files = {f"model-0000{i}-of-00002.safetensors": bytes([i]) * 100_000 for i in (1, 2)}
    index = {"weight_map": {f"layer.{i}": name for i, name in enumerate(files)}}
    files |= {"model.safetensors.index.json": json.dumps(index).encode(), "config.json": b"{}"}
    files |= {
        "tokenizer.json": b'{"model": {}}',
        "chat_template.jinja": b"x",
        "pytorch_model.bin": b"pickle",
        "README.md": b"text",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def error_of(*arguments) -> str:
    with pytest.raises(ConfigError) as error:
        fetch(*arguments)
    assert error.value.key == "model.pretrained"
    return error.value.message


def test_only_the_files_that_a_command_needs_are_downloaded(hub, folder, capsys):
    commit = hub.publish(NAME, folder)
    config = fetch(NAME, "", "config")
    assert config.name == commit and names(config) == {"config.json"}
    text = fetch(NAME, "", "text")
    assert text == config and "tokenizer.json" in names(text) and "model-00001-of-00002.safetensors" not in names(text)
    weights = fetch(NAME, "", "weights")
    assert names(weights) == names(folder) - {"pytorch_model.bin", "README.md"}
    for name in names(weights):
        assert (weights / name).read_bytes() == (folder / name).read_bytes()
    assert "downloading 2 files of someone/tiny (0.20 MB)" in capsys.readouterr().err


def test_a_commit_in_the_cache_needs_no_connection(hub, folder):
    commit = hub.publish(NAME, folder)
    path = fetch(NAME, "", "weights")
    hub.requests.clear()
    assert fetch(NAME, commit, "weights") == fetch(NAME, commit, "config") == path
    assert hub.requests == []
    hub.refusals[NAME] = (503, "")  # the cache says which commit a branch was
    assert fetch(NAME, "", "weights") == path


def fetch_on_rank(address: str, cache: str) -> str:
    os.environ |= {"HF_ENDPOINT": address, "HF_HUB_CACHE": cache}
    return str(fetch(NAME, "", "weights"))


def test_ranks_that_start_without_the_launcher_download_each_file_once(hub, folder, ranks, tmp_path):
    hub.publish(NAME, folder)
    paths = ranks(2).run(fetch_on_rank, hub.address, str(tmp_path / "cache"))
    assert paths == [str(fetch(NAME, "", "weights"))] * 2
    assert [len(hub.sent(name)) for name in sorted(names(Path(paths[0])))] == [1] * 6


def test_a_branch_that_moved_gives_the_new_commit_and_the_old_one_stays(hub, folder):
    first = hub.publish(NAME, folder)
    old = fetch(NAME, "", "weights")
    (folder / "chat_template.jinja").write_text("y")
    second = hub.publish(NAME, folder)
    assert fetch(NAME, "", "weights").name == second != first
    assert fetch(NAME, first, "weights") == old and (old / "chat_template.jinja").read_text() == "x"
    assert len(hub.sent("model-00001-of-00002.safetensors")) == 1  # the same content is not downloaded again


def test_a_download_whose_connection_is_lost_continues_where_it_ended(hub, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)  # 10 MB
    hub.publish(NAME, folder)
    hub.cut_after["model-00002-of-00002.safetensors"] = 60_000
    path = fetch(NAME, "", "weights")
    assert hub.sent("model-00002-of-00002.safetensors") == ["", "bytes=60000-"]
    assert (path / "model-00002-of-00002.safetensors").read_bytes() == bytes([2]) * 100_000


def test_a_download_that_was_interrupted_keeps_the_files_that_were_complete(hub, folder, monkeypatch):
    hub.publish(NAME, folder)
    with monkeypatch.context() as patch:
        patch.setattr("trainer.base.config.hub._verify", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):  # after the download, before the files are recorded as verified
            fetch(NAME, "", "weights")
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    snapshot = next((Path(os.path.realpath(folder)).parent / "cache").glob("*/snapshots/*"))
    Path(os.path.realpath(snapshot / second)).unlink()
    (snapshot / second).unlink()
    assert fetch(NAME, "", "weights") == snapshot
    assert (len(hub.sent(first)), len(hub.sent(second))) == (1, 2)


@pytest.mark.parametrize("file", ["model-00001-of-00002.safetensors", "tokenizer.json"])
def test_a_file_whose_content_is_not_that_of_the_hub_is_removed_and_downloaded_again(hub, folder, file):
    hub.publish(NAME, folder)
    hub.replaced[file] = bytes(len((folder / file).read_bytes()))
    message = (
        f"{file} of {NAME} does not match the hash of the Hub and was removed; the same command downloads it again"
    )
    assert error_of(NAME, "", "weights") == message
    hub.replaced.clear()
    path = fetch(NAME, "", "weights")
    assert (path / file).read_bytes() == (folder / file).read_bytes()


def test_a_file_that_is_damaged_later_is_found_when_its_size_or_time_has_changed(hub, folder):
    commit = hub.publish(NAME, folder)
    file = Path(os.path.realpath(fetch(NAME, "", "weights") / "model-00001-of-00002.safetensors"))
    file.chmod(0o644)
    file.write_bytes(bytes(100_000))
    assert "model-00001-of-00002.safetensors of someone/tiny does not match the hash" in error_of(
        NAME, commit, "weights"
    )


def test_a_model_that_another_program_has_downloaded_is_verified_without_a_connection(hub, folder, capsys):
    commit = hub.publish(NAME, folder)
    path = Path(
        huggingface_hub.snapshot_download(NAME, endpoint=hub.address, cache_dir=huggingface_hub.constants.HF_HUB_CACHE)
    )
    hub.refusals[NAME] = (503, "")
    assert fetch(NAME, "", "weights") == path and path.name == commit
    assert f"cannot be reached (HfHubHTTPError): {NAME} is commit {commit} in the cache" in capsys.readouterr().err
    file = Path(os.path.realpath(path / "model-00001-of-00002.safetensors"))
    file.chmod(0o644)
    file.write_bytes(bytes(100_000))
    assert "model-00001-of-00002.safetensors of someone/tiny does not match the hash" in error_of(
        NAME, commit, "weights"
    )


def download(hub, *files, **options):
    """Download files as another program does. Return their folder."""
    cache = {"endpoint": hub.address, "cache_dir": huggingface_hub.constants.HF_HUB_CACHE}
    for file in files:
        with contextlib.suppress(huggingface_hub.errors.EntryNotFoundError):
            path = huggingface_hub.hf_hub_download(NAME, file, **cache, **options)
    return Path(path).parent


def test_a_start_without_a_connection_does_not_make_a_part_of_a_model_complete(hub, folder, capsys):
    """Not for ever: the next start with a connection downloads the rest."""
    commit = hub.publish(NAME, folder)
    path = download(hub, "config.json", "tokenizer.json")
    hub.refusals[NAME] = (503, "")
    doubt = "whether the model also has tokenizer_config.json, chat_template.jinja, generation_config.json is unknown"
    for revision in ("", commit):
        assert fetch(NAME, revision, "text") == path and names(path) == {"config.json", "tokenizer.json"}
        assert (
            f"{NAME} is commit {commit} in the cache; {doubt} until a start with a connection\n"
            in capsys.readouterr().err
        )
    assert "no weights" in error_of(NAME, commit, "weights")
    del hub.refusals[NAME]
    assert fetch(NAME, commit, "text") == path and "chat_template.jinja" in names(path)


def test_files_that_a_model_is_known_to_lack_are_no_doubt(hub, folder, capsys):
    hub.publish(NAME, folder)
    (folder / "chat_template.jinja").unlink()
    commit = hub.publish(NAME, folder)
    path = download(
        hub, "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"
    )
    hub.refusals[NAME] = (503, "")
    assert fetch(NAME, "", "text") == path
    assert capsys.readouterr().err.endswith(f": {NAME} is commit {commit} in the cache\n")


def test_what_a_commit_has_is_remembered_from_a_start_with_a_connection(hub, folder):
    """Although that start needed only the model's dimensions."""
    extra = {"additional_chat_templates/tool_use.jinja": b"y"}
    commit = hub.publish(NAME, folder, **extra)
    path = fetch(NAME, "", "config")
    hub.refusals[NAME] = (503, "")
    for revision in ("", commit):
        lacking = "lacks additional_chat_templates/tool_use.jinja, chat_template.jinja, tokenizer.json of someone/tiny"
        expected = f"{hub.address} cannot be reached (HfHubHTTPError), and commit {commit} in the cache {lacking}"
        assert error_of(NAME, revision, "text").replace("model.safetensors.index.json, ", "") == expected
    del hub.refusals[NAME]
    assert fetch(NAME, commit, "text") == path
    assert (path / "additional_chat_templates" / "tool_use.jinja").read_bytes() == b"y"
    hub.refusals[NAME] = (503, "")
    assert fetch(NAME, commit, "text") == path
    (path / "tokenizer.json").unlink()
    assert "lacks tokenizer.json of someone/tiny" in error_of(NAME, commit, "text")


REFUSALS = {
    (404, "RepoNotFound"): "there is no folder of this name, and {hub} has no model someone/tiny",
    (401, "RepoNotFound"): (
        "there is no folder of this name, and {hub} has no model someone/tiny, or it is private and HF_TOKEN is missing or wrong"
    ),
    (403, "GatedRepo"): (
        "access to someone/tiny must be requested at {hub}/someone/tiny; then set HF_TOKEN, or run `hf auth login`"
    ),
    (404, "RevisionNotFound"): "someone/tiny has no revision main",
    (403, ""): "{hub} refuses access to someone/tiny (HTTP 403); set HF_TOKEN, or run `hf auth login`",
    (500, ""): "someone/tiny cannot be downloaded from {hub} (HTTP 500); try again",
}


@pytest.mark.parametrize(("refusal", "message"), REFUSALS.items(), ids=str)
def test_each_refusal_of_the_hub_is_one_line(hub, refusal, message):
    hub.refusals[NAME] = refusal
    assert error_of(NAME, "", "weights") == message.format(hub=hub.address)


def test_no_connection_is_one_line(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    message = (
        "someone/tiny is neither a folder nor in the cache, and http://127.0.0.1:1 cannot be reached; use --from FOLDER"
    )
    assert error_of(NAME, "", "weights") == message


def test_the_offline_mode_is_named(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert (
        error_of(NAME, "", "weights") == "someone/tiny is not in the cache, and HF_HUB_OFFLINE forbids to download it"
    )


def test_a_disk_without_space_is_found_before_the_download(hub, folder, tmp_path, monkeypatch):
    hub.publish(NAME, folder)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("trainer.base.config.hub.shutil.disk_usage", lambda path: usage)
    message = f"0.20 MB must be downloaded to {tmp_path}/cache, which has 0.00 MB free; HF_HOME names another folder"
    assert error_of(NAME, "", "weights") == message
    assert hub.sent("config.json") == []


def test_models_that_have_no_safetensors_are_described(hub, folder):
    for file in folder.glob("model*"):
        file.unlink()
    hub.publish("a/pickles", folder)
    assert error_of("a/pickles", "", "weights").startswith("a/pickles contains weights only as pickles")
    assert fetch("a/pickles", "", "config").exists()  # sizes need no weights
    (folder / "pytorch_model.bin").unlink()
    hub.publish("a/nothing", folder)
    assert error_of("a/nothing", "", "weights") == (
        "a/nothing contains no weights: it has neither model.safetensors nor model.safetensors.index.json"
    )
    (folder / "config.json").unlink()
    hub.publish("a/gguf", folder, **{"q4.gguf": b""})
    assert error_of("a/gguf", "", "config").startswith("a/gguf contains a model in llama.cpp's format GGUF")


def test_a_model_that_lacks_a_file_of_its_index_is_described(hub, folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    hub.publish(NAME, folder)
    assert error_of(NAME, "", "weights").startswith(
        "someone/tiny lacks model-00002-of-00002.safetensors, 1 of the 2 files"
    )


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert error_of(NAME, "", "weights").startswith("needs the package huggingface_hub: ")


def test_a_path_with_a_spelling_mistake_is_no_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    assert not is_hub_name("outputs/dbug")
    assert is_hub_name("Qwen/Qwen3-0.6B") and is_hub_name("01-ai/Yi_1.5")
    for text in ("gpt2", "/a/b", "./a", "../a", "a/b/c", "a/", "s3://a/b", "~/a", "a/b c", ".a/b", "a/.b", ""):
        assert not is_hub_name(text), text


@pytest.mark.parametrize("endpoint", ["notaurl", "https://", "ftp://host"])
def test_an_endpoint_that_is_no_url_is_named(monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(ConfigError, match=f"HF_ENDPOINT={endpoint}: expected a URL such as https://huggingface.co"):
        fetch(NAME, "", "config")
