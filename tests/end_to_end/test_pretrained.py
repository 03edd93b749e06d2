"""Runs that begin with --from: the same as with single settings, their line about the weights, and what a resume refuses."""

import logging
import shutil
from pathlib import Path

import pytest
import torch

from tests.training_runs import checkpoint_of, combine, error_line, in_folder, train, trainer_from
from trainer.base.system.console import LOGGER
from trainer.base.system.files import digest_of, short_digest
from trainer.checkpoint.formats.folders import open_weights
from trainer.checkpoint.formats.huggingface_writer import write_huggingface

CHAT = ["--data.dataset", "chat", "--data.path", "", "--data.packing", "best-fit", "--data.long_documents", "drop"]


@pytest.fixture(scope="module")
def base(ranks, tiny, tmp_path_factory) -> Path:
    """A run folder, with an export of its model in several files."""
    folder = tmp_path_factory.mktemp("pretrained") / "base"
    ranks(1).run(train, combine([*tiny, *in_folder(folder), "--training.steps", "1"]))
    write_huggingface(open_weights(checkpoint_of(folder), alone=True), folder / "huggingface", torch.float32, 200_000)
    assert len(list((folder / "huggingface").glob("model-*.safetensors"))) > 1
    return folder


def train_twice(first: list[str], second: list[str]) -> tuple:
    return train(combine(first)), train(combine(second))


@pytest.mark.parametrize(
    ("published", "layout"), [(False, ("--parallel.tp", "2")), (True, ("--lora.rank", "4"))], ids=["run", "published"]
)
def test_a_run_from_a_folder_is_the_one_whose_settings_are_given_singly(ranks, tiny, base, tmp_path, published, layout):
    source = base / "huggingface" if published else base
    single = ["--checkpoint.init_from", source]
    if published:
        single += ["--model.huggingface", source, "--tokenizer.backend", "huggingface", "--tokenizer.path", source]
    argv = [*tiny, *layout, "--training.steps", "2"]
    runs = [[*argv, *in_folder(tmp_path / "from"), "--from", source], [*argv, *in_folder(tmp_path / "single"), *single]]
    for from_folder, from_settings in ranks(2).run(train_twice, *[list(map(str, run)) for run in runs]):
        assert from_folder == from_settings


def test_wrong_weights_are_refused_before_the_data_are_prepared(ranks, tiny, base, tmp_path):
    argv = [*tiny, *in_folder(tmp_path / "run"), "--data.store_folder", str(tmp_path / "stores")]
    (line,) = ranks(1).run(error_line, [*argv, "--checkpoint.init_from", str(base), "--model.overrides.n_layers", "3"])
    assert line.startswith(f"--checkpoint.init_from {base}: ") and "contains a different model: n_layers is 2" in line
    assert not (tmp_path / "stores").exists()


def lines_about_weights(*runs: list[str]) -> list[str]:
    """Build the Trainer of each run and return the lines about its weights."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    for argv in runs:
        trainer_from(combine(argv))
    return [line for line in lines if line.startswith("weights: ")]


def test_one_line_says_where_the_weights_come_from(ranks, tiny, base, tmp_path):
    hf = str(base / "huggingface")
    argv = [*tiny, *in_folder(tmp_path / "run")]
    adapter = [*argv, "--from", hf, "--lora.rank", "4"]
    runs = [
        argv,
        [*argv, "--model.huggingface", hf],
        [*argv, "--from", hf, "--checkpoint.init_from", ""],
        [*argv, "--from", str(base), "--checkpoint.init_exclude", "output.weight,norm.weight"],
        adapter,
        [*tiny, *in_folder(base)],
    ]
    lines = ranks(1).run(lines_about_weights, *runs)[0]
    checkpoint, files = checkpoint_of(base), sorted(path.name for path in Path(hf).glob("model-*.safetensors"))
    manifest = short_digest(digest_of(checkpoint / "manifest.json"))
    assert lines[:4] == [
        "weights: random",
        f"weights: random; {hf} gives only the dimensions, and --from {hf} would load its weights too",
        "weights: random",
        f"weights: loaded from {checkpoint} ({manifest}, the newest checkpoint), except norm.weight, output.weight",
    ]
    assert lines[4].startswith(f"weights: loaded from {hf} (")
    assert lines[4].endswith(f", {len(files)} files, {files[0]} to {files[-1]})")
    assert lines[5:] == [f"weights: loaded from {checkpoint} ({manifest})"]


def resumed(first: list[str], *later: list[str]) -> list[str]:
    """Train, then return the error of each later command line."""
    train(combine(first))
    return [error_line(argv) for argv in later]


def test_a_run_resumes_only_with_the_model_that_it_began_with(ranks, tiny, base, tmp_path):
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(base / "huggingface", moved)
    argv = [*tiny, *in_folder(tmp_path / "run"), "--training.steps"]
    first = [*argv, "1", "--from", str(base / "huggingface")]
    random = [*tiny, *in_folder(other), "--training.steps", "1"]
    lines = ranks(1).run(resumed, first, [*argv, "2", "--from", str(moved)], random)[0]
    assert lines == ["", ""]  # the same content in another folder
    write_huggingface(open_weights(checkpoint_of(other), alone=True), other / "huggingface", torch.float32)
    later = [
        [*argv, "3", "--from", str(other / "huggingface")],
        [*random[:-1], "2", "--from", str(base)],
    ]
    # Settings of a new run only are ignored when it resumes.
    later += [[*argv, "3", "--from", str(moved), "--checkpoint.init_from", str(other)]]
    changed, began_random, explicit = ranks(1).run(resumed, random, *later)[0]
    assert changed.startswith(
        f"cannot resume from {checkpoint_of(tmp_path / 'run').parent}/step-00000002: initial weights was "
    )
    assert began_random.startswith(
        f"cannot resume from {other}/checkpoints/step-00000001: initial weights was null, is "
    )
    assert explicit == ""


def test_chats_use_the_template_of_the_folder_and_exports_keep_it(ranks, tiny, base, tmp_path):
    source = shutil.copytree(base / "huggingface", tmp_path / "with template")
    (source / "chat_template.jinja").write_text(
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
    )
    argv = [*tiny, *in_folder(tmp_path / "run"), *CHAT, "--from", str(source), "--training.steps", "1"]
    ranks(1).run(train, combine([*argv, "--training.seq_len", "256", "--data.document_mask", "true"]))
    saved = (checkpoint_of(tmp_path / "run") / "chat_template.jinja").read_text()
    assert saved.endswith((source / "chat_template.jinja").read_text())
