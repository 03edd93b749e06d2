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
    """How often something went there in a whole run."""
    sent, send = [], HostTransfer.to_host
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            HostTransfer,
            "to_host",
            lambda link, target, source: sent.append(target.shape) or send(link, target, source),
        )
        train(argv)
    assert len(set(sent)) == 1
    return len(sent)


def blocks(link_changes: bool) -> tuple[torch.Tensor, int, int]:
    """The gradient of what goes through three blocks twice, how many buffers were made, and how many are in use then.
    link_changes: whether what comes back from the host is something else."""
    made, (make, bring) = [], (HostTransfer.host_like, HostTransfer.to_device)

    def counted(link, tensor, dtype):
        made.append(make(link, tensor, dtype))
        return made[-1]

    def changed(link, target, source):
        return bring(link, target, source * 2 if link_changes else source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostTransfer, "host_like", counted)
        patch.setattr(HostTransfer, "to_device", changed)
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
