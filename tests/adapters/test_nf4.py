"""The format of weights in 4 bits: equal to that of bitsandbytes, independent of how a weight is divided."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer.adapters import nf4
from trainer.adapters.nf4 import (
    CODES,
    SCALES,
    QuantizedWeight,
    dequantize,
    pairs_of_levels,
    part_shapes,
    quantize,
    quantized_weights,
    round_trip,
    stored_bytes,
)

PAIRS = pairs_of_levels("cpu")


def rows_of(shape, dtype=torch.bfloat16):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    values[0, :64] = 0  # a block of zeros
    values[-1, 5] = 3.0
    return values.to(dtype)


@pytest.fixture(scope="module")
def stored():
    """Blocks that bitsandbytes has quantized: name -> tensor."""
    content = json.loads((Path(__file__).parent / "nf4_of_bitsandbytes.json").read_text())

    def tensor(name, dtype):
        return torch.frombuffer(bytearray.fromhex(content[name]), dtype=dtype).view(content["shape"][0], -1)

    dtypes = {"rows": torch.bfloat16, "codes": torch.uint8, "absmax": torch.float32, "values": torch.bfloat16}
    return {name: tensor(name, dtype) for name, dtype in dtypes.items()}


def test_codes_scales_and_values_are_those_of_bitsandbytes(stored):
    parts = quantize(stored["rows"], is_double=False)
    assert torch.equal(parts[CODES], stored["codes"])
    assert torch.equal(parts[SCALES].view(torch.bfloat16).float(), stored["absmax"])  # exact for bf16 weights
    assert torch.equal(dequantize(parts, PAIRS, torch.bfloat16), stored["values"])
    assert torch.equal(quantize(stored["rows"], is_double=True)[CODES], stored["codes"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_those_of_the_installed_bitsandbytes(dtype):
    from bitsandbytes import functional  # here, because it takes seconds

    rows = rows_of((96, 256), dtype)
    codes, state = functional.quantize_4bit(rows, quant_type="nf4", blocksize=64)
    parts = quantize(rows, is_double=False)
    assert torch.equal(parts[CODES].flatten(), codes.flatten())
    expected = functional.dequantize_4bit(codes, state)
    # The scale of a block of fp32 weights is rounded to bf16.
    torch.testing.assert_close(
        dequantize(parts, PAIRS, dtype), expected, rtol=0 if dtype == torch.bfloat16 else 4e-3, atol=0
    )


@pytest.mark.parametrize("is_double", [False, True])
def test_no_row_depends_on_another_row_and_zeros_stay_zeros(is_double):
    rows = rows_of((6, 256))
    whole = quantize(rows, is_double)
    for name, part in quantize(rows[2:5], is_double).items():
        assert torch.equal(part, whole[name][2:5])
    values = dequantize(whole, PAIRS, torch.float32)
    assert not values[0, :64].any()
    error = (values - rows.float()).norm() / rows.float().norm()
    assert error < 0.1
    assert torch.equal(values.bfloat16(), dequantize(whole, PAIRS, torch.bfloat16))


def test_scales_in_8_bits_are_nearly_as_good():
    rows = rows_of((64, 1024))[1:-1]
    errors = [(round_trip(rows, is_double) - rows.float()).norm() for is_double in (False, True)]
    assert errors[0] < errors[1] < 1.01 * errors[0]


def test_one_large_value_costs_the_others_less_than_in_bitsandbytes():
    from bitsandbytes import functional  # here, because it takes seconds

    rows = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows[:, 100] = 400 * rows.abs().max()
    others = torch.ones(4096, dtype=torch.bool)
    others[64:128] = False  # its block
    codes, state = functional.quantize_4bit(rows, quant_type="nf4", blocksize=64, compress_statistics=True)
    pairs = [
        round_trip(rows, is_double=False),
        round_trip(rows, is_double=True),
        functional.dequantize_4bit(codes, state),
    ]
    exact = rows[:, others].float()
    single, double, theirs = (((values[:, others] - exact).norm() / exact.norm()).item() for values in pairs)
    assert single < double < 1.05 * single and theirs > 0.4


def test_bytes_of_a_value():
    for columns, most in ((4096, 0.517), (1024, 0.52)):
        assert stored_bytes((64, columns), is_double=False) / (64 * columns) == 0.53125
        assert stored_bytes((64, columns), is_double=True) / (64 * columns) <= most
    for is_double in (False, True):
        parts = quantize(torch.ones(3, 128), is_double)
        assert {name: tuple(part.shape) for name, part in parts.items()} == part_shapes((3, 128), is_double)
        assert sum(part.nbytes for part in parts.values()) == stored_bytes((3, 128), is_double)
        assert {part.dtype for part in parts.values()} == {torch.uint8}


def test_compiled_and_chunked_values_are_equal(monkeypatch):
    parts = quantize(rows_of((33, 128)), is_double=True)
    whole = dequantize(parts, PAIRS, torch.bfloat16)
    monkeypatch.setattr(nf4, "_CHUNK", 256)
    assert torch.equal(dequantize(parts, PAIRS, torch.bfloat16), whole)
    stacked = {name: part.view(3, 11, -1) for name, part in parts.items()}
    assert torch.equal(dequantize(stacked, PAIRS, torch.bfloat16), whole.view(3, 11, 128))
    compiled = torch.compile(dequantize, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(parts, PAIRS, torch.bfloat16), whole)


@pytest.mark.parametrize("is_double", [False, True])
@pytest.mark.parametrize("shape", [(40, 256), (3, 40, 256)])
def test_a_weight_is_quantized_in_pieces_while_it_is_read(monkeypatch, is_double, shape):
    monkeypatch.setattr(nf4, "_CHUNK", 1024)
    weight, sizes = rows_of((120, 256))[: shape[0] * shape[-2] if len(shape) == 3 else 40].view(shape), []

    def read(region):
        sizes.append(weight[region].numel())
        return weight[region]

    parts = {n: torch.zeros(s, dtype=torch.uint8) for n, s in part_shapes(shape, is_double).items()}
    QuantizedWeight(parts).fill(read)
    for name, part in quantize(weight, is_double).items():
        assert torch.equal(parts[name], part)
    assert max(sizes) == 1024 and sum(sizes) == weight.numel()


def test_quantized_weights_are_found_by_their_parts():
    module = nn.Module()
    module.inner = nn.Linear(64, 2, bias=False)
    module.inner.weight = None
    for name, shape in part_shapes((2, 64), is_double=True).items():
        part = nn.Parameter(torch.zeros(shape, dtype=torch.uint8), requires_grad=False)
        module.inner.register_parameter(f"weight_{name}", part)
    ((name, found),) = quantized_weights(module).items()
    assert name == "inner.weight" and set(found.parts) == {"codes", "scales", "maxima"}
