"""The table of the datasets of a run: documents, tokens, targets, what was refused, samples and steps of the first epoch."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from trainer.base.config import DataConfig, TrainingConfig
from trainer.base.system.spelling import counted
from trainer.data.datasets import SINGLE, all_dataset_configs, packing_folder
from trainer.data.prepare.prepare import bad_documents
from trainer.data.sampling.packing import read_counts
from trainer.data.sampling.phases import MixturePhase, samples_of_epoch
from trainer.data.store.held_out import open_splits
from trainer.data.store.store import TokenStore, read_description

_CHUNK = 2**22
"""Number of values that are read from a store at a time."""
_REASONS = 5
"""Maximum number of reasons for refusals that are listed for a dataset."""


def dataset_table(
    data: DataConfig,
    sets: Mapping[str, str],
    stores: Mapping[str, Path],
    training: TrainingConfig,
    phases: Sequence[MixturePhase],
    evaluates: bool,
) -> list[list[str]]:
    """Return the rows of the table: the titles, then one for each split of each dataset. Values without meaning are empty.

    Args:
        data: The training datasets.
        sets: evaluation.datasets.
        stores: Name of each dataset, as all_dataset_configs yields it, -> its store.
        training: Length of the samples, and number of samples of each step.
        phases: Phases of the mixture of datasets. Empty: the samples do not exist yet.
        evaluates: Whether the run evaluates. See open_splits.
    """
    cut = "truncated" if data.long_documents == "truncate" else "dropped"
    titles = ["", "documents", "tokens", "targets", "longest", "refused", cut, "no target", "samples", "padding"]
    rows = [[*titles, "first epoch (steps)"]]
    for name, _, config in all_dataset_configs(data, sets):
        kind, _, dataset = name.partition("/")
        prefix = "" if dataset == SINGLE else f"{dataset}: "
        splits = open_splits(stores[name], config, evaluates)
        for split, tokens in splits.items():
            is_trained = kind == "train" and split == "train"
            label = "training" if is_trained else "held out" if kind == "train" else "evaluation"
            refused = f"{read_description(stores[name])['bad_documents']:,}" if split == "train" else ""
            cells, steps = ["", "", "", ""], ""
            if phases:
                cells, samples = _of_samples(stores[name], split + splits.suffix, config, training.seq_len, tokens)
                if is_trained and (consumed := samples_of_epoch(phases, dataset, samples)):
                    steps = f"{_steps(training, consumed):,.1f}"
            rows.append([prefix + label, *_of_store(tokens), refused, *cells, steps])
    return rows


def _steps(training: TrainingConfig, samples: float) -> float:
    """Return the number of steps of a run that have this number of samples."""
    steps = training.steps_to_consume(math.ceil(samples), 0)
    return steps - (training.samples_between(0, steps) - samples) / training.batch_size(steps)


def _of_store(store: TokenStore) -> list[str]:
    """Return the numbers of documents and tokens, the share of targets, and the number of tokens of the longest document."""
    tokens, num_documents = len(store.tokens), len(store.documents) - 1
    targets, longest = tokens, 0
    if store.targets is not None:
        starts = range(0, tokens, _CHUNK)
        targets = sum(int(np.count_nonzero(store.targets[i : i + _CHUNK] == 1)) for i in starts)
    for i in range(0, num_documents, _CHUNK):
        longest = max(longest, int(np.diff(store.documents[i : i + _CHUNK + 1]).max()))
    share = f"{100 * targets / tokens:.1f} %" if tokens else ""
    return [f"{num_documents:,}", f"{tokens:,}", share, f"{longest:,}"]


def _of_samples(folder: Path, split: str, data: DataConfig, seq_len: int, store: TokenStore) -> tuple[list[str], int]:
    """Return the cells about the samples of a split, and the number of samples. The cells: number of documents (pairs) that
    data.long_documents has truncated or dropped, number of spans without a target token, which belong to no sample, number of
    samples, share of their positions that belong to no document."""
    if data.packing == "wrapped":
        samples = max(0, len(store.tokens) - 1) // seq_len
        return ["", "", f"{samples:,}", "0.0 %"], samples
    counts = read_counts(packing_folder(folder, split, data, seq_len))
    positions = counts["samples"] * seq_len
    padding = f"{100 * (1 - counts['positions'] / positions):.1f} %" if positions else ""
    numbers = (counts[name] for name in ("truncated_or_dropped", "without_target", "samples"))
    return [*(f"{number:,}" for number in numbers), padding], counts["samples"]


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
