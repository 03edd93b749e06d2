"""8-bit optimizer moments: their error, and their independence of the layout."""

import pytest
import torch

from tests.optim.test_offload import argv
from tests.training_runs import records, train
from trainer.base.config import ConfigError
from trainer.base.config.load import load_config
from trainer.optim.quantized_moments import BLOCK_SIZE, BlockQuantizer, _values, is_quantizable
from trainer.run.resolve import resolve
from trainer.tools.planner.simulate import simulate

CPU = torch.device("cpu")


def quantize(matrix, signed):
    """Return the dequantized matrix, its codes and its scales."""
    quantizer = BlockQuantizer(signed, CPU)
    codes, scales = quantizer.zeros_like(matrix)
    assert torch.equal(quantizer.dequantize(codes, scales), torch.zeros_like(matrix))
    quantizer.quantize_(matrix, codes, scales)
    return quantizer.dequantize(codes, scales), codes, scales


def matrices():
    torch.manual_seed(0)
    gradients = (
        torch.randn(64, 2 * BLOCK_SIZE) * torch.logspace(-12, 3, 64)[:, None] * torch.rand(64, 2 * BLOCK_SIZE) ** 4
    )
    gradients[5] = 0
    return {True: gradients, False: gradients.square()}


@pytest.mark.parametrize("signed", [True, False])
def test_the_256_values_are_sorted_and_distinct(signed):
    values = _values(signed)
    assert len(values) == len(set(values)) == 256 and values == sorted(values)
    assert (values[0], values[-1]) == (-1.0 if signed else 0.0, 1.0)


@pytest.mark.parametrize("signed", [True, False])
def test_values_are_close_and_the_largest_of_a_block_is_exact(signed):
    matrix = matrices()[signed]
    dequantized, _, scales = quantize(matrix, signed)
    blocks, result = matrix.unflatten(1, (-1, BLOCK_SIZE)), dequantized.unflatten(1, (-1, BLOCK_SIZE))
    assert torch.equal(blocks.abs().amax(2), scales) and torch.equal(result.abs().amax(2), scales)
    # The step within the largest power of ten is 0.9 / 64 if signed, and half of it if unsigned.
    assert (
        (result - blocks).abs() <= scales[:, :, None] * (0.9 / 64 / (2 if signed else 4) + 1e-6)
    ).float().mean() > 0.99
    assert ((result - blocks).abs() <= scales[:, :, None] * 0.9 / 64).all()


def test_second_moment_quantizes_only_zero_to_zero():
    """The update divides by its square root, so values that are small within their block must not become zero."""
    matrix = matrices()[False]
    dequantized, *_ = quantize(matrix, signed=False)
    assert torch.equal(dequantized == 0, matrix == 0)


@pytest.mark.parametrize("signed", [True, False])
def test_quantizing_dequantized_values_reproduces_them(signed):
    first = quantize(matrices()[signed], signed)
    second = quantize(first[0], signed)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("signed", [True, False])
def test_skipped_steps_do_not_change_moments_whose_scale_is_subnormal(signed):
    """A skipped step quantizes the dequantized moments."""
    values = torch.tensor(_values(signed))
    scales = torch.arange(1, 200) * 2.0**-149
    first = quantize((values * scales[:, None]), signed)[0]
    assert (first[:, -1] == scales).all() and torch.equal(quantize(first, signed)[0], first)


def test_matrices_of_complete_blocks_are_quantizable():
    assert is_quantizable(torch.empty(3, BLOCK_SIZE)) and is_quantizable(torch.empty(0, 2 * BLOCK_SIZE))
    assert not is_quantizable(torch.empty(3, BLOCK_SIZE + 8)) and not is_quantizable(torch.empty(BLOCK_SIZE))


WIDE = ("--model.overrides.dim", "512", "--model.overrides.n_layers", "1", "--lr_schedule.warmup_steps", "0")
"""A model in which all matrices but the feed-forward's w2 are quantizable."""
EIGHT_BITS = ("--optimizer.state_dtype", "8bit")


@pytest.mark.parametrize("offload", ["none", "state"])
def test_a_checkpoint_is_loaded_bitwise_identically_in_other_layouts(ranks, tiny, tmp_path, offload):
    args = [
        *argv(tiny, tmp_path, "run"),
        *WIDE[:4],
        *EIGHT_BITS,
        "--optimizer.offload",
        offload,
        "--training.steps",
        "2",
    ]
    saved = ranks(2).run(train, args)[0].weights
    for size, layout in ((4, []), (1, []), (4, ["--parallel.tp", "2"])):
        assert ranks(size).run(train, [*args, *layout])[0].weights == saved


def test_updates_are_close_to_those_with_fp32_moments_and_identical_in_host_memory(ranks, tiny, tmp_path):
    weights, losses = {}, {}
    host = ("--optimizer.offload", "state_and_gradients")
    for name, more in (("fp32", ()), ("8bit", EIGHT_BITS), ("host", (*EIGHT_BITS, *host))):
        args = [
            *tiny,
            "--run.output_folder",
            str(tmp_path),
            "--run.name",
            name,
            *WIDE,
            *more,
            "--training.local_batch_size",
            "4",
            "--metrics.interval_steps",
            "1",
        ]
        weights[name] = ranks(2).run(train, [*args, "--training.steps", "8"])[0].weights
        losses[name] = [record["loss"] for record in records(tmp_path / name)]
    assert weights["8bit"] == weights["host"]
    assert losses["8bit"] == pytest.approx(losses["fp32"], rel=0.01) and losses["8bit"] != losses["fp32"]
    assert losses["fp32"][-1] < losses["fp32"][0] - 0.2


@pytest.mark.parametrize(
    ("matrix", "adapters"), [("weight", []), ("lora_a", ["--lora.rank", "4", "--checkpoint.init_from", "."])]
)
def test_a_layout_that_splits_quantization_blocks_is_rejected(matrix, adapters):
    """Before any rank starts: the search for a layout asks the same."""
    args = ["--config", "train_configs/debug.toml", "--model.overrides.dim", "256", *EIGHT_BITS, "--parallel.tp", "2"]
    with pytest.raises(ConfigError) as error:
        resolve(load_config([*args, *adapters], check_files=()), 2)
    message = (
        f"'8bit' needs row lengths divisible by 256, but tp shortens the rows of layers.0.attention.wo.{matrix} to 128; "
        "use 'bf16'"
    )
    assert (error.value.key, error.value.message) == ("optimizer.state_dtype", message)


def test_a_model_without_quantizable_matrices_is_rejected():
    with pytest.raises(ConfigError) as error:
        resolve(
            load_config(["--config", "train_configs/debug.toml", "--model.overrides.hidden_dim", "352", *EIGHT_BITS]), 1
        )
    message = "8bit needs matrices with row lengths divisible by 256, but llama3/debug has none"
    assert (error.value.key, error.value.message) == ("optimizer.state_dtype", message)


def test_matrices_to_which_8bit_moments_do_not_apply_are_named():
    def resolved(*words):
        return resolve(load_config([*words, *EIGHT_BITS]), 1)

    assert resolved("--model.name", "llama3", "--model.size", "8b").optimizer.fp32_moments == ""
    run = resolved("--model.name", "gpt-oss", "--model.size", "20b")
    assert run.optimizer.fp32_moments == (
        "8-bit moments do not apply to 98.6 % of the trained values, which have fp32 moments: the rows of matrices such as "
        "tok_embeddings.weight are not divisible by 256 (row lengths: 2880)"
    )
    share = 24 * 2880 * 4096 / run.num_trained  # wo
    assert run.optimizer.state_bytes == pytest.approx(8 - 2 * share * (3 - 4 / BLOCK_SIZE))


def test_8bit_moments_take_a_quarter_of_the_memory():
    args = [
        "--config",
        "train_configs/debug.toml",
        "--model.overrides.dim",
        "512",
        "--model.overrides.hidden_dim",
        "1024",
        "--model.overrides.n_layers",
        "2",
    ]
    fp32, eight_bits = (
        simulate([(load_config([*args, *m]), 0)], 2, on_gpu=True)[0].by_category for m in ((), EIGHT_BITS)
    )
    assert eight_bits["optimizer"] == pytest.approx(fp32["optimizer"] * (1 + 4 / BLOCK_SIZE) / 4, rel=0.02)
    assert eight_bits["parameters"] == fp32["parameters"]
