"""Objectives of a user: an incomplete one is refused where it is constructed."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.training_runs import combine, in_folder
from trainer.base.config.load import load_config
from trainer.build import build_trainer
from trainer.objective.cross_entropy import CrossEntropy
from trainer.objective.objective import by_name, require_complete
from trainer.run.resolve import resolve
from trainer.tools.testing.ranks import RankError


class Accuracy(CrossEntropy):
    """Cross-entropy with a metric, whose author forgot the shape."""

    metrics = ("accuracy",)
    shape = ()


def test_a_metric_without_its_value_in_the_shape_is_refused():
    message = r"the objective Accuracy: shape is \(\), expected \(2,\): the loss and 1 metrics"
    with pytest.raises(TypeError, match=message):
        require_complete(Accuracy(chunk_tokens=8, compiled=False))


def test_missing_attributes_are_named():
    with pytest.raises(TypeError, match="the objective SimpleNamespace lacks metrics, shape, count; see Objective in"):
        require_complete(SimpleNamespace(unit="num_targets", head=None))


def test_a_head_that_returns_too_few_values_is_named():
    objective = Accuracy(chunk_tokens=8, compiled=False)
    with pytest.raises(TypeError, match="Accuracy: its head returned 1 value, expected 2: the sums of loss, accuracy"):
        by_name(objective, torch.ones(1))
    assert by_name(objective, torch.tensor([1.0, 2.0])) == {"loss": 1.0, "accuracy": 2.0}


def build_with_objective(argv):
    config = load_config(combine(argv))
    objective = Accuracy(config.training.loss_chunk_tokens, compiled=False)
    build_trainer(config, resolve(config, dist.get_world_size()), torch.device("cpu"), None, objective)


def test_a_z_loss_has_no_effect_on_an_objective_of_ones_own(ranks, tiny, tmp_path):
    argv = [*tiny, *in_folder(tmp_path / "run"), "--training.z_loss", "0.1"]
    with pytest.raises(RankError, match=r"training.z_loss: is incompatible with an objective of your own"):
        ranks(1).run(build_with_objective, argv)


def test_a_trainer_is_not_built_with_an_incomplete_objective(ranks, tiny, tmp_path):
    with pytest.raises(RankError, match="the objective Accuracy: shape is"):
        ranks(1).run(build_with_objective, [*tiny, *in_folder(tmp_path / "run")])
