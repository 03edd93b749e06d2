"""The length of a run in epochs, and the share of targets."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainer.base.config import Config, ConfigError, TrainingConfig
from trainer.batch import IGNORE_INDEX, Batch
from trainer.data.sampling.phases import PERIOD, MixturePhase
from trainer.run.training_data import epochs_of, target_share, with_steps
from trainer.state import TrainState


class HalfTargets:
    """Samples whose first half consists of targets."""

    def __init__(self, count, seq_len):
        self.count, self.seq_len = count, seq_len

    def __len__(self):
        return self.count

    def __getitem__(self, samples: np.ndarray) -> Batch:
        labels = torch.full((len(samples), self.seq_len), IGNORE_INDEX)
        labels[:, : self.seq_len // 2] = 1
        return Batch(labels, labels, labels, labels, torch.from_numpy(samples))


def steps_of(epochs, count, batch, saved=None, schedule=None):
    config = Config(training=TrainingConfig(epochs=epochs, global_batch_size=batch, batch_schedule=schedule or {}))
    datasets = SimpleNamespace(training=HalfTargets(count, 4))
    resolved = with_steps(config, datasets, saved)
    assert resolved.training.epochs is None
    return resolved.training.steps


@pytest.mark.parametrize(
    ("epochs", "count", "batch", "steps"),
    [(3, 100, 10, 30), (3, 100, 16, 19), (1.1, 1000, 10, 110), (0.001, 100, 10, 1), (0.5, 3, 1, 2), (1, 3, 8, 1)],
)
def test_the_last_step_completes_the_last_epoch(epochs, count, batch, steps):
    assert steps_of(epochs, count, batch) == steps


def test_a_resumed_run_with_another_batch_size_still_ends_with_its_last_epoch():
    saved = TrainState(step=5, cursor=50)
    assert steps_of(2, 100, 10, saved) == 20
    assert steps_of(2, 100, 50, saved) == 5 + 3
    assert steps_of(0.25, 100, 10, saved) == 5  # nothing is left


def test_the_epochs_of_a_run_whose_batch_size_changes():
    schedule = {"22": 40, "9": 20}  # any order
    assert steps_of(4, 100, 10, schedule=schedule) == 9 + 13 + -(-(400 - 90 - 260) // 40)
    assert steps_of(7, 100, 10, schedule=schedule) == 9 + 13 + -(-(700 - 90 - 260) // 40)
    assert steps_of(4, 100, 10, TrainState(step=9, cursor=90), schedule) == 24
    assert steps_of(4, 100, 10, TrainState(step=20, cursor=290), schedule) == 22 + -(-(400 - 290 - 40) // 40)
    with pytest.raises(ConfigError) as error:
        steps_of(2, 100, 10, schedule=schedule)
    assert (error.value.key, error.value.message) == (
        "training.batch_schedule.22",
        "no step would have this size, because the run ends after 15 steps, with [training] epochs = 2",
    )
    training = TrainingConfig(steps=12, global_batch_size=10, batch_schedule=schedule)
    datasets = SimpleNamespace(training=HalfTargets(100, 4), sizes=(100,), phases=(MixturePhase(0, ("a",), (PERIOD,)),))
    assert epochs_of(Config(training=training), datasets, TrainState()) == (1.5, {"a": 1.5})


def test_the_epochs_of_a_resumed_run_count_what_it_has_consumed():
    phases = MixturePhase(0, ("a", "b"), (7500, 2500)), MixturePhase(100, ("a", "b"), (0, PERIOD))
    datasets = SimpleNamespace(training=HalfTargets(150, 4), sizes=(50, 100), phases=phases)
    config = Config(training=TrainingConfig(steps=8, global_batch_size=50))
    assert epochs_of(config, datasets, TrainState(step=5, cursor=50)) == (200 / 150, {"a": 75 / 50, "b": 125 / 100})
    skipped = TrainState(step=5, cursor=50, skipped_samples=[(8, 16), (500, 508)])  # the second is beyond the end
    assert epochs_of(config, datasets, skipped)[1] == {"a": 69 / 50, "b": 131 / 100}


@pytest.mark.parametrize("count", [1, 7, 5000])
def test_the_share_of_targets_is_counted_in_spread_samples(count):
    assert target_share(HalfTargets(count, 64)) == 0.5
