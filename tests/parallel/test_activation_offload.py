"""Activation offloading: results are unchanged, and exactly the block inputs are offloaded."""

import gc

import pytest
import torch

from tests.training_runs import Result, train, without_code_generation
from trainer.parallel.activation_offload import InputOffloader
from trainer.runtime.host_memory import HostTransfer

LAYOUTS = {
    "dp": (2, []),
    "every second block": (2, ["--activation_checkpoint.every_n_blocks", "2"]),
    "cp and tp": (4, ["--parallel.cp", "2", "--parallel.tp", "2"]),
    "1F1B": (2, ["--parallel.pp", "2"]),
    "zero bubble": (
        2,
        ["--parallel.pp", "2", "--parallel.pipeline_schedule", "ZBVZeroBubble", "--model.overrides.n_layers", "4"],
    ),
    "compiled": (1, ["--compile.enabled", "true"]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_offloading_inputs_gives_bitwise_identical_weights(ranks, tiny, tmp_path, name):
    if name == "zero bubble" and torch.__version__ < (2, 13):
        pytest.skip("needs torch 2.13")
    size, layout = LAYOUTS[name]
    words = [*tiny, "--run.output_folder", str(tmp_path), *layout, "--activation_checkpoint.mode", "full"]
    plain, offloaded = (
        ranks(size).run(
            train_and_count, [*words, "--run.name", offload, "--activation_checkpoint.offload_inputs", offload]
        )
        for offload in ("false", "true")
    )
    assert plain[0][0].weights == offloaded[0][0].weights
    assert not any(count for _, count in plain)
    counts = {count for _, count in offloaded}
    assert 0 not in counts
    if name in ("dp", "every second block"):  # two blocks, two microbatches, four steps
        assert counts == {16 if name == "dp" else 8}


def train_and_count(argv) -> tuple[Result, int]:
    """Return the result of a run and the number of block inputs that the run copied to host memory."""
    shapes, buffers, (host_like, copy) = [], set(), (HostTransfer.host_like, HostTransfer.copy)

    def recording_host_like(transfer, tensor, dtype):
        buffer = host_like(transfer, tensor, dtype)
        if tensor.dim() > 1:  # the outcomes of steps are vectors
            buffers.add(buffer.data_ptr())
        return buffer

    def recording_copy(transfer, targets, sources):
        shapes.extend(target.shape for target in targets if target.data_ptr() in buffers)
        return copy(transfer, targets, sources)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostTransfer, "host_like", recording_host_like)
        patch.setattr(HostTransfer, "copy", recording_copy)
        with without_code_generation():
            result = train(argv)
    assert len(set(shapes)) <= 1
    return result, len(shapes)


def run_blocks(corrupt: bool) -> tuple[torch.Tensor, int, int]:
    """Run forward and backward through three blocks twice. Return the gradient of the input, the number of allocated buffers,
    and how many are still in use. corrupt: whether tensors are changed on their way back from the host."""
    buffers, (host_like, copy) = [], (HostTransfer.host_like, HostTransfer.copy)

    def counting_host_like(transfer, tensor, dtype):
        buffers.append(host_like(transfer, tensor, dtype))
        return buffers[-1]

    def corrupting_copy(transfer, targets, sources):
        to_device = all(target is not buffer for target in targets for buffer in buffers)
        return copy(transfer, targets, [s * 2 for s in sources] if corrupt and to_device else sources)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostTransfer, "host_like", counting_host_like)
        patch.setattr(HostTransfer, "copy", corrupting_copy)
        offloader = InputOffloader(torch.device("cpu"))
        cubes = [offloader.wrap(_Cube.apply, is_first=i == 0) for i in range(3)]
        for _ in range(2):
            x = torch.tensor([1.1], requires_grad=True)
            out = x
            for cube in cubes:
                out = cube(out)
            out.backward()
        del out
        gc.collect()
    return x.grad, len(buffers), len(buffers) - sum(map(len, offloader.free_buffers.values()))


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


def test_backward_reads_inputs_from_host_buffers_that_are_reused():
    gradient, allocated, in_use = run_blocks(corrupt=False)
    torch.testing.assert_close(gradient, torch.tensor([27 * 1.1**26]))
    assert (allocated, in_use) == (3, 0)
    assert run_blocks(corrupt=True)[0].item() == pytest.approx(64 * gradient.item())
