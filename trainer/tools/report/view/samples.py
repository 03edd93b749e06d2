"""Samples as the model sees them: documents, target tokens and special tokens, as text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

import numpy as np

from trainer.base.system.spelling import counted
from trainer.batch import IGNORE_INDEX, Batch
from trainer.data.sampling.samples import Samples
from trainer.data.tokenizer.protocol import Tokenizer


@dataclass(frozen=True)
class Piece:
    """The text of consecutive tokens of one kind."""

    text: str
    is_target: bool
    is_special: bool
    """Whether it is one special token. A text that only spells the name of one is not."""


@dataclass(frozen=True)
class DocumentView:
    """The part of a document in a sample. It includes the token after its last position if this token is a target."""

    title: str
    num_tokens: int
    num_targets: int
    pieces: tuple[Piece, ...]

    def heading(self) -> str:
        return f"{self.title}: {counted(self.num_tokens, 'token')}, {counted(self.num_targets, 'target')}"


@dataclass(frozen=True)
class SampleView:
    dataset: str
    index: int
    """Index in the dataset."""
    positions: int
    """seq_len."""
    padding: int
    """Number of positions that belong to no document."""
    documents: tuple[DocumentView, ...]

    @property
    def num_targets(self) -> int:
        return sum(document.num_targets for document in self.documents)

    def title(self) -> str:
        """Return one line with the counts of the sample."""
        targets, padding = (f"{100 * n / self.positions:.1f} %" for n in (self.num_targets, self.padding))
        return (
            f"{self.dataset}, sample {self.index}: {self.positions} positions, "
            f"{counted(self.num_targets, 'target')} ({targets}), {counted(len(self.documents), 'document')}, "
            f"{self.padding} of padding ({padding})"
        )


def view_samples(
    samples: Samples,
    index: Sequence[int],
    sizes: Sequence[int],
    names: Sequence[str],
    tokenizer: Tokenizer,
    pairs: bool,
) -> Iterator[SampleView]:
    """Yield the samples at some indices.

    Args:
        samples: Of all training datasets.
        index: Sample indices, which run through the first dataset, then the second, and so on.
        sizes: Number of samples of each dataset.
        names: Names of the datasets.
        tokenizer: The tokenizer of the datasets.
        pairs: Whether the documents are the two conversations of preference pairs.
    """
    starts = np.cumsum([0, *sizes])
    for i in index:
        dataset = int(np.searchsorted(starts, i, side="right")) - 1
        batch = samples[np.array([i])]
        documents, padding = _documents(batch, tokenizer, pairs)
        yield SampleView(names[dataset], int(i) - int(starts[dataset]), batch.tokens.shape[1], padding, documents)


def _documents(batch: Batch, tokenizer: Tokenizer, pairs: bool) -> tuple[tuple[DocumentView, ...], int]:
    """Return the documents in the only sample of a batch, and the number of positions outside of them."""
    tokens, labels, documents = (tensor[0].tolist() for tensor in (batch.tokens, batch.labels, batch.documents))
    spans = []
    start = 0
    for document, group in groupby(documents):
        stop = start + len(list(group))
        if document >= 0:
            spans.append((start, stop))
        start = stop
    views = []
    for number, (start, stop) in enumerate(spans):
        title = f"document {number + 1} of {len(spans)}"
        if pairs:
            title = f"pair {number // 2 + 1} of {len(spans) // 2}, {('chosen', 'rejected')[number % 2]}"
        views.append(_document(title, tokens[start:stop], labels[start:stop], tokenizer))
    return tuple(views), documents.count(-1)


def _document(title: str, tokens: list[int], labels: list[int], tokenizer: Tokenizer) -> DocumentView:
    """The label of a position is the token after it, so the first token of a document is never a target."""
    is_target = [label != IGNORE_INDEX for label in labels]
    shown, targets = (
        (tokens + labels[-1:], [False, *is_target]) if is_target[-1] else (tokens, [False, *is_target[:-1]])
    )
    return DocumentView(title, len(shown), sum(is_target), tuple(pieces_of(shown, targets, tokenizer)))


def pieces_of(tokens: Sequence[int], targets: Sequence[bool], tokenizer: Tokenizer) -> Iterator[Piece]:
    """Yield the text of tokens in pieces. targets: whether each token is a target, shape (tokens,)."""
    names = {token: name for name, token in tokenizer.special_tokens.items()}
    kinds = [
        (target, i if token in names else -1) for i, (token, target) in enumerate(zip(tokens, targets, strict=True))
    ]
    start = text_start = 0
    for (target, special), group in groupby(kinds):
        stop = start + len(list(group))
        if special >= 0:
            yield Piece(names[tokens[start]], target, is_special=True)
            text_start = stop
        else:
            text = _text_after(tokens[text_start:start], tokens[start:stop], tokenizer)
            yield Piece(text or "".join(f"<token {token}>" for token in tokens[start:stop]), target, not text)
        start = stop


def _text_after(before: Sequence[int], tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text that tokens add to those before them. Decoded alone, some tokenizers would drop a space at their start."""
    previous, complete = tokenizer.decode(before) if before else "", tokenizer.decode([*before, *tokens])
    # A character of several tokens may begin before them; then it belongs to these tokens.
    common = takewhile(lambda pair: pair[0] == pair[1], zip(previous, complete, strict=False))
    return complete[sum(1 for _ in common) :]
