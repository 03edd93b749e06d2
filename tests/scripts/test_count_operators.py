"""scripts/dev/count_operators.py counts what the theory predicts."""

import pytest

from scripts.dev.count_operators import count_compiled, count_eager
from tests.commands import run_script

# Seven products in forward, two gradients of each in backward; the recomputation needs all but the last.
EXPECTED = [("none", 21), ("selective", 21), ("full", 27)]


@pytest.mark.parametrize(("mode", "matmuls"), EXPECTED)
def test_matrix_products_of_an_eager_block(mode, matmuls):
    counted, few = count_eager("llama3", "debug", mode, 16)
    _, many = count_eager("llama3", "debug", mode, 32)
    assert counted == matmuls
    assert few < many < 2 * few  # the traffic of weights does not grow


def test_matrix_products_of_a_compiled_block():
    matmuls, num_bytes = count_compiled("llama3", "debug", "full", 16)
    assert matmuls == 27 and num_bytes > 0


def test_an_unknown_size_is_an_error():
    done = run_script("scripts/dev/count_operators.py", "--size", "9b")
    assert (done.returncode, done.stderr.startswith("--size 9b: expected one of debug,")) == (2, True), done.stderr
