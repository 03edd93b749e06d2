"""Settings that changed since the checkpoint: each is logged, and those fixed on resume are an error."""

import json
import os
import socket
import typing
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.base.config import Config, ConfigError
from trainer.base.config.fields import settings
from trainer.base.config.load import load_config
from trainer.base.config.render import to_toml
from trainer.base.config.toml_text import toml_value
from trainer.checkpoint.resume import ResumePoint, changed_settings, require_compatible
from trainer.run.resolve import resolve
from trainer.run.run_folder import acquire_lock
from trainer.state import TrainState

SETTINGS = settings()
FIXED = {
    "run.seed",
    "training.seq_len",
    "data.packing",
    "data.long_documents",
    "data.document_mask",
    "data.shuffle",
    "optimizer.name",
    "optimizer.state_dtype",
    "optimizer.base_width",
    "training.parameter_dtype",
    *(f"lora.{name}" for name in ("rank", "alpha", "rslora", "targets", "train_fully", "dtype", "base_dtype")),
    *(f"preference.{name}" for name in ("loss", "beta", "margin")),
}
FIXED |= {
    "tokenizer.reuse_reserved_tokens",
    "tokenizer.extra_special_tokens",
    "model.name",
    "model.size",
    "model.overrides",
}
ONE_VALUE = {"optimizer.name"}


def another(setting):
    """Return another value of the setting's type, valid in a run or not."""
    kind, value = setting.type, setting.default
    if setting.is_table:
        return {"other": 7 if kind is not str else "text"}
    options = [option for part in (kind, *typing.get_args(kind)) if typing.get_origin(part) is typing.Literal
               for option in typing.get_args(part)]  # fmt: skip
    if options:
        return next((option for option in options if option != value), True)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if value is None:
        return 7
    if isinstance(value, tuple):
        return tuple(v / 2 for v in value) if value and isinstance(value[0], float) else ("other",)
    return f"{value}other"


def changed(config, setting):
    section = replace(getattr(config, setting.section), **{setting.name: another(setting)})
    return replace(config, **{setting.section: section})


# A run has turned training.epochs into training.steps before it writes its settings.
@pytest.mark.parametrize("key", sorted(SETTINGS.keys() - ONE_VALUE - {"training.epochs"}))
def test_every_changed_setting_is_logged(tmp_path, key):
    (tmp_path / "config.toml").write_text(to_toml(Config()))
    now = changed(Config(), SETTINGS[key])
    before, after = (toml_value(config.value(key)) for config in (Config(), now))
    lines = changed_settings(ResumePoint(tmp_path, TrainState()), to_toml(now))
    if SETTINGS[key].is_table:
        assert len(lines) == 1 and lines[0].startswith(key)
    else:
        assert lines == [f"{key} {before} -> {after}"]


def test_settings_of_another_version_are_logged(tmp_path):
    now = to_toml(Config())
    (tmp_path / "config.toml").write_text(now.replace("prefetch = 4", "num_workers = 0"))
    assert set(changed_settings(ResumePoint(tmp_path, TrainState()), now)) == {
        "data.num_workers 0 -> (not a setting)",
        "data.prefetch (not a setting) -> 4",
    }


def test_a_changed_setting_that_is_fixed_on_resume_is_an_error():
    assert {key for key, setting in SETTINGS.items() if setting.constraint.fixed_on_resume} == FIXED
    pairs = "--data.dataset preference --data.path x --data.packing none --data.long_documents drop"
    pairs += " --data.document_mask true --preference.loss ipo --lora.rank 4 --checkpoint.init_from ."
    fingerprint = resolve(load_config(pairs.split(), check_files=()), 1).fingerprint
    fingerprint = json.loads(json.dumps(fingerprint))  # as a checkpoint holds it
    saved = ResumePoint(Path("step-00000001"), TrainState(fingerprint=fingerprint))
    for key in FIXED - ONE_VALUE:
        if SETTINGS[key].section == "model":
            continue  # its sizes count
        with pytest.raises(ConfigError, match=rf"cannot resume from step-00000001: {key} was .*, is "):
            setting = SETTINGS[key]
            changed = another(setting) if another(setting) != fingerprint[key] else setting.default
            require_compatible(saved, fingerprint | {key: changed})
    fingerprint = json.loads(json.dumps(resolve(Config(), 1).fingerprint))
    saved = ResumePoint(saved.path, TrainState(fingerprint=fingerprint))
    larger = replace(Config().model, overrides={"n_layers": 9})
    with pytest.raises(ConfigError, match=r": model\.n_layers was 8, is 9; set another"):
        require_compatible(saved, resolve(replace(Config(), model=larger), 1).fingerprint)


def test_an_error_about_dimensions_names_another_family():
    saved_by = replace(Config(), model=replace(Config().model, name="llama3"))
    fingerprint = json.loads(json.dumps(resolve(saved_by, 1).fingerprint))
    now = resolve(replace(Config(), model=replace(Config().model, name="qwen3")), 1).fingerprint
    saved = ResumePoint(Path("step-00000001"), TrainState(fingerprint=fingerprint))
    with pytest.raises(
        ConfigError, match=r'^cannot resume from step-00000001: model\.name was "llama3", is "qwen3"; model\.'
    ):
        require_compatible(saved, now)
    require_compatible(saved, fingerprint | {"model.name": "llama3.1"})  # the same model, from a folder
    del fingerprint["model.name"]  # as in checkpoints of earlier versions
    require_compatible(saved, resolve(saved_by, 1).fingerprint)


def test_a_run_whose_experts_have_no_adapters_is_not_resumed_with_them(tmp_path):
    argv = ["--model.name", "mixtral", "--lora.rank", "8", "--checkpoint.init_from", str(tmp_path)]
    now = resolve(load_config(argv), 1).fingerprint
    older = json.loads(json.dumps({key: value for key, value in now.items() if key != "number of adapters of experts"}))
    point = ResumePoint(tmp_path, TrainState(fingerprint=older))
    with pytest.raises(ConfigError, match="number of adapters of experts was null, is 12"):
        require_compatible(point, now)


# ------------------------------------------------------------ named pipes and folders with a file's name


def lock_error(argv):
    """Return the error of locking the run folder on this rank, or ""."""
    try:
        acquire_lock(load_config(argv).run.folder)
    except ConfigError as error:
        return str(error)
    return ""


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(path.parent, os.O_RDONLY)  # the complete path may be too long for a socket
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


@pytest.mark.parametrize(
    ("name", "make", "problem"),
    [
        ("metrics.jsonl", os.mkfifo, "is a named pipe, not a file"),
        ("metrics.jsonl", make_socket, "is a socket, not a file"),
        ("metrics.jsonl", os.mkdir, "is a folder, not a file"),
        ("metrics.jsonl", lambda path: path.symlink_to("/dev/null"), "is a device, not a file"),
        ("config.toml", os.mkfifo, "is a named pipe, not a file"),
        (".lock", os.mkfifo, "is a named pipe, not a file"),
        ("log.txt", os.mkfifo, "is a named pipe, not a file"),
        ("tb", os.mkfifo, "is a file, not a folder"),
        ("checkpoints", lambda path: path.touch(), "is a file, not a folder"),
        ("metrics.jsonl", lambda path: path.symlink_to("missing.jsonl"), ""),
    ],
)
def test_what_cannot_be_a_file_of_the_run_is_refused_before_it_is_opened(ranks, tmp_path, name, make, problem):
    run = tmp_path / "run"
    run.mkdir()
    make(run / name)
    (error,) = ranks(1).run(lock_error, ["--run.output_folder", str(tmp_path), "--run.name", "run"])
    advice = "move it away, or choose another --run.name"
    assert error == (problem and f"run.output_folder: {run / name} {problem}; {advice}")
