"""Count the matrix products and the memory traffic of one block and of the loss, without a GPU.

For each mode of activation checkpointing, eager and compiled, the script prints the matrix products of forward and backward, and
the bytes that operators read and write for each additional token. Weights do not count, because their traffic does not grow with
the number of tokens. Eager operators are counted with fake tensors; compiled ones by the compiler, for this machine's CPU. The
rows of the loss contain the output projection, the loss and the gradient of the logits.

    python scripts/dev/count_operators.py --name llama3 --size 8b
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

import torch
from torch import Tensor, nn
from torch._inductor import compile_fx, metrics
from torch._inductor import config as inductor
from torch._subclasses.fake_tensor import FakeTensorMode

from models import MODELS
from models.context import Context
from trainer.base.config import ActivationCheckpointConfig
from trainer.base.config.arguments import Arguments
from trainer.base.config.exits import run_to_end
from trainer.objective.cross_entropy import _compiled_losses_and_gradient, _losses_and_gradient
from trainer.parallel.activation_checkpoint import SAVEABLE_OPS, block_forward, recompute_policy
from trainer.parallel.feed_forward import apply_gated_products
from trainer.parallel.rotation import apply_complex_rotation
from trainer.tools.planner.patches import fused_norms
from trainer.tools.planner.recorder import Recorder
from trainer.tools.testing.layouts import Table

MODES = ("none", "selective", "full")
_LOSS_DIM = 16


def block_and_inputs(name: str, size: str, tokens: int) -> tuple[nn.Module, Tensor, Context]:
    """Return a block in bf16, its input (1, tokens, dim) and its context."""
    spec = MODELS[name]
    sizes = replace(spec.by_size[size].without_prediction(), n_layers=1, vocab_size=8)
    with default_dtype(torch.bfloat16):
        model = spec.model(sizes)
    context = Context.of(torch.zeros(1, tokens, dtype=torch.int64))
    if (rope := model.structure().kind(0).rope) is not None:
        context = context._replace(rope=rope(context.positions))
    hidden = torch.zeros(1, tokens, sizes.dim, dtype=torch.bfloat16, requires_grad=True)
    (block,) = model.get_submodule(model.structure().blocks_path).children()
    return block, hidden, context


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def recomputing(block: nn.Module, mode: str, compiled: bool) -> Any:
    config = ActivationCheckpointConfig(mode=mode)
    policy = recompute_policy(0, config, gathers=False, compiled=compiled)
    return block_forward(block.forward, policy, config, compiled)


def part_of_model(name: str, size: str, part: str, tokens: int, compiled: bool) -> Callable[[], Any]:
    """Return a function that runs a part of the model. part: a mode, for one block, or "loss"."""
    if part == "loss":
        # A narrow weight, because many CPUs compute products in bf16 slowly. Hidden states are small beside logits.
        rows = tokens, MODELS[name].by_size[size].vocab_size
        hidden, weight = (torch.zeros(n, _LOSS_DIM, dtype=torch.bfloat16) for n in rows)
        labels, gradients = torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens, 1)
        compute = _compiled_losses_and_gradient() if compiled else _losses_and_gradient
        return partial(compute, hidden, weight, labels, 0, None, None, gradients, 0.0)
    block, hidden, context = block_and_inputs(name, size, tokens)
    if not compiled:
        apply_gated_products(block)
        apply_complex_rotation(block)
    forward = recomputing(block, part, compiled)
    return lambda: forward(hidden, context).backward(torch.empty_like(hidden))


def count_eager(name: str, size: str, part: str, tokens: int) -> tuple[int, float]:
    """Return the number of matrix products and of bytes of one forward and backward."""
    with FakeTensorMode(allow_non_fake_inputs=True), fused_norms(on_gpu=True):
        run, recorder = part_of_model(name, size, part, tokens, compiled=False), Recorder(on_gpu=True)
        with recorder:
            run()
    matmuls = sum(recorder.op_counts[op.overloadpacket.__name__] for op in SAVEABLE_OPS["matmuls"])
    return matmuls, sum(n * num_bytes for (_, _, num_bytes), n in recorder.op_costs.items())


def count_compiled(name: str, size: str, part: str, tokens: int) -> tuple[int, float]:
    """Return the same numbers for the compiled part, after all fusions."""
    matmuls = 0

    def count_matmuls(graph: torch.fx.Graph) -> None:
        nonlocal matmuls
        matmuls += sum(node.target in SAVEABLE_OPS["matmuls"] for node in graph.nodes)

    torch._dynamo.reset()
    metrics.reset()
    compile_fx.inductor_metrics_log.setLevel(logging.INFO)  # otherwise the compiler does not count bytes
    compile_fx.inductor_metrics_log.propagate = False
    logging.getLogger("torch._logging").setLevel(logging.ERROR)  # a warning about every context_fn
    with inductor.patch(post_grad_custom_post_pass=count_matmuls, force_disable_caches=True):
        part_of_model(name, size, part, tokens, compiled=True)()
    return matmuls, metrics.num_bytes_accessed


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--name", choices=list(MODELS), default="llama3", help="model family")
    parser.add_argument("--size", default="8b", metavar="SIZE", help="size of the model")
    args = parser.parse_args()
    if args.size not in MODELS[args.name].by_size:
        parser.error(f"--size {args.size}: expected one of {', '.join(MODELS[args.name].by_size)}")
    table = Table(code="<10", part="<12", matrix_products=">16", MB_per_token=">14")
    for kind, count, tokens in (("eager", count_eager, 1024), ("compiled", count_compiled, 128)):
        for part in (*MODES, "loss"):
            (matmuls, few), (_, many) = (count(args.name, args.size, part, n) for n in (tokens, 2 * tokens))
            table.row(kind, part, str(matmuls), f"{(many - few) / tokens / 1e6:.3f}")


if __name__ == "__main__":
    run_to_end(main)
