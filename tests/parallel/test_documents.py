"""Documents that are packed into one sample with a mask are trained on as if each were alone."""

import numpy as np
import pytest

from tests.training_runs import largest_deviation, records, train
from trainer.config import TokenizerConfig
from trainer.data.tokenizer.backends import load_tokenizer

PAIRS = [(20, 12), (16, 16), (31, 1), (7, 25)] * 4
"""Positions of documents, which two by two fill a sample of 32."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A file of tokens: a document ends at the end-of-text token, which is a label only."""
    eos, draw = load_tokenizer(TokenizerConfig()).eos, np.random.default_rng(0)
    documents = [[*draw.integers(0, 500, length).tolist(), eos] for pair in PAIRS for length in pair]
    path = tmp_path_factory.mktemp("pairs") / "tokens.npy"
    np.save(path, np.concatenate(documents).astype(np.uint16))
    return path


def run(ranks, size, tiny, pairs, folder, *more):
    """Three steps, each on all documents."""
    of_data = ["--data.dataset", "tokens", "--data.path", str(pairs), "--data.held_out_fraction", "0"]
    argv = [*tiny, *of_data, "--run.output_folder", str(folder.parent), "--run.name", folder.name]
    ranks(size).run(train, [*argv, "--training.steps", "3", "--model.overrides.n_layers", "4", *more])
    return records(folder)


PACKED = ["--data.packing", "best-fit", "--data.document_mask", "true", "--training.global_batch_size", "16"]
SINGLE = ["--data.packing", "none", "--training.global_batch_size", "32"]


@pytest.fixture(scope="module")
def alone(ranks, tiny, pairs, tmp_path_factory):
    return run(ranks, 1, tiny, pairs, tmp_path_factory.mktemp("alone") / "run", *SINGLE)


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (1, []),
        (1, ["--activation_checkpoint.mode", "selective"]),
        (2, ["--parallel.tp", "2"]),
        (2, ["--parallel.cp", "2"]),
        (2, ["--parallel.cp", "2", "--activation_checkpoint.mode", "full"]),
        (2, ["--parallel.pp", "2"]),
        (4, ["--parallel.cp", "2", "--parallel.tp", "2"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_packed_documents_give_the_loss_and_gradients_of_each_alone(ranks, tiny, pairs, tmp_path, alone, size, layout):
    packed = run(ranks, size, tiny, pairs, tmp_path / "run", *PACKED, *layout)
    assert [r["num_targets"] for r in packed] == [16 * 32] * 3 == [r["num_targets"] for r in alone]
    for key in ("loss", "grad_norm"):
        assert largest_deviation(alone, packed, key) < 1e-5


def test_without_the_mask_they_are_another_text(ranks, tiny, pairs, tmp_path, alone):
    """The comparison itself: what is packed is seen, where nothing keeps it apart."""
    unmasked = [word if word != "true" else "false" for word in PACKED]
    packed = run(ranks, 1, tiny, pairs, tmp_path / "run", *unmasked)
    assert largest_deviation(alone, packed, "loss") > 1e-4


def test_documents_in_a_row_end_at_their_borders_too(ranks, tiny, pairs, tmp_path):
    more = ["--data.document_mask", "true", "--training.global_batch_size", "16"]
    one = run(ranks, 1, tiny, pairs, tmp_path / "one", *more)
    for name, layout in (("tp", ["--parallel.tp", "2"]), ("cp", ["--parallel.cp", "2"])):
        other = run(ranks, 2, tiny, pairs, tmp_path / name, *more, *layout)
        assert largest_deviation(one, other, "loss") < 1e-5


def test_compiled_blocks_take_the_mask(ranks, tiny, pairs, tmp_path, alone):
    packed = run(ranks, 1, tiny, pairs, tmp_path / "run", *PACKED, "--compile.enabled", "true")
    for key in ("loss", "grad_norm"):
        assert largest_deviation(alone, packed, key) < 1e-5
