"""Corrections of routers: buffers that the load of a step changes."""

import pytest
import torch
from torch import nn

from models import MODELS
from models.moe import CorrectedRouter
from models.spec import saved_buffers
from tests.training_runs import checkpoint_of, combine, in_folder, read_tensor, train
from trainer.base.config import ExpertsConfig
from trainer.checkpoint.tensor_files import read_index
from trainer.parallel.balance import ExpertLoad

SPEC = MODELS["deepseek-v3"]
SIZES = SPEC.by_size["debug"]
MODEL = ["--model.name", "deepseek-v3", "--experts.bias_rate", "0.001"]


def load_of(model, **config):
    return ExpertLoad([model.layers], SIZES, ExpertsConfig(**config), torch.device("cpu"))


def corrections_of(model):
    return torch.stack(list(saved_buffers(model).values()))


def test_a_step_corrects_the_experts_by_the_sign_of_their_distance_from_the_mean_load():
    model = SPEC.model(SIZES)
    load = load_of(model, bias_rate=0.5)
    load.counts = torch.tensor([[4, 4, 4, 4, 4, 4, 4, 4], [9, 1, 4, 4, 4, 4, 4, 2], [1, 0, 0, 0, 0, 0, 0, 0]]).double()
    load.correct(skip=torch.tensor(False))
    expected = [[0.0] * 8, [-0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5], [-0.5] + [0.5] * 7]
    assert corrections_of(model).tolist() == expected
    load.correct(skip=torch.tensor(True))
    assert corrections_of(model).tolist() == expected


def test_the_sign_is_exact_although_rounded_counts_would_be_equal():
    model = SPEC.model(SIZES)
    load = load_of(model, bias_rate=1.0)
    load.counts = torch.full((3, 8), 2**40).double()
    load.counts[:, 0] += 1
    load.correct(skip=torch.tensor(False))
    assert corrections_of(model).tolist() == [[-1.0] + [1.0] * 7] * 3


def test_centered_changes_keep_the_mean_of_the_correction():
    model = SPEC.model(SIZES)
    load = load_of(model, bias_rate=0.5, center_bias=True)
    load.counts = torch.tensor([[1, 0, 0, 0, 0, 0, 0, 0]] * 3).double()
    load.correct(skip=torch.tensor(False))
    assert corrections_of(model).tolist() == [[-0.875] + [0.125] * 7] * 3


def test_the_correction_decides_on_the_experts_but_not_on_their_weights():
    router, x = CorrectedRouter(SIZES), torch.randn(2, 5, SIZES.dim, generator=torch.Generator().manual_seed(0))
    nn.init.normal_(router.weight, std=0.05, generator=torch.Generator().manual_seed(1))
    router.correction[[1, 6]] = 100.0
    routing = router(x)
    assert (routing.experts.sort(-1).values == torch.tensor([1, 6])).all()
    scores = routing.logits.sigmoid()
    chosen = scores.gather(-1, routing.experts)
    torch.testing.assert_close(routing.weights, 2.5 * chosen / chosen.sum(-1, keepdim=True))
    torch.testing.assert_close(routing.scores.sum(-1), torch.ones(2, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_conversion_of_the_model_does_not_round_the_correction(dtype):
    model = SPEC.model(SIZES)
    correction = torch.linspace(-1, 1, 8) / 3
    model.layers["1"].feed_forward.router.correction.copy_(correction)
    router = model.to(dtype).layers["1"].feed_forward.router
    assert router.weight.dtype == dtype and torch.equal(router.correction, correction)


def test_a_buffer_that_no_module_declares_is_an_error():
    model = nn.Sequential(nn.BatchNorm1d(3))
    with pytest.raises(TypeError, match="running_mean: BatchNorm1d must declare this buffer in BUFFERS"):
        saved_buffers(model)


def corrections_in(folder):
    checkpoint = checkpoint_of(folder)
    index = {name: stored for name, stored in read_index(checkpoint).items() if name.endswith("router.correction")}
    return {name: read_tensor(checkpoint, name, stored) for name, stored in index.items()}


def test_corrections_are_equal_in_every_layout_and_after_a_resume_on_another(ranks, tiny, tmp_path):
    """Two microbatches are one change, a recomputed forward counts once, and evaluations count nothing."""
    argv = [*tiny, *MODEL, "--checkpoint.interval_steps", "2", "--checkpoint.keep", "9"]
    size = ["--model.overrides.dim", "32", "--model.overrides.hidden_dim", "64", "--model.overrides.n_layers", "2"]

    def run(count, name, *extra):
        ranks(count).run(train, combine([*argv, *size, *in_folder(tmp_path / name), *extra]))
        return corrections_in(tmp_path / name)

    expected = run(1, "one", "--training.local_batch_size", "8")
    (correction,) = expected.values()
    assert correction.dtype == torch.float32 and correction.abs().max() > 0.0015
    layout = ["--parallel.tp", "2", "--parallel.ep", "2", "--activation_checkpoint.mode", "full"]
    evaluated = ["--training.local_batch_size", "4", "--evaluation.interval_steps", "1"]
    run(2, "two", *layout, *evaluated, "--training.steps", "2")
    resumed = run(1, "two", "--training.local_batch_size", "8", "--training.steps", "4")
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())
