"""Words in messages."""

import pytest

from trainer.base.system.spelling import counted, every


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (counted(0, "file"), "0 files"),
        (counted(1, "file"), "1 file"),
        (counted(1200, "file"), "1200 files"),
        (counted(1200, "file", ","), "1,200 files"),
        (counted(1.0, "epoch", "g"), "1 epoch"),
        (counted(0.5, "epoch", ".3g"), "0.5 epochs"),
        (counted(1, "microbatch", plural="microbatches"), "1 microbatch"),
        (counted(2, "microbatch", plural="microbatches"), "2 microbatches"),
        (every(1, "step"), "every step"),
        (every(5, "step"), "every 5 steps"),
    ],
)
def test_a_noun_is_singular_only_for_one(words, expected):
    assert words == expected
