"""Samples longer than the context window of the initial model: a warning, an extension or a setting."""

import json
import shutil

import pytest

from tests.training_runs import error_line, in_folder, train
from trainer.base.config.load import load_config
from trainer.run.context_window import window_warning
from trainer.run.preflight import _open_weights
from trainer.run.resolve import resolve

WARNING = (
    "training.seq_len = 32 exceeds the 16 tokens for which {} was trained, and its RoPE is not extended (model.overrides, such "
    "as rope_theta or rope_type); exports state 16, or what model.context_window says"
)


@pytest.fixture(scope="module")
def short(ranks, tiny, tmp_path_factory):
    """A folder in Hugging Face's format whose model was trained for 16 tokens."""
    run = tmp_path_factory.mktemp("short") / "run"
    argv = [*tiny, *in_folder(run), "--training.steps", "1", "--checkpoint.export_huggingface", "true"]
    ranks(1).run(train, argv)
    folder = shutil.copytree(run / "huggingface", run.parent / "folder")
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 32
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    return folder


@pytest.mark.parametrize(
    ("words", "window", "warns"),
    [
        ([], 16, True),
        (["--training.seq_len", "16"], 16, False),
        (["--model.overrides.rope_theta", "50000.0"], 32, False),
        (["--model.overrides.rope_theta", "50000.0", "--training.seq_len", "8"], 16, False),
        (["--model.context_window", "24"], 24, False),
        (["--checkpoint.init_from", ""], 32, False),
    ],
)
def test_the_context_window_of_an_export_is_that_of_its_training(ranks, tiny, short, tmp_path, words, window, warns):
    argv = [
        *tiny,
        *in_folder(tmp_path / "run"),
        "--from",
        str(short),
        *words,
        "--checkpoint.export_huggingface",
        "true",
    ]
    for steps in ("1", "2"):  # the second resumes
        ranks(1).run(train, [*argv, "--training.steps", steps])
        config = json.loads((tmp_path / "run" / "huggingface" / "config.json").read_text())
        assert config["max_position_embeddings"] == window
        assert ("rope_theta" in str(words)) == (config["rope_theta"] == 50000)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count(f"warning: context window: {WARNING.format(short)}\n") == warns


def test_an_extension_changes_only_what_the_user_names(ranks, tiny, short, tmp_path):
    argv = [*tiny, *in_folder(tmp_path / "run"), "--checkpoint.init_from", str(short)]
    differs = "contains a different model: rope_theta is 500000.0, expected 50000.0"
    (folder := tmp_path / "other").mkdir()
    config = json.loads((short / "config.json").read_text())
    config["rope_theta"] = 50000.0
    (folder / "config.json").write_text(json.dumps(config))
    assert differs in ranks(1).run(error_line, [*argv, "--model.huggingface", str(folder)])[0]
    lora = [*argv, "--model.overrides.rope_theta", "50000.0", "--lora.rank", "2"]
    assert differs in ranks(1).run(error_line, lora)[0]
    extended = load_config(
        [*argv, "--model.overrides.rope_type", "yarn", "--model.overrides.rope_original_seq_len", "16"]
    )
    assert extended.model.overrides["rope_type"] == "yarn"


def test_an_adapter_is_warned_too(ranks, tiny, short):
    assert ranks(1).run(warning_of, [*tiny, "--from", str(short), "--lora.rank", "2"]) == [WARNING.format(short)]


def warning_of(argv):
    config = load_config(argv)
    resolved = resolve(config, 1)
    return window_warning(config, resolved.sizes, _open_weights(config, resolved, None))
