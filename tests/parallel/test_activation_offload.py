"""Inputs of blocks in host memory: the same run, and what is there."""

import gc

import pytest
import torch

from tests.training_runs import train
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
def test_a_run_is_the_same_bit_by_bit(ranks, tiny, tmp_path, name):
    if name == "zero bubble" and torch.__version__ < (2, 13):
        pytest.skip("needs torch 2.13")
    size, layout = LAYOUTS[name]
    words = [*tiny, "--run.output_folder", str(tmp_path), *layout, "--activation_checkpoint.mode", "full"]
    plain, offloaded = (
        ranks(size).run(train, [*words, "--run.name", str(offload), "--activation_checkpoint.offload_inputs", offload])
        for offload in ("false", "true")
    )
    assert plain[0].weights == offloaded[0].weights
    kept = ranks(size).run(
        inputs_on_the_host, [*words, "--run.name", "kept", "--activation_checkpoint.offload_inputs", "true"]
    )
    assert all(kept)
    if name in ("dp", "every second block"):  # of two, in four microbatches of four steps
        assert set(kept) == {32 if name == "dp" else 16}


def inputs_on_the_host(argv) -> int:
    """Return the number of copies to host memory in a complete run."""
    sent, buffers, (host_like, copy) = [], set(), (HostTransfer.host_like, HostTransfer.copy)

    def recorded_host_like(transfer, tensor, dtype):
        buffer = host_like(transfer, tensor, dtype)
        buffers.add(buffer.data_ptr())
        return buffer

    def recorded_copy(transfer, targets, sources):
        sent.extend(target.shape for target in targets if target.data_ptr() in buffers)
        return copy(transfer, targets, sources)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostTransfer, "host_like", recorded_host_like)
        patch.setattr(HostTransfer, "copy", recorded_copy)
        train(argv)
    assert len(set(sent)) == 1
    return len(sent)


def blocks(link_changes: bool) -> tuple[torch.Tensor, int, int]:
    """The gradient of what goes through three blocks twice, how many buffers were made, and how many are in use then.
    link_changes: whether what comes back from the host is something else."""
    made, (make, copy) = [], (HostTransfer.host_like, HostTransfer.copy)

    def counted(transfer, tensor, dtype):
        made.append(make(transfer, tensor, dtype))
        return made[-1]

    def changed(transfer, targets, sources):
        to_device = all(target is not buffer for target in targets for buffer in made)
        return copy(transfer, targets, [s * 2 for s in sources] if link_changes and to_device else sources)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostTransfer, "host_like", counted)
        patch.setattr(HostTransfer, "copy", changed)
        inputs = InputOffloader(torch.device("cpu"))
        cubes = [inputs.wrap(_Cube.apply, first=number == 0) for number in range(3)]
        for _ in range(2):
            x = torch.tensor([1.1], requires_grad=True)
            out = x
            for cube in cubes:
                out = cube(out)
            out.backward()
        del out
        gc.collect()
    return x.grad, len(made), len(made) - sum(map(len, inputs.free_buffers.values()))


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


def test_backward_takes_inputs_from_the_host_in_buffers_that_are_made_once():
    gradient, made, in_use = blocks(link_changes=False)
    torch.testing.assert_close(gradient, torch.tensor([27 * 1.1**26]))
    assert (made, in_use) == (3, 0)
    assert blocks(link_changes=True)[0].item() == pytest.approx(64 * gradient.item())
