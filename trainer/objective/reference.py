"""Log-probabilities of preference answers under the reference model, which is the model that the run starts from.

They are computed once, before the first step, and stored in parts of consecutive samples, each as one JSON file. A run that was
stopped continues after the last part. Other runs with the same model and data read the files.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.base.config import ConfigError
from trainer.base.system import console
from trainer.base.system.files import atomic_write, digest, read_json_object
from trainer.base.system.process import local_rank
from trainer.batch import Batch
from trainer.data.sampling.loader import BatchPartition, evaluation_batches
from trainer.data.sampling.mixture import CombinedSamples
from trainer.data.sampling.samples import Samples
from trainer.objective.document_scores import DocumentScores
from trainer.objective.objective import Readout
from trainer.runtime.distributed import all_gather_objects, first_problem

_PART_SAMPLES = 1024
"""Minimum number of samples of a part, except the last one."""


@dataclass(frozen=True)
class ReferencedSamples:
    """Samples with the log-probabilities of their answers under the reference model."""

    samples: Samples
    offsets: np.ndarray
    """Index of each sample's first answer, (samples + 1,)."""
    values: np.ndarray
    """Log-probability of each answer, (answers,), fp32."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, samples: np.ndarray) -> Batch:
        batch = self.samples[samples]
        reference = np.zeros(batch.tokens.shape, np.float32)
        for row, sample in enumerate(np.maximum(samples, 0)):
            values = self.values[self.offsets[sample] : self.offsets[sample + 1]]
            starts = np.flatnonzero(np.diff(batch.documents[row].numpy(), prepend=-1))  # of answers, then of padding
            reference[row, starts[: len(values)]] = values
        return batch._replace(reference=torch.from_numpy(reference))


@dataclass(kw_only=True)
class ReferenceStore:
    """The stored values of the first samples of a dataset or of a mixture of datasets."""

    folder: Path
    """Folder of this store's parts."""
    samples: Samples
    num_samples: int
    """Number of samples that need values."""
    offsets: np.ndarray
    """Index of each sample's first answer, (samples + 1,)."""
    values: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    """The values of the first samples, (answers,), fp32."""
    num_done: int = 0
    """Number of samples that have values on all ranks."""

    @classmethod
    def open(cls, folder: Path, model: str, samples: Samples, num_samples: int) -> "ReferenceStore":
        """Read the existing parts, collectively.

        Args:
            folder: Contains the stores of all models and datasets.
            model: Hash of the reference model.
            samples: Samples of a dataset or of a mixture of datasets.
            num_samples: Number of samples that need values.
        """
        packings = samples.datasets if isinstance(samples, CombinedSamples) else [samples]
        counts = np.concatenate([np.diff(packed.index.samples[:]) for packed in packings])[:num_samples]
        key = json.dumps([model, *(packed.index.name for packed in packings)])
        offsets = np.concatenate([[0], np.cumsum(counts)])
        own = folder / digest(key.encode())[:16]
        store = cls(folder=own, samples=samples, num_samples=num_samples, offsets=offsets)
        store.values = store._read()
        store.num_done = min(all_gather_objects(int(np.searchsorted(offsets, len(store.values)))))
        return store

    @property
    def is_complete(self) -> bool:
        return self.num_done == self.num_samples

    def _read(self) -> np.ndarray:
        """Return the values of the first samples. A damaged part and all parts after it are ignored."""
        parts, first = [np.empty(0, np.float32)], 0
        while first < self.num_samples and (path := self._part(first)).exists():
            try:
                part = read_json_object(path)
                values, stop = np.array(part["values"], np.float32), int(part["stop"])
                if part["digest"] != digest(values.tobytes()) or stop <= first:
                    raise ValueError
            except (OSError, ValueError, KeyError, TypeError):
                console.warning(f"ignoring {path}, which is damaged")
                break
            parts.append(values)
            first = stop
        return np.concatenate(parts)[: self.offsets[-1]]

    def _part(self, first: int) -> Path:
        return self.folder / f"{first:010}.json"

    def complete(
        self,
        read: Callable[[Sequence[Batch], Readout], Tensor],
        partition: BatchPartition,
        device: torch.device,
        chunk_tokens: int,
        compiled: bool,
    ) -> ReferencedSamples:
        """Compute the missing values with the current model, collectively. Return the samples with their values.

        Args:
            read: Runs the model forward and returns the sum of a readout over all ranks (Step.read).
            partition: Which rank reads which samples.
            device: Device of the batches.
            chunk_tokens: See CrossEntropyHead.
            compiled: See CrossEntropyHead.

        Raises:
            ConfigError: The values cannot be written.
        """
        size = partition.ranks * partition.local_batch_size
        most = int(np.diff(self.offsets).max())
        readout = DocumentScores(
            num_documents=most,
            partition=partition,
            chunk_tokens=chunk_tokens,
            compiled=compiled,
        )
        while not self.is_complete:
            first = self.num_done
            stop = min(first + -(-_PART_SAMPLES // size) * size, self.num_samples)
            tables = []
            for batch in evaluation_batches(self.samples, stop, partition, first):
                tables.append(readout.scores(read([batch.to(device)], readout)).log_probs.numpy())
            counts = np.diff(self.offsets[first : stop + 1])
            values = np.concatenate(tables)[: stop - first][np.arange(most) < counts[:, None]]
            self.values = np.concatenate((self.values[: self.offsets[first]], values))
            if problem := first_problem(self._write(first, stop, values) if local_rank() == 0 else ""):
                raise ConfigError("data.store_folder", problem)
            self.num_done = stop
            console.info(f"reference log-probabilities: {stop} of {self.num_samples} samples in {self.folder}")
        return ReferencedSamples(self.samples, self.offsets, self.values)

    def _write(self, first: int, stop: int, values: np.ndarray) -> str:
        """Write the part of samples [first, stop). Return the problem, or "" after success."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part = {"stop": stop, "values": values.tolist(), "digest": digest(values.tobytes())}
            atomic_write(self._part(first), json.dumps(part))
        except OSError as error:
            return f"{self.folder} cannot be written ({error.strerror})"
        return ""
