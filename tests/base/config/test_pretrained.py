"""--from: the settings that one folder, or one name on the Hub, replaces."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.base.config.test_hub import NAME, hub  # noqa: F401 (a fixture)
from tests.hub_server import git_sha1
from trainer.base.config import ConfigError
from trainer.base.config.arguments import Arguments
from trainer.base.config.hub import COMMIT
from trainer.base.config.load import load_config
from trainer.base.config.pretrained import provenance
from trainer.base.config.render import to_toml
from trainer.base.config.required_files import DATA_SECTIONS
from trainer.data.chat.template_files import read_template

CHAT = ["--data.dataset", "chat"]
TOKENIZER = ["--tokenizer.backend", "huggingface", "--tokenizer.path"]


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.fixture
def published(tmp_path) -> Path:
    """The files of a folder in Hugging Face's format that the configuration looks at."""
    template = {"tokenizer_config__json": {"chat_template": "x"}}
    return write(tmp_path / "published", config__json={}, tokenizer__json={"model": 1}, **template)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run folder with two checkpoints, of a tokenizer with renamed and added tokens."""
    model = {
        "tokenizer": "default",
        "tokenizer_files": ["tokenizer.tiktoken"],
        "reuse_reserved_tokens": {"<|im_start|>": "<|reserved_special_token_0|>"},
        "extra_special_tokens": ["<a>"],
        "pattern": "",
    }
    for step in (1, 2):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        write(folder, manifest__json={}, model__json=model, tokenizer__tiktoken="", chat_template__jinja="x")
    return tmp_path / "run"


def given(config) -> dict[str, object]:
    """The values of the settings that a model folder can give."""
    tokenizer = config.tokenizer
    return {
        "model": config.model.huggingface,
        "weights": config.checkpoint.init_from,
        "tokenizer": (tokenizer.backend, tokenizer.path),
        "template": config.data.chat_template,
    }


def error_of(argv, **options) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(argv, **options)
    return str(error.value)


def test_a_published_folder_gives_model_weights_tokenizer_and_template(published):
    config = load_config(["--from", str(published), *CHAT])
    folder = str(published)
    tokenizer = ("huggingface", f"{folder}/tokenizer.json")
    assert given(config) == {"model": folder, "weights": folder, "tokenizer": tokenizer, "template": folder}
    assert provenance(config) == f"--from {folder}: model, weights, tokenizer, chat template"
    assert config.origins["tokenizer.path"] == f"--from {folder} ([tokenizer] path)"
    assert config.explain(ConfigError("data.chat_template", "x")) == f"--from {folder} ([data] chat_template): x"


def test_a_folder_with_the_name_of_a_shipped_template_gives_its_own(published, monkeypatch, tmp_path):
    (tmp_path / "chatml").symlink_to(published)
    monkeypatch.chdir(tmp_path)
    template = load_config(["--from", "chatml", *CHAT]).data.chat_template
    assert read_template(template)[0] == "x" and read_template("chatml")[0] != "x"


def test_scripts_with_settings_accept_the_short_flag():
    assert Arguments("A script.", settings=True).parse_known_args(["--from", "a"])[1] == ["--from", "a"]


@pytest.mark.parametrize("words", [[], ["--from", "{folder}"]])
def test_the_path_of_a_tokenizer_gives_its_backend(tmp_path, published, run, words):
    words = [word.format(folder=published) for word in words]
    contents = {
        "tokenizer.json": ("{}", "huggingface"),
        "mine.json": ("{}", "huggingface"),
        "tekken.json": ("{}", "tekken"),
        "mine.tiktoken": ("IQ== 0\n", "tiktoken"),
        "tokenizer.model": ("IQ== 0\nIg== 1\n", "tiktoken"),
        "llama2/tokenizer.model": ("\n\x0e\n\x05<unk>", "sentencepiece"),
    }
    for name, (content, backend) in contents.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
        config = load_config([*words, "--tokenizer.path", str(file)])
        assert given(config)["tokenizer"] == (backend, str(file))
        assert config.origins["tokenizer.path"] == f"--tokenizer.path {file}"
        assert config.origins["tokenizer.backend"] == f"--tokenizer.path {file} ([tokenizer] backend)"
        if words:
            shown = f"--from {published}: model, weights; tokenizer from --tokenizer.path {file}"
            assert provenance(config) == shown
    config = load_config([*words, "--tokenizer.path", str(published)])
    assert given(config)["tokenizer"] == ("huggingface", f"{published}/tokenizer.json")
    config = load_config([*words, "--tokenizer.path", str(write(tmp_path / "llama3", tokenizer__model="IQ== 0\n"))])
    assert given(config)["tokenizer"] == ("tiktoken", f"{tmp_path}/llama3/tokenizer.model")
    checkpoint = run / "checkpoints" / "step-00000002"
    config = load_config([*words, "--tokenizer.path", str(checkpoint), "--tokenizer.extra_special_tokens", "<b>"])
    assert given(config)["tokenizer"] == ("tiktoken", f"{checkpoint}/tokenizer.tiktoken")
    assert config.tokenizer.extra_special_tokens == ("<a>", "<b>")


def test_a_plan_needs_no_tokenizer_at_the_path(tmp_path):
    config = load_config(["--tokenizer.path", str(tmp_path / "no" / "tokenizer.model")], check_files=())
    assert config.tokenizer.backend == "sentencepiece"


def test_a_run_folder_gives_its_newest_checkpoint_and_the_tokens_of_its_tokenizer(run):
    config = load_config(["--from", str(run), *CHAT, "--tokenizer.extra_special_tokens", "<b>"])
    newest = str(run / "checkpoints" / "step-00000002")
    tokenizer = ("tiktoken", f"{newest}/tokenizer.tiktoken")
    # The weights stay those of the run folder: rank 0 selects the checkpoint.
    assert given(config) == {"model": newest, "weights": str(run), "tokenizer": tokenizer, "template": newest}
    assert config.tokenizer.extra_special_tokens == ("<a>", "<b>")
    assert config.tokenizer.reuse_reserved_tokens == {"<|im_start|>": "<|reserved_special_token_0|>"}
    checkpoint = load_config(["--from", newest, *CHAT])
    assert given(checkpoint) == given(config) | {"weights": newest}


def test_settings_on_the_command_line_replace_parts_of_the_folder(published, run):
    argv = ["--from", str(published), *CHAT, "--model.size", "debug", "--data.chat_template", "chatml"]
    config = load_config([*argv, "--checkpoint.init_from", str(run), "--tokenizer.backend", "default"])
    expected = {"model": "", "weights": str(run), "tokenizer": ("default", ""), "template": "chatml"}
    assert given(config) == expected
    assert provenance(config) == (
        f"--from {published}: nothing; model from --model.size debug; weights from --checkpoint.init_from {run}; "
        "tokenizer from --tokenizer.backend default; chat template from --data.chat_template chatml"
    )


def test_the_command_line_precedes_the_file_and_the_file_precedes_its_own_folder(published, run, tmp_path):
    file = tmp_path / "my.toml"
    file.write_text(
        f'[model]\nname = "qwen3"\npretrained = "{run}"\n[checkpoint]\ninit_from = "{run}"\n'
        f'[data]\ndataset = "chat"\nchat_template = "llama3"\n'
    )
    config = load_config(["--config", str(file)])
    assert given(config)["model"] == "" and given(config)["template"] == "llama3"
    assert provenance(config) == (
        f'{file} [model] pretrained = "{run}": tokenizer; model from {file} [model] name = "qwen3"; '
        f'weights from {file} [checkpoint] init_from = "{run}"; chat template from {file} [data] chat_template = "llama3"'
    )
    config = load_config(["--config", str(file), "--from", str(published)])
    assert provenance(config) == f"--from {published}: model, weights, tokenizer, chat template"
    assert given(config)["weights"] == given(config)["template"] == str(published)


def test_a_folder_without_a_template_leaves_that_of_the_settings(published):
    (published / "tokenizer_config.json").write_text("{}")
    config = load_config(["--from", str(published), *CHAT])
    shown = "chat template from [data] chat_template = llama3 (default)"
    assert provenance(config) == f"--from {published}: model, weights, tokenizer; {shown}"
    assert provenance(load_config(["--from", str(published)])) == f"--from {published}: model, weights, tokenizer"


def test_the_printed_configuration_names_the_folder_and_gives_the_same_run(published, tmp_path):
    config = load_config(["--from", str(published), *CHAT, *TOKENIZER, str(published / "tokenizer.json")])
    text = to_toml(config, show_origins=True)
    assert f'chat_template = "{published}"  # from {published}\n' in text
    assert f'init_from = "{published}"  # from {published}\n' in text
    assert '/tokenizer.json"\n' in text  # given explicitly
    (tmp_path / "printed.toml").write_text(text)
    assert load_config(["--config", str(tmp_path / "printed.toml")]) == config


def test_a_plan_of_a_named_model_and_the_preparation_of_data_need_no_folder_that_they_do_not_read(published):
    argv = ["--from", "/no/such", "--model.name", "qwen3", "--model.size", "debug"]
    assert load_config(argv, check_files=()).checkpoint.init_from == "/no/such"
    assert error_of(argv).startswith("--from /no/such: no such folder")
    (published / "tokenizer.json").unlink()
    argv = ["--from", str(published)]
    assert given(load_config(argv, check_files=()))["tokenizer"] == ("default", "")
    assert error_of(argv, check_files=DATA_SECTIONS) == (
        f"--from {published}: {published} contains none of tokenizer.json, tokenizer.model, tekken.json; "
        "set tokenizer.path, or tokenizer.backend = default (the shipped one)"
    )


ERRORS = {
    ("--from", "gpt2"): "--from gpt2: no such folder; a model of the Hub is named OWNER/NAME, such as Qwen/Qwen3-0.6B",
    ("--from", "{folder}/publishd"): "--from {folder}/publishd: no such folder; did you mean '{folder}/published'?",
    ("--from", "{folder}/published/config.json"): (
        "--from {folder}/published/config.json: is a file, not a folder; name the folder that contains it"
    ),
    ("--from", "{folder}"): (
        "--from {folder}: {folder} contains neither manifest.json of a checkpoint nor config.json of a Hugging Face model"
    ),
    ("--from", "{folder}/adapter"): (
        "--from {folder}/adapter: {folder}/adapter contains only an adapter; write a complete model "
        "(scripts/convert_hf.py merge {folder}/adapter FOLDER), or continue with "
        "--from /the/base --lora.init_from {folder}/adapter"
    ),
    ("--from", "{folder}/peft"): (
        "--from {folder}/peft: {folder}/peft contains an adapter of the package peft, not a model; use its base model here, "
        "and the adapter as lora.init_from, or a folder with both, which peft's merge_and_unload() gives"
    ),
    ("--from", "{folder}/damaged"): "--from {folder}/damaged: {folder}/damaged: model.json does not describe a model",
    ("--from", "{folder}/escape"): "--from {folder}/escape: {folder}/escape: model.json does not describe a model",
    ("--from", "{folder}/published", "--model.pretrained", "x"): (
        "--model.pretrained x: --from {folder}/published is given too"
    ),
    ("--from", "a", "--from", "b"): "--from b: --from is given twice, first as a; give it once",
    ("--from",): "--from: expects a value",
    ("--form", "x"): "--form: unknown setting; did you mean '--from'?",
    ("--from", "{folder}/published", "--model.revision", "v1"): (
        "--model.revision v1: is incompatible with a path as [model] pretrained: only models of the Hub have revisions"
    ),
    ("--from", "{folder}/published", "--tokenizer.pattern", "qwen2"): (
        "--tokenizer.pattern qwen2: has an effect only with [tokenizer] backend = tiktoken"
    ),
}


@pytest.mark.parametrize(("argv", "message"), ERRORS.items(), ids=lambda value: " ".join(value)[:40])
def test_each_mistake_is_one_line(argv, message, published, tmp_path):
    write(tmp_path / "adapter", manifest__json={}, model__json={"lora": {"base": "/the/base"}})
    write(tmp_path / "peft", adapter_config__json={})
    write(tmp_path / "damaged", manifest__json={}, model__json="[]")
    outside = {"tokenizer": "tiktoken", "tokenizer_files": ["../tokenizer"], "reuse_reserved_tokens": {}}
    write(tmp_path / "escape", manifest__json={}, model__json=outside | {"extra_special_tokens": []})
    assert error_of([word.format(folder=tmp_path) for word in argv]) == message.format(folder=tmp_path)


# ---------------------------------------------------------------- models of the Hub


@pytest.fixture
def commit(hub, published) -> str:  # noqa: F811
    (published / "model.safetensors").write_bytes(b"weights")
    return hub.publish(NAME, published)


def in_run(folder: Path) -> list[str]:
    return ["--run.output_folder", str(folder), "--run.name", "run"]


def test_a_name_gives_the_folder_of_its_commit_in_the_cache(hub, commit, published):  # noqa: F811
    config = load_config(["--from", NAME, *CHAT])
    folder = Path(config.model.huggingface)
    assert (folder.name, config.model.revision) == (commit, commit)
    tokenizer = ("huggingface", f"{folder}/tokenizer.json")
    assert set(given(config).values()) == {str(folder), tokenizer}
    assert provenance(config) == f"--from {NAME} (commit {commit}): model, weights, tokenizer, chat template"
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_run_resumes_with_the_commit_that_it_has_recorded(hub, commit, published, tmp_path):  # noqa: F811
    argv = ["--from", NAME, *in_run(tmp_path)]
    first = load_config(argv)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(to_toml(first))
    (published / "model.safetensors").write_bytes(b"new weights")
    newer = hub.publish(NAME, published)
    hub.requests.clear()
    assert load_config(argv) == first and hub.requests == []
    assert load_config([*argv, "--model.revision", "main"]).model.revision == newer


def test_the_ranks_use_the_commit_of_the_launcher_without_a_connection(hub, commit, published, monkeypatch):  # noqa: F811
    first = load_config(["--from", NAME])
    monkeypatch.setenv(COMMIT, f"{NAME}@{commit}")
    (published / "model.safetensors").write_bytes(b"new weights")
    hub.publish(NAME, published)
    hub.requests.clear()
    for revision in ([], ["--model.revision", "main"]):
        assert load_config(["--from", NAME, *revision]) == first
    assert hub.requests == []


def test_printing_the_configuration_downloads_no_weights_and_the_printed_one_does(hub, commit, tmp_path):  # noqa: F811
    printed = load_config(["--from", NAME, *CHAT], with_weights=False)
    assert hub.sent("tokenizer.json") and not hub.sent("model.safetensors")
    (tmp_path / "printed.toml").write_text(to_toml(printed, show_origins=True))
    config = load_config(["--config", str(tmp_path / "printed.toml")])
    assert replace(config, origins={}) == replace(printed, origins={}) and hub.sent("model.safetensors")


def test_a_plan_downloads_only_the_configuration_and_prepared_data_only_the_tokenizer(hub, commit):  # noqa: F811
    load_config(["--from", NAME, "--model.name", "qwen3", "--model.size", "debug"], check_files=())
    assert hub.requests == []
    load_config(["--from", NAME], check_files=())
    assert hub.sent("config.json") and not hub.sent("tokenizer.json")
    load_config(["--from", NAME], check_files=DATA_SECTIONS)
    assert hub.sent("tokenizer.json") and not hub.sent("model.safetensors")


def test_a_revision_of_the_file_belongs_to_the_model_of_the_file(hub, commit, published, tmp_path):  # noqa: F811
    file = tmp_path / "my.toml"
    file.write_text(f'[model]\npretrained = "{NAME}"\nrevision = "{commit}"\n')
    assert load_config(["--config", str(file)]).model.revision == commit
    assert load_config(["--config", str(file), "--from", str(published)]).model.revision == ""
    (published / "model.safetensors").write_bytes(b"other weights")
    other = hub.publish("someone/else", published)
    assert load_config(["--config", str(file), "--from", "someone/else"]).model.revision == other


def test_an_error_of_the_hub_names_the_setting(hub, published):  # noqa: F811
    message = f"--from no/model: there is no folder of this name, and {hub.address} has no model no/model"
    assert error_of(["--from", "no/model"]) == message
    hub.publish(NAME, published, **{"model.safetensors": b""})
    unknown = git_sha1(b"")
    revision = ["--model.revision", unknown]
    assert error_of(["--from", NAME, *revision]) == f"--from {NAME}: {NAME} has no revision {unknown}"
