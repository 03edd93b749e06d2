"""Held-out tokens of stores whose documents are too few to be selected by a hash."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.data.chat.examples import DEFAULT
from trainer.base.config import DataConfig, TokenizerConfig
from trainer.data.build import open_datasets
from trainer.data.datasets import prepare_datasets
from trainer.data.store.held_out import first_held_out, held_out_contents, open_splits
from trainer.data.store.store import TokenStore


def store_of(documents: list[list[int]], with_targets: bool = False) -> TokenStore:
    tokens = np.array([token for document in documents for token in document], "<u2")
    targets = np.ones(len(tokens), np.uint8) if with_targets else None
    return TokenStore(tokens, np.cumsum([0, *map(len, documents)]), targets)


@pytest.fixture
def one_text(tmp_path) -> DataConfig:
    (tmp_path / "my.txt").write_text("".join(f"line {i} of my own text\n" for i in range(300)))
    return DataConfig(
        dataset="text", path=str(tmp_path / "my.txt"), store_folder=str(tmp_path / "stores"), prepare_workers=1
    )


def opened(data: DataConfig, seq_len: int = 32, evaluates: bool = True):
    stores = prepare_datasets(data, {}, TokenizerConfig(), DEFAULT, seq_len, False, evaluates)
    return open_datasets(data, {}, stores, seq_len, evaluates)


def test_the_last_share_of_the_tokens_of_one_document_is_held_out():
    assert first_held_out(store_of([list(range(1000))]), 0.01) == 990
    assert first_held_out(store_of([list(range(100))]), 0.01) == 98, "a target needs a token before it"
    assert first_held_out(store_of([[1, 2, 3, 4]]), 0.01) == 2
    assert first_held_out(store_of([[1, 2, 3]]), 0.01) is None
    assert first_held_out(store_of([]), 0.01) is None


def test_conversations_are_held_out_complete():
    talks = [[i] * 10 for i in range(5)]
    assert first_held_out(store_of(talks, with_targets=True), 0.01) == 40
    assert first_held_out(store_of(talks, with_targets=True), 0.3) == 30
    assert first_held_out(store_of([[7] * 50, [8] * 2], with_targets=True), 0.5) == 50
    assert first_held_out(store_of(talks[:1], with_targets=True), 0.5) is None, "one conversation cannot be divided"


@pytest.mark.parametrize("with_targets", [False, True])
def test_equal_documents_are_never_on_both_sides(with_targets):
    assert first_held_out(store_of([[1, 2, 3]] * 20, with_targets), 0.1) is None
    random = Random(0)
    divided = 0
    for _ in range(200):
        documents = [[random.randrange(6)] * random.randrange(1, 4) for _ in range(random.randrange(2, 9))]
        store = store_of(documents, with_targets)
        first = first_held_out(store, random.choice((0.01, 0.2, 0.5)))
        if first is None:
            continue
        divided += 1
        assert 0 < first < len(store.tokens)
        sides = [set(), set()]
        for start, stop, document in zip(store.documents[:-1], store.documents[1:], documents, strict=True):
            if start < first:
                sides[0].add(tuple(document))
            if stop > first and start < first:  # the document is divided
                assert not with_targets and documents.count(document) == 1
            elif stop > first:
                sides[1].add(tuple(document))
        assert not sides[0] & sides[1]
    assert divided > 50


@pytest.mark.parametrize(("fraction", "contents"), [(0.01, 1), (0.1, 6), (0.5, 30)])
def test_distinct_contents_are_held_out_where_equal_documents_stand_everywhere(fraction, contents):
    documents = [[i] * 10 for i in range(60)] * 4
    Random(0).shuffle(documents)
    store = store_of(documents, with_targets=True)
    assert first_held_out(store, fraction) is None
    selected = held_out_contents(store, fraction)
    assert selected.sum() == 4 * contents
    sides = [
        {d[0] for d, is_held_out in zip(documents, selected, strict=True) if is_held_out == side}
        for side in (False, True)
    ]
    assert len(sides[1]) == contents and not sides[0] & sides[1]
    assert held_out_contents(store_of([[1, 2]] * 40), 0.1) is None
    assert held_out_contents(store_of([[1] * 90, [2] * 5, [1] * 90, [2] * 5]), 0.01).tolist() == [
        False,
        True,
        False,
        True,
    ]
    assert held_out_contents(store_of([]), 0.1) is None


@pytest.mark.parametrize("packing", ["best-fit", "wrapped"])
def test_a_run_holds_out_some_of_few_contents_that_are_repeated(tmp_path, capsys, packing):
    talks = [{"question": f"number {i}?", "answer": f"It is {i}."} for i in range(60)] * 4
    Random(0).shuffle(talks)
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, talks)))
    data = DataConfig(
        dataset="chat", path=str(tmp_path / "chats.jsonl"), store_folder=str(tmp_path / "stores"), packing=packing
    )
    for fraction in (1e-4, 1e-5):  # so small that the hash selects none
        datasets = opened(config := replace(data, held_out_fraction=fraction))
        (store,) = (folder for folder in one_text_stores(config) if datasets.name.startswith(folder.name))
        splits = open_splits(store, config, True)
        train, held_out = (
            {tuple(s.tokens[a:b].tolist()) for a, b in itertools.pairwise(s.documents)}
            for s in (splits.train, splits.held_out)
        )
        assert len(held_out) == 1 and len(train) == 59 and not train & held_out
        assert splits.held_out.targets[:].sum() > 0 and len(datasets.evaluation["held_out"])
        assert (
            "selects none or all of the 240 documents, so that 4 documents (1 content) are held out instead"
            in capsys.readouterr().out
        )
        assert datasets.name == f"{store.name}-contents-{len(splits.held_out.tokens)}"


@pytest.mark.parametrize("fraction", [0.01, 0.5])
def test_the_held_out_tokens_follow_the_training_tokens_of_one_file(one_text, fraction, capsys):
    """With 0.01, the hash selects no document; with 0.5, it selects the only one."""
    datasets = opened(data := replace(one_text, held_out_fraction=fraction))
    (store,) = one_text_stores(data)
    splits = open_splits(store, data, True)
    complete = open_splits(store, data, False)
    whole = complete.train if len(complete.train.tokens) else complete.held_out
    assert (len(complete.train.tokens) == 0) == (fraction == 0.5)
    first = first_held_out(whole, fraction)
    assert splits.train.tokens[:].tolist() + splits.held_out.tokens[:].tolist() == whole.tokens[:].tolist()
    assert len(splits.train.tokens) == first and splits.held_out.documents.tolist() == [0, len(whole.tokens) - first]
    held_out = len(whole.tokens) - first
    assert datasets.name == f"{store.name}-last-{held_out}"
    expected = (
        f"data.held_out_fraction = {fraction:g} cannot divide the only document, so that the last {held_out} of "
        f"{len(whole.tokens)} tokens are held out instead"
    )
    assert expected in capsys.readouterr().out


def one_text_stores(data: DataConfig) -> list[Path]:
    return [path.parent for path in Path(data.store_folder).glob("*/store.json")]


def test_a_run_that_does_not_evaluate_trains_on_all_tokens(one_text):
    datasets = opened(one_text, evaluates=False)
    (store,) = one_text_stores(one_text)
    assert datasets.name == store.name, "as in earlier versions, so that such runs can be resumed"
    assert datasets.sizes[0] == (len(open_splits(store, one_text, False).train.tokens) - 1) // 32


@pytest.mark.parametrize("document_mask", [False, True])
def test_less_than_one_sample_is_evaluated_as_a_padded_sample(one_text, document_mask):
    data = replace(one_text, document_mask=document_mask)
    datasets = opened(data, seq_len=512)
    (store,) = one_text_stores(data)
    held_out = open_splits(store, data, True).held_out.tokens
    samples = datasets.evaluation["held_out"]
    batch = samples[np.array([0, -1])]
    count = len(held_out) - 1
    assert len(samples) == 1 and 10 < count < 512
    assert batch.tokens[0, :count].tolist() == held_out[:-1].tolist()
    assert batch.labels[0, :count].tolist() == held_out[1:].tolist()
    assert (batch.labels[0, count:] == -100).all() and (batch.labels[1] == -100).all()


def test_packed_samples_of_one_file_are_divided_in_the_same_way(one_text):
    data = replace(one_text, packing="best-fit")
    datasets = opened(data)
    (store,) = one_text_stores(data)
    splits = open_splits(store, data, True)

    def tokens(samples) -> list[int]:
        """Return all tokens, each sample followed by its last label."""
        batch = samples[np.arange(len(samples))]
        return sorted(batch.labels[batch.labels != -100].tolist())

    assert tokens(datasets.training) == sorted(splits.train.tokens[1:].tolist())
    assert tokens(datasets.evaluation["held_out"]) == sorted(splits.held_out.tokens[1:].tolist())
    assert opened(data, evaluates=False).sizes > datasets.sizes, "another packing, under another name"


@pytest.mark.parametrize("packing", ["wrapped", "best-fit"])
@pytest.mark.parametrize(("number", "is_tail"), [(96, False), (12, True)])
def test_a_few_chats_give_an_evaluation_dataset_of_complete_chats(tmp_path, number, is_tail, packing):
    lines = [
        json.dumps(
            {"messages": [{"role": "user", "content": f"q {i + number}"}, {"role": "assistant", "content": f"a {i}"}]}
        )
        for i in range(number)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    data = DataConfig(
        dataset="chat",
        path=str(tmp_path / "chats.jsonl"),
        store_folder=str(tmp_path / "stores"),
        prepare_workers=1,
        held_out_fraction=0.05 if number == 96 else 0.005,
        packing=packing,
    )
    datasets = opened(data, seq_len=64)
    assert ("-last-" in datasets.name) == is_tail
    assert len(datasets.evaluation["held_out"]) >= 1
    (store,) = one_text_stores(data)
    splits = open_splits(store, data, True)
    documents = [
        DEFAULT.decode(s.tokens[a:b].tolist())
        for s in (splits.train, splits.held_out)
        for a, b in itertools.pairwise(s.documents[:].tolist())
    ]
    assert len(set(documents)) == len(documents) == number
