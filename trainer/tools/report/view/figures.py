"""The table of the datasets of a run: documents, tokens, targets, what was refused, samples and steps per epoch."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.config import DataConfig, TrainingConfig
from trainer.base.system.spelling import counted
from trainer.data.datasets import SINGLE, all_dataset_configs, packing_folder
from trainer.data.prepare.prepare import bad_documents
from trainer.data.sampling.packing import read_counts
from trainer.data.sampling.phases import PERIOD, MixturePhase
from trainer.data.store.held_out import open_splits
from trainer.data.store.store import TokenStore, read_description

_CHUNK = 2**22
"""Number of values that are read from a store at a time."""
_REASONS = 5
"""Maximum number of reasons for refusals that are listed for a dataset."""


@dataclass(frozen=True, kw_only=True)
class SplitFigures:
    """Figures of one split of a dataset. A value that has no meaning for it is None."""

    name: str
    documents: int
    tokens: int
    targets: int
    longest: int
    """Number of tokens of the longest document."""
    refused: int | None
    """Number of documents of the dataset that could not be read or encoded."""
    cut: int | None = None
    """Number of documents (pairs) that data.long_documents has truncated or dropped."""
    without_target: int | None = None
    """Number of spans that belong to no sample, because they have no target token."""
    samples: int | None = None
    padding: float | None = None
    """Share of the samples' positions that belong to no document."""
    steps_per_epoch: float | None = None


def split_figures(
    data: DataConfig,
    sets: Mapping[str, str],
    stores: Mapping[str, Path],
    training: TrainingConfig,
    phases: Sequence[MixturePhase],
    evaluates: bool,
) -> list[SplitFigures]:
    """Return the figures of each split of each dataset.

    Args:
        data: The training datasets.
        sets: evaluation.datasets.
        stores: Name of each dataset, as all_dataset_configs yields it, -> its store.
        training: Length of the samples, and number of samples per step.
        phases: Phases of the mixture of datasets. Steps per epoch are those of the first, with the first batch size. Empty: the
            samples do not exist yet.
        evaluates: Whether the run evaluates. See open_splits.
    """
    found = []
    for name, _, config in all_dataset_configs(data, sets):
        kind, _, dataset = name.partition("/")
        prefix = "" if dataset == SINGLE else f"{dataset}: "
        quota = dict(zip(phases[0].names, phases[0].quotas, strict=True)).get(dataset, 0) if phases else 0
        splits = open_splits(stores[name], config, evaluates)
        for split, tokens in splits.items():
            is_trained = kind == "train" and split == "train"
            label = "training" if is_trained else "held out" if kind == "train" else "evaluation"
            values = _of_store(tokens)
            if phases:
                values |= _of_samples(stores[name], split + splits.suffix, config, training.seq_len, values["tokens"])
            if quota and is_trained and not training.batch_schedule:
                values["steps_per_epoch"] = values["samples"] * PERIOD / quota / training.global_batch_size
            refused = read_description(stores[name])["bad_documents"] if split == "train" else None
            found.append(SplitFigures(name=prefix + label, refused=refused, **values))
    return found


def _of_store(store: TokenStore) -> dict[str, Any]:
    tokens, num_documents = len(store.tokens), len(store.documents) - 1
    targets, longest = tokens, 0
    if store.targets is not None:
        starts = range(0, tokens, _CHUNK)
        targets = sum(int(np.count_nonzero(store.targets[i : i + _CHUNK] == 1)) for i in starts)
    for i in range(0, num_documents, _CHUNK):
        longest = max(longest, int(np.diff(store.documents[i : i + _CHUNK + 1]).max()))
    return {"documents": num_documents, "tokens": tokens, "targets": targets, "longest": longest}


def _of_samples(store: Path, split: str, data: DataConfig, seq_len: int, tokens: int) -> dict[str, Any]:
    if data.packing == "wrapped":
        return {"samples": max(0, tokens - 1) // seq_len, "padding": 0.0}
    counts = read_counts(packing_folder(store, split, data, seq_len))
    positions = counts["samples"] * seq_len
    padding = 1 - counts["positions"] / positions if positions else None
    cut = {"cut": counts["truncated_or_dropped"], "without_target": counts["without_target"]}
    return {"samples": counts["samples"], "padding": padding, **cut}


def as_table(figures: Sequence[SplitFigures], data: DataConfig) -> list[list[str]]:
    """Return the rows of the table, of which the first has the titles."""
    cut = "truncated" if data.long_documents == "truncate" else "dropped"
    titles = ["", "documents", "tokens", "targets", "longest", "refused", cut, "no target", "samples", "padding"]
    rows = [[*titles, "steps per epoch"]]
    for f in figures:
        share = f"{100 * f.targets / f.tokens:.1f} %" if f.tokens else ""
        counts = (f.refused, f.cut, f.without_target, f.samples)
        padding = "" if f.padding is None else f"{100 * f.padding:.1f} %"
        steps = "" if f.steps_per_epoch is None else f"{f.steps_per_epoch:,.1f}"
        numbers = ["" if n is None else f"{n:,}" for n in counts]
        rows.append([f.name, f"{f.documents:,}", f"{f.tokens:,}", share, f"{f.longest:,}", *numbers, padding, steps])
    return rows


def refusals(data: DataConfig, sets: Mapping[str, str], stores: Mapping[str, Path]) -> Iterator[str]:
    """Yield a line for each of the most frequent reasons why documents were refused. Reasons that differ only in numbers are
    counted together; the first is shown."""
    for name, _, _ in all_dataset_configs(data, sets):
        counts: Counter[str] = Counter()
        first: dict[str, str] = {}
        for document in bad_documents(stores[name]):
            reason = re.sub("[0-9]+", "0", document.reason)
            counts[reason] += 1
            first.setdefault(reason, str(document))
        dataset = name.partition("/")[2]
        place = "" if dataset == SINGLE else f" in {dataset}"
        for reason, count in counts.most_common(_REASONS):
            yield f"refused{place}: {f'{count:,} documents like ' if count > 1 else ''}{first[reason]}"
        if others := sum(counts.values()) - sum(n for _, n in counts.most_common(_REASONS)):
            rest = counted(others, "document", ",")
            yield f"refused{place}: {rest} for other reasons, listed in {stores[name]}/bad_documents.jsonl"
