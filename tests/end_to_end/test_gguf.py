"""Files for llama.cpp of complete runs, and the command that writes them."""

import shutil

import numpy as np
import pytest

from tests.checkpoint.formats.gguf_models import read, values_of
from tests.commands import run_script
from tests.run.test_preflight import error_of_checks
from tests.training_runs import checkpoint_of, in_folder, train
from trainer.base.config import CheckpointConfig
from trainer.checkpoint.formats.export import export_run
from trainer.checkpoint.formats.folders import open_weights
from trainer.checkpoint.formats.gguf_writer import is_gguf_of
from trainer.data.tokenizer.backends import DEFAULT_FILE

EXPORT = ["--checkpoint.export_gguf", "f32"]


@pytest.fixture(scope="module")
def trained(ranks, tiny, tmp_path_factory):
    """The folder of a run with an export."""
    folder = tmp_path_factory.mktemp("gguf") / "run"
    ranks(1).run(train, [*tiny, *in_folder(folder), "--optimizer.ema_decay", "0.5", *EXPORT])
    return folder


def test_the_file_is_written_after_the_last_step(trained):
    keys, tensors = read(trained / "model-f32.gguf")
    assert keys["general.name"] == "run" and keys["llama.block_count"] == 2
    weights = open_weights(checkpoint_of(trained), alone=True)
    assert np.array_equal(values_of(tensors["token_embd.weight"]), weights.rows("tok_embeddings.weight").numpy())
    log = (trained / "log.txt").read_text()
    assert f"exported {checkpoint_of(trained).name} to {trained}/model-f32.gguf\n" in log
    assert not (trained / "huggingface").exists()


def test_an_existing_file_of_the_same_checkpoint_is_kept(ranks, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    file, checkpoint = tmp_path / "run" / "model-f32.gguf", checkpoint_of(tmp_path / "run")
    assert is_gguf_of(file, checkpoint, averaged=False) and not is_gguf_of(file, checkpoint, averaged=True)
    before = file.stat().st_mtime_ns
    config = CheckpointConfig(export_gguf="f32")
    ranks(1).run(export_run, tmp_path / "run", config, True)
    assert file.stat().st_mtime_ns == before
    file.write_bytes(b"GGUF")
    assert not is_gguf_of(file, checkpoint, averaged=False)
    ranks(1).run(export_run, tmp_path / "run", config, True)
    assert is_gguf_of(file, checkpoint, averaged=False)


def test_the_command_writes_a_run_a_checkpoint_and_a_folder(trained, tmp_path):
    run_script("scripts/convert_hf.py", "to-hf", trained, tmp_path / "hf", "--dtype", "fp32")
    for source in (trained, checkpoint_of(trained), tmp_path / "hf"):
        out = tmp_path / f"{source.name}.gguf"
        done = run_script("scripts/convert_hf.py", "to-gguf", source, out, "--type", "f32")
        assert done.returncode == 0 and done.stdout.endswith(f"{out}: written\n")
        keys, tensors = read(out)
        expected = read(trained / "model-f32.gguf")
        assert {name: t.data.tobytes() for name, t in tensors.items()} == {
            name: t.data.tobytes() for name, t in expected[1].items()
        }
        own = ("general.name", "general.meshwright_checkpoint")
        assert {k: v for k, v in keys.items() if k not in own} == {k: v for k, v in expected[0].items() if k not in own}


def test_the_averaged_weights_are_written(trained, tmp_path):
    run_script("scripts/convert_hf.py", "to-gguf", trained, tmp_path / "x.gguf", "--type", "f32", "--averaged")
    weights = open_weights(checkpoint_of(trained), alone=True, averaged=True)
    found = values_of(read(tmp_path / "x.gguf")[1]["output.weight"])
    assert np.array_equal(found, weights.rows("output.weight").numpy())


def test_a_path_that_must_not_be_written_is_one_line(trained, tmp_path):
    (tmp_path / "x.gguf").touch()
    done = run_script("scripts/convert_hf.py", "to-gguf", trained, tmp_path / "x.gguf")
    assert (done.returncode, done.stderr.strip()) == (2, f"{tmp_path}/x.gguf exists; choose another path")
    inside = checkpoint_of(trained) / "x.gguf"
    done = run_script("scripts/convert_hf.py", "to-gguf", trained, inside)
    message = f"{inside} is inside the checkpoint {inside.parent}, which new files would damage; choose another path"
    assert (done.returncode, done.stderr.strip()) == (2, message)


def test_what_llama_cpp_cannot_compute_is_refused_before_the_first_step(ranks):
    argv = ["--model.name", "smollm3", "--model.size", "debug", "--model.overrides.attention_bias", "true", *EXPORT]
    ((key, message),) = ranks(1).run(error_of_checks, argv)
    reason = "attention_bias true: llama.cpp computes only false for the architecture smollm3"
    assert (key, message) == (EXPORT[0].removeprefix("--"), f"the model cannot be written for llama.cpp: {reason}")


def test_a_tokenizer_that_llama_cpp_does_not_know_is_refused_before_the_first_step(ranks, tmp_path):
    shutil.copy(DEFAULT_FILE, tmp_path / "own.tiktoken")
    argv = ["--tokenizer.backend", "tiktoken", "--tokenizer.path", str(tmp_path / "own.tiktoken")]
    argv += ["--tokenizer.pattern", "cl100k", *EXPORT]
    ((key, message),) = ranks(1).run(error_of_checks, argv)
    assert key == "checkpoint.export_gguf" and "splits text with the regular expression" in message
