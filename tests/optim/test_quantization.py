"""Averages in 8 bits: what is lost, and what is not."""

import pytest
import torch

from tests.optim.test_offload import argv
from tests.training_runs import records, train
from trainer.config import ConfigError
from trainer.config.load import load_config
from trainer.optim.quantization import BLOCK, BlockQuantizer, _values, fits
from trainer.planning.simulate import simulate
from trainer.run.resolve import resolve

CPU = torch.device("cpu")


def kept(matrix, signed):
    """The matrix as it is read again, and what was written."""
    codec = BlockQuantizer(signed, CPU)
    codes, scales = codec.zeros_like(matrix)
    assert torch.equal(codec.read(codes, scales), torch.zeros_like(matrix))
    codec.write(matrix, codes, scales)
    return codec.read(codes, scales), codes, scales


def matrices():
    torch.manual_seed(0)
    gradients = torch.randn(64, 2 * BLOCK) * torch.logspace(-12, 3, 64)[:, None] * torch.rand(64, 2 * BLOCK) ** 4
    gradients[5] = 0
    return {True: gradients, False: gradients.square()}


@pytest.mark.parametrize("signed", [True, False])
def test_there_are_256_values_in_order(signed):
    values = _values(signed)
    assert len(values) == len(set(values)) == 256 and values == sorted(values)
    assert (values[0], values[-1]) == (-1.0 if signed else 0.0, 1.0)


@pytest.mark.parametrize("signed", [True, False])
def test_values_are_near_and_the_largest_of_a_block_is_exact(signed):
    matrix = matrices()[signed]
    read, _, scales = kept(matrix, signed)
    blocks, read_blocks = matrix.unflatten(1, (-1, BLOCK)), read.unflatten(1, (-1, BLOCK))
    assert torch.equal(blocks.abs().amax(2), scales) and torch.equal(read_blocks.abs().amax(2), scales)
    # A step within the largest power of ten: 0.9 / 64 with a sign, half of it without.
    assert (
        (read_blocks - blocks).abs() <= scales[:, :, None] * (0.9 / 64 / (2 if signed else 4) + 1e-6)
    ).float().mean() > 0.99
    assert ((read_blocks - blocks).abs() <= scales[:, :, None] * 0.9 / 64).all()


def test_of_squares_only_zero_becomes_zero():
    """An update divides by their root: what is small beside its block must not become nothing."""
    matrix = matrices()[False]
    read, *_ = kept(matrix, signed=False)
    assert torch.equal(read == 0, matrix == 0)


@pytest.mark.parametrize("signed", [True, False])
def test_what_was_read_is_written_as_it_was(signed):
    read, codes, scales = kept(matrices()[signed], signed)
    again, codes_again, scales_again = kept(read, signed)
    assert torch.equal(codes, codes_again) and torch.equal(scales, scales_again) and torch.equal(read, again)


def test_matrices_of_whole_blocks_fit():
    assert fits(torch.empty(3, BLOCK)) and fits(torch.empty(0, 2 * BLOCK))
    assert not fits(torch.empty(3, BLOCK + 8)) and not fits(torch.empty(BLOCK))


WIDE = ("--model.overrides.dim", "512", "--model.overrides.n_layers", "1", "--lr_schedule.warmup_steps", "0")
"""Then all but norms and the feed-forward's w2 fit."""
EIGHT = ("--optimizer.state_dtype", "8bit")


@pytest.mark.parametrize("offload", ["none", "state"])
def test_a_checkpoint_is_loaded_on_other_ranks_and_cuts_bit_by_bit(ranks, tiny, tmp_path, offload):
    words = [*argv(tiny, tmp_path, "run"), *WIDE[:4], *EIGHT, "--optimizer.offload", offload, "--training.steps", "2"]
    saved = ranks(2).run(train, words)[0].weights
    for size, layout in ((4, []), (1, []), (4, ["--parallel.tp", "2"])):
        assert ranks(size).run(train, [*words, *layout])[0].weights == saved


def test_updates_are_near_those_with_exact_averages_and_the_same_on_the_host(ranks, tiny, tmp_path):
    ends, losses = {}, {}
    host = ("--optimizer.offload", "state_and_gradients")
    for name, more in (("exact", ()), ("8bit", EIGHT), ("host", (*EIGHT, *host))):
        words = [
            *tiny,
            "--run.output_folder",
            str(tmp_path),
            "--run.name",
            name,
            *WIDE,
            *more,
            "--metrics.interval_steps",
            "1",
        ]
        ends[name] = ranks(2).run(train, [*words, "--training.steps", "8"])[0].weights
        losses[name] = [record["loss"] for record in records(tmp_path / name)]
    assert ends["8bit"] == ends["host"]
    assert losses["8bit"] == pytest.approx(losses["exact"], rel=0.01) and losses["8bit"] != losses["exact"]
    assert losses["exact"][-1] < losses["exact"][0] - 0.2


def test_a_layout_that_cuts_blocks_is_refused():
    words = ["--config", "train_configs/debug.toml", "--model.overrides.dim", "256", *EIGHT, "--parallel.tp", "2"]
    with pytest.raises(ConfigError) as error:
        simulate([(load_config(words), 0)], 2, on_gpu=False)
    rule = "8bit keeps blocks of 256 values, and tp leaves rows of 128 of layers.0.attention.wo.weight; or bf16"
    assert (error.value.key, error.value.message) == ("optimizer.state_dtype", rule)


def test_a_network_without_blocks_is_refused():
    with pytest.raises(ConfigError) as error:
        resolve(load_config(["--config", "train_configs/debug.toml", "--model.overrides.hidden_dim", "352", *EIGHT]), 1)
    rule = "8bit keeps matrices whose rows are multiples of 256, and llama3/debug has none"
    assert (error.value.key, error.value.message) == ("optimizer.state_dtype", rule)


def test_state_takes_a_quarter():
    words = [
        "--config",
        "train_configs/debug.toml",
        "--model.overrides.dim",
        "512",
        "--model.overrides.hidden_dim",
        "1024",
    ]
    exact, eight = (simulate([(load_config([*words, *m]), 0)], 2, on_gpu=True)[0].by_kind for m in ((), EIGHT))
    assert eight["optimizer"] == pytest.approx(exact["optimizer"] * (1 + 4 / BLOCK) / 4, rel=0.02)
    assert eight["parameters"] == exact["parameters"]
