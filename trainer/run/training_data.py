"""The training data of a run: the datasets, the sample order, and this rank's part of each batch."""

from collections.abc import Iterator

import numpy as np
import torch

from trainer.batch import Batch
from trainer.config import DataConfig, TokenizerConfig
from trainer.data.build import open_datasets
from trainer.data.datasets import prepare_datasets
from trainer.data.sampling.loader import BatchPartition, SampleOrder, training_batches
from trainer.data.sampling.mixture import require_unchanged_phases
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.runtime.distributed import once_per_node, require_agreement
from trainer.state import TrainState


class TrainingData:
    def __init__(
        self,
        config: DataConfig,
        evaluation: dict[str, str],
        tokenizer_config: TokenizerConfig,
        tokenizer: Tokenizer,
        partition: BatchPartition,
        device: torch.device,
        *,
        seq_len: int,
        seed: int,
    ):
        """Prepare, once per node, the datasets that do not exist yet, and open all. evaluation: evaluation-only datasets.

        Raises ConfigError if a dataset cannot be prepared or is smaller than one sample."""
        stores = once_per_node(lambda: prepare_datasets(config, evaluation, tokenizer_config, tokenizer, seq_len))
        self.datasets = open_datasets(config, evaluation, stores, seq_len)
        require_agreement({"data": self.datasets.name, "evaluation.datasets": self.datasets.evaluation_names})
        self.config = config
        self.partition = partition
        self.device = device
        self.seed = seed

    @property
    def description(self) -> str:
        return f"{self.datasets.name}: {len(self.datasets.training)}"

    @property
    def mixture(self) -> list[list[int]]:
        """Start and quotas of each phase of the mixture, as TrainState saves them."""
        return [[phase.start, *phase.quotas] for phase in self.datasets.phases]

    def order(self, state: TrainState) -> SampleOrder:
        return SampleOrder(
            self.datasets.sizes, self.datasets.phases, self.seed, self.config.shuffle, tuple(state.skipped_samples)
        )

    def batches(self, state: TrainState) -> Iterator[Batch]:
        """Return an endless iterator of this rank's microbatches on the device, starting at the state's cursor."""
        pin_memory = self.device.type != "cpu"
        for batch in training_batches(
            self.datasets.training, self.order(state), self.partition, state.cursor, self.config, pin_memory
        ):
            yield self.to_device(batch)

    def to_device(self, batch: Batch) -> Batch:
        return batch.apply(lambda t: t.to(self.device, non_blocking=True))

    def sample_range(self, state: TrainState, start: int, stop: int) -> tuple[int, int]:
        """Return the half-open range of the sample order that the cursor positions [start, stop) cover."""
        first, last = self.order(state).global_index(np.array([start, stop - 1])).tolist()
        return first, last + 1

    def require_unchanged_mixture(self, saved: TrainState) -> None:
        """Raise ConfigError if a phase of the mixture that had started when the checkpoint was saved has changed."""
        started = int(self.order(saved).global_index(np.array([saved.cursor]))[0])
        require_unchanged_phases(saved.mixture, self.datasets.phases, started)
