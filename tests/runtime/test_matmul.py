import pytest
import torch

from trainer.runtime import matmul
from trainer.runtime.matmul import addmm_fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_of_products_is_fp32_and_ignores_uninitialized_values(monkeypatch, dtype):
    monkeypatch.setattr(matmul, "_ROWS", 4)  # three groups of rows, the last one incomplete
    draw = torch.Generator().manual_seed(0)
    products = [[torch.randn(*shape, generator=draw).to(dtype) for shape in ((10, 6), (6, 5))] for _ in range(3)]
    total = torch.full((10, 5), float("nan"))
    for i, (a, b) in enumerate(products):
        addmm_fp32(total, a, b, is_first=i == 0)
    expected = sum((a @ b).float() for a, b in products)
    torch.testing.assert_close(total, expected)
