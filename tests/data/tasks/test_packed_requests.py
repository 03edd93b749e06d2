"""Every request is in exactly one sample, and the tokens that it reads are its own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.batch import IGNORE_INDEX
from trainer.data.tasks.encode import Request
from trainer.data.tasks.packed_requests import PackedRequests

SEQ_LEN = 16
TOKENS = st.lists(st.integers(1, 99), min_size=1, max_size=6).map(tuple)
QUESTIONS = st.lists(
    st.one_of(
        st.tuples(TOKENS, st.lists(st.lists(st.integers(1, 99), max_size=5).map(tuple), min_size=1, max_size=4)).map(
            lambda pair: [Request(pair[0], continuation) for continuation in pair[1]]
        ),
        st.lists(st.builds(Request, TOKENS, TOKENS), min_size=1, max_size=3),
    ),
    max_size=6,
)


def read_tokens(batch, row, position):
    """Return the tokens that a token of a sample attends to, with itself, in the order of their positions."""
    last = batch.last_readers[row]
    visible = [i for i in range(position + 1) if last[i] >= position]
    assert [int(batch.positions[row, i]) for i in visible] == list(range(len(visible)))
    return [int(batch.tokens[row, i]) for i in visible]


@settings(deadline=None)
@given(questions=QUESTIONS)
def test_each_target_is_predicted_once_from_the_tokens_before_it(questions):
    packed = PackedRequests.pack(questions, SEQ_LEN)
    found = {}
    for row in range(len(packed)):
        batch = packed[np.array([row])]
        for document, index in enumerate(packed.of_row(row)):
            targets = np.flatnonzero((batch.labels[0] != IGNORE_INDEX) & (batch.documents[0] == document))
            found[index] = [(read_tokens(batch, 0, i), int(batch.labels[0, i])) for i in targets.tolist()]
    found |= {index: found[same] for index, same in packed.copies if same in found}
    for index, (context, continuation) in enumerate(packed.requests):
        whole = [*context, *continuation]
        expected = [(whole[: len(context) + i], token) for i, token in enumerate(continuation)]
        assert found.pop(index, []) == expected
    assert not found


def test_requests_with_one_context_share_it():
    context = tuple(range(1, 8))
    questions = [[Request(context, (20, 21)), Request(context, (30,)), Request(context, (40, 41, 42))]]
    packed = PackedRequests.pack(questions, SEQ_LEN)
    assert (len(packed), packed.num_tokens, packed.num_documents) == (1, 6 + 2 + 1 + 3, 3)


def test_equal_requests_of_a_question_are_computed_once():
    questions = [[Request((1,), (2,)), Request((1,), (3,)), Request((1,), (2,))], [Request((1,), (2,))]]
    packed = PackedRequests.pack(questions, SEQ_LEN)
    assert packed.copies == [(2, 0)]
    assert sorted(packed.of_row(0)) == [0, 1, 3]


def test_rows_of_padding_have_no_target():
    packed = PackedRequests.pack([[Request((1,), (2,))]], SEQ_LEN)
    batch = packed[np.array([-1, 0])]
    assert (batch.labels[0] == IGNORE_INDEX).all()
    assert (batch.documents[0] == -1).all()
    assert int((batch.labels[1] != IGNORE_INDEX).sum()) == 1


@pytest.mark.parametrize("count", [1, 50])
def test_samples_are_filled_well(count):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, SEQ_LEN + 1, count)
    packed = PackedRequests.pack([[Request((1,), (2,) * int(n))] for n in lengths], SEQ_LEN)
    assert packed.num_tokens == lengths.sum()
    assert len(packed) <= -(-lengths.sum() // SEQ_LEN) * 1.3 + 1
