"""Document masks: packed documents train like separate ones."""

import numpy as np
import pytest

from tests.training_runs import largest_deviation, records, train
from trainer.base.config import TokenizerConfig
from trainer.data.tokenizer.backends import load_tokenizer

PAIRS = [(20, 12), (16, 16), (31, 1), (7, 25)] * 4
"""Lengths of documents; each pair fills a sample of 32 positions."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A token file. Each document ends with EOS, which is only a label."""
    eos, rng = load_tokenizer(TokenizerConfig()).eos, np.random.default_rng(0)
    documents = [[*rng.integers(0, 500, length).tolist(), eos] for pair in PAIRS for length in pair]
    path = tmp_path_factory.mktemp("pairs") / "tokens.npy"
    np.save(path, np.concatenate(documents).astype(np.uint16))
    return path


def run(ranks, size, tiny, pairs, folder, *flags):
    """Train three steps, each on all documents in several microbatches, and return the records."""
    data_flags = ["--data.dataset", "tokens", "--data.path", str(pairs), "--data.held_out_fraction", "0"]
    argv = [*tiny, *data_flags, "--run.output_folder", str(folder.parent), "--run.name", folder.name]
    ranks(size).run(train, [*argv, "--training.steps", "3", "--training.local_batch_size", "8", *flags])
    return records(folder)


PACKED = ["--data.packing", "best-fit", "--data.document_mask", "true", "--training.global_batch_size", "16"]
SINGLE = ["--data.packing", "none", "--training.global_batch_size", "32"]


@pytest.fixture(scope="module")
def separate(ranks, tiny, pairs, tmp_path_factory):
    return run(ranks, 1, tiny, pairs, tmp_path_factory.mktemp("separate") / "run", *SINGLE)


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
def test_packed_documents_have_the_loss_and_gradients_of_separate_ones(
    ranks, tiny, pairs, tmp_path, separate, size, layout
):
    packed = run(ranks, size, tiny, pairs, tmp_path / "run", *PACKED, *layout)
    assert [r["num_targets"] for r in packed] == [16 * 32] * 3 == [r["num_targets"] for r in separate]
    for key in ("loss", "grad_norm"):
        assert largest_deviation(separate, packed, key) < 1e-5


def test_without_the_mask_packed_documents_have_another_loss(ranks, tiny, pairs, tmp_path, separate):
    """Negative control of the comparison."""
    unmasked = [word if word != "true" else "false" for word in PACKED]
    packed = run(ranks, 1, tiny, pairs, tmp_path / "run", *unmasked)
    assert largest_deviation(separate, packed, "loss") > 1e-4


def test_concatenated_documents_are_masked_alike_under_tp_and_cp(ranks, tiny, pairs, tmp_path):
    flags = ["--data.document_mask", "true", "--training.global_batch_size", "16"]
    one_rank = run(ranks, 1, tiny, pairs, tmp_path / "one", *flags)
    for name, layout in (("tp", ["--parallel.tp", "2"]), ("cp", ["--parallel.cp", "2"])):
        two_ranks = run(ranks, 2, tiny, pairs, tmp_path / name, *flags, *layout)
        assert largest_deviation(one_rank, two_ranks, "loss") < 1e-5


def test_compiled_blocks_apply_the_document_mask(ranks, tiny, pairs, tmp_path, separate):
    packed = run(ranks, 1, tiny, pairs, tmp_path / "run", *PACKED, "--compile.enabled", "true")
    for key in ("loss", "grad_norm"):
        assert largest_deviation(separate, packed, key) < 1e-5


def test_packed_documents_predict_further_tokens_like_separate_ones(ranks, tiny, pairs, tmp_path):
    """Recurrences, attention and the labels of multi-token prediction stop at documents."""
    model = ["--model.name", "qwen3.5", "--model.overrides.layer_types", "linear,full"]
    model += ["--model.overrides.prediction_layers", "1", "--training.prediction_weight", "0.3"]
    separate = run(ranks, 1, tiny, pairs, tmp_path / "separate", *SINGLE, *model)
    for size, layout in ((1, []), (2, ["--parallel.cp", "2"])):
        packed = run(ranks, size, tiny, pairs, tmp_path / f"packed{size}", *PACKED, *model, *layout)
        for key in ("loss", "prediction_loss", "grad_norm"):
            assert largest_deviation(separate, packed, key) < 1e-5, key
