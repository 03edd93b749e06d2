"""The training data of a run: the datasets, the sample order, and this rank's part of each batch."""

import math
from collections.abc import Generator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from trainer.base.config import Config, ConfigError, TrainingConfig
from trainer.base.system.spelling import counted
from trainer.batch import IGNORE_INDEX, Batch
from trainer.data.build import Datasets, open_datasets, with_earlier_names
from trainer.data.datasets import prepare_datasets
from trainer.data.sampling.loader import BatchPartition, SampleOrder, training_batches
from trainer.data.sampling.mixture import require_unchanged_phases
from trainer.data.sampling.phases import MixturePhase
from trainer.data.sampling.samples import Samples
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.runtime.distributed import once_per_node, require_agreement
from trainer.state import TrainState

_COUNTED_SAMPLES, _COUNTED_TOKENS = 256, 2**20
"""Maximum numbers of samples and of tokens in which targets are counted at the start."""


def prepare_and_open(config: Config, tokenizer: Tokenizer, saved: TrainState | None) -> Datasets:
    """Prepare the missing datasets, once per node, and open all datasets.

    Args:
        config: Settings of the run.
        tokenizer: Its tokenizer.
        saved: Progress of the run that is resumed. It names the data of this run.

    Raises:
        ConfigError: A dataset cannot be prepared or is smaller than one sample.
    """
    data, evaluation, seq_len = config.data, config.evaluation.datasets, config.training.seq_len
    pairs, evaluates = config.preference.enabled, config.evaluation.interval_steps > 0
    stores = once_per_node(
        lambda: prepare_datasets(data, evaluation, config.tokenizer, tokenizer, seq_len, pairs, evaluates)
    )
    datasets = open_datasets(data, evaluation, stores, seq_len, evaluates)
    if saved is not None:
        names = f"{saved.fingerprint.get('data')} {saved.best}"
        datasets = with_earlier_names(datasets, names, Path(data.store_folder))
    require_agreement({"data": datasets.name, "evaluation.datasets": datasets.evaluation_names})
    return datasets


def with_steps(config: Config, datasets: Datasets, saved: TrainState | None) -> Config:
    """Return the configuration with training.steps instead of training.epochs. saved: progress of the run that is resumed, which
    may have had another batch size."""
    training, done = config.training, saved or TrainState()
    if training.epochs is None:
        return config
    # From its text: 1.1 as a binary fraction is larger than 1.1.
    samples = math.ceil(Fraction(str(training.epochs)) * len(datasets.training))
    steps = done.step + training.steps_to_consume(samples - done.cursor, done.step)
    if (last := training.batch_sizes[-1][0]) >= steps:
        end = f"{counted(steps, 'step')}, with [training] epochs = {training.epochs:g}"
        message = f"no step would have this size, because the run ends after {end}"
        raise ConfigError(f"training.batch_schedule.{last}", message)
    return replace(config, training=replace(training, steps=steps, epochs=None))


def epochs_of(config: Config, datasets: Datasets, state: TrainState) -> tuple[float, dict[str, float]]:
    """Return the number of epochs that the run has made when it ends: of all training data, and of each dataset that has
    samples. state: progress of the run, whose earlier steps may have had another batch size."""
    training, order = config.training, sample_order(config, datasets, state)
    cursor = state.cursor + training.samples_between(state.step, training.steps)
    counts = order.consumed(cursor).tolist()
    each = zip(datasets.phases[0].names, counts, datasets.sizes, strict=True)
    return cursor / len(datasets.training), {name: count / size for name, count, size in each if size}


def phase_steps(training: TrainingConfig, order: SampleOrder, state: TrainState) -> list[tuple[int, MixturePhase]]:
    """Return the phases of the mixture that have not started, each with its first step. state: progress of the run."""
    later = [(start, phase) for start, phase in order.phase_starts() if start >= max(1, state.cursor)]
    return [
        (state.step + training.steps_to_consume(start + 1 - state.cursor, state.step), phase) for start, phase in later
    ]


def target_share(samples: Samples) -> float:
    """Return the share of positions with a target, in samples that are spread evenly over the dataset."""
    size = samples[np.zeros(1, np.int64)].labels.shape[1]
    count = min(len(samples), max(1, min(_COUNTED_SAMPLES, _COUNTED_TOKENS // size)))
    labels = samples[np.linspace(0, len(samples) - 1, count).astype(np.int64)].labels
    return (labels != IGNORE_INDEX).float().mean().item()


def partition_of_batch(training: TrainingConfig, batch_axis: DeviceMesh) -> BatchPartition:
    """batch_axis: batch axis of the data mesh."""
    return BatchPartition(
        local_batch_size=training.local_batch_size,
        rank=batch_axis.get_local_rank(),
        ranks=batch_axis.size(),
    )


def sample_order(config: Config, datasets: Datasets, state: TrainState) -> SampleOrder:
    skipped = tuple(state.skipped_samples)
    return SampleOrder(datasets.sizes, datasets.phases, config.run.seed, config.data.shuffle, skipped)


def require_unchanged_mixture(config: Config, datasets: Datasets, saved: TrainState) -> None:
    """Raise ConfigError if the mixture has changed in a phase that had already started when the checkpoint was saved."""
    started = int(sample_order(config, datasets, saved).global_index(np.array([saved.cursor]))[0])
    require_unchanged_phases(saved.mixture, datasets.phases, started)


class TrainingData:
    def __init__(self, config: Config, datasets: Datasets, partition: BatchPartition, device: torch.device):
        self.datasets = datasets
        self.config = config
        self.partition = partition
        self.device = device

    def order(self, state: TrainState) -> SampleOrder:
        return sample_order(self.config, self.datasets, state)

    def batches(self, state: TrainState) -> Generator[Batch]:
        """Yield this rank's microbatches on the device endlessly, starting at the state's cursor. Raise LoadingFailed."""
        pin_memory = self.device.type != "cpu"
        order, config = self.order(state), self.config.data
        for batch in training_batches(self.datasets.training, order, self.partition, state.cursor, config, pin_memory):
            yield batch.to(self.device)

    def phases_in(self, state: TrainState, num_samples: int) -> list[MixturePhase]:
        """Return the phases of a mixture of several datasets that started in the last step, which had num_samples samples."""
        if len(self.datasets.sizes) == 1:
            return []
        starts = self.order(state).phase_starts()
        return [phase for start, phase in starts if state.cursor - num_samples <= start < state.cursor]

    def sample_range(self, state: TrainState, start: int, stop: int) -> tuple[int, int]:
        """Return the half-open range in the sample order that contains the samples at cursor positions [start, stop)."""
        first, last = self.order(state).global_index(np.array([start, stop - 1])).tolist()
        return first, last + 1
