"""Steps on a fake GPU: every tensor is on the device, matrix products have one dtype, and the host reads no result."""

from unittest import mock

import pytest
import torch

from tests.fake_gpu import run_step
from trainer import engine
from trainer.tools.testing.ranks import RankError

pytestmark = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="fake tensors of torch 2.11 have no addmm with another dtype of its result"
)
LAYOUTS = (
    "dp_shard=1",
    "dp_shard=1 training.compute_dtype=bf16 activation_checkpoint.mode=selective resilience.on_loss_spike=skip",
    "dp_shard=1 training.parameter_dtype=bf16 training.compute_dtype=bf16 data.document_mask=true",
    "dp_shard=1 activation_checkpoint.mode=full activation_checkpoint.offload_inputs=true optimizer.offload=state",
    "dp_shard=1 optimizer.in_backward=true training.max_norm=none resilience.max_consecutive_skips=1",
    "dp_shard=2 training.compute_dtype=bf16 optimizer.state_dtype=8bit model.overrides.dim=256 model.overrides.hidden_dim=512",
    "dp_shard=2 training.parameter_dtype=bf16 optimizer.offload=state_and_gradients",
    "dp_replicate=2 dp_shard=2 training.compute_dtype=bf16 activation_checkpoint.mode=full",
    "tp=2 training.compute_dtype=bf16 activation_checkpoint.mode=selective",
    "dp_shard=2 tp=2 sequence_parallel=false model.overrides.tied_embeddings=true",
    "cp=2 training.compute_dtype=bf16",
    "dp_shard=2 training.compute_dtype=bf16 training.float8=rowwise activation_checkpoint.mode=selective",
    "dp_shard=2 tp=2 training.compute_dtype=bf16 training.float8=tensorwise model.overrides.dim=64",
    "dp_shard=2 tp=2 pp=2",
    "dp_shard=2 tp=2 training.compute_dtype=bf16 lora.rank=4 lora.base_dtype=nf4_double checkpoint.init_from=. "
    "model.overrides.dim=128 model.overrides.hidden_dim=256",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_runs_on_a_fake_gpu(layout, tiny, ranks):
    assert ranks(1).run(run_step, [*tiny, "--training.global_batch_size", "16"], layout) == ["meta"]


def with_fault(fault, argv, layout):
    count = engine.count_terms

    def faulty(*args):
        num_terms = count(*args)
        return fault(num_terms)

    with mock.patch.object(engine, "count_terms", faulty):
        return run_step(argv, layout)


def read(tensor):
    return torch.full_like(tensor, tensor.item())


def compare(tensor):
    return tensor if tensor > 1 else 2 * tensor


def mix_devices(tensor):
    return (tensor.expand(2) + torch.zeros(2)).sum()


def mix_dtypes(tensor):
    return (tensor.float().view(1, 1) @ tensor.double().view(1, 1)).sum()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (read, "DataDependentOutputException: aten._local_scalar_dense"),
        (compare, "DataDependentOutputException: aten._local_scalar_dense"),
        (mix_devices, "found at least two devices"),
        (mix_dtypes, "RuntimeError: aten.mm.default of"),
    ],
)
def test_a_fault_in_a_step_is_found_on_a_fake_gpu(fault, error, tiny, ranks):
    with pytest.raises(RankError, match=error):
        ranks(1).run(with_fault, fault, tiny, "dp_shard=1")
