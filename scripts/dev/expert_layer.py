"""Parts of the time of a layer of OLMoE 7B-A1B: scripts/dev/benchmark.py experts."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from models import MODELS
from models.moe import Experts, MixtureOfExperts
from models.row_groups import grouped_product
from trainer.runtime.device import DTYPES
from trainer.tools.testing.layouts import Table


class LoopOverExperts(Experts):
    """The same experts, one after another."""

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """See Experts."""
        groups = rows.split(counts.tolist())
        matrices = zip(groups, self.w1, self.w2, self.w3, strict=True)
        return torch.cat([F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2) for x, w1, w2, w3 in matrices])


def print_experts(dtype: str, tokens: int, repeats: int) -> None:
    """Print the time of forward and backward of one layer of OLMoE 7B-A1B, of its parts, and of a loop over the experts.

    Args:
        dtype: Of parameters and computation, "fp32" or "bf16".
        tokens: In the batch.
        repeats: Turns. The parts take turns, and the table shows medians.
    """
    sizes = MODELS["olmoe"].by_size["7b-a1b"]
    torch.manual_seed(0)
    layer = MixtureOfExperts(sizes)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    layer.to(DTYPES[dtype])
    loop = LoopOverExperts(sizes.n_experts, sizes.dim, sizes.expert_dim, sizes.experts_per_token)
    loop.w1, loop.w2, loop.w3 = layer.experts.w1, layer.experts.w2, layer.experts.w3
    x = torch.randn(1, tokens, sizes.dim, dtype=DTYPES[dtype], requires_grad=True)
    rows, counts = _rows_of_experts(layer, x)
    parts: dict[str, Callable[[], Tensor]] = {
        "layer": lambda: layer(x),
        "router": lambda: layer.router(x).weights,
        "experts": lambda: layer.experts(rows, counts),
        "loop over experts": lambda: loop(rows, counts),
        "one grouped product": lambda: grouped_product(rows, layer.experts.w1, counts),
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(repeats + 1):
        for name, part in parts.items():
            layer.zero_grad()
            x.grad = rows.grad = None
            start = time.perf_counter()
            part().float().sum().backward()
            if turn:  # the first one warms up
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    medians["dispatch and combination"] = medians["layer"] - medians["router"] - medians["experts"]
    table = Table(part="<24", ms=">9", of_the_layer=">13")
    for name, seconds in medians.items():
        table.row(name, f"{seconds * 1e3:,.1f}", f"{seconds / medians['layer']:.1%}")


def _rows_of_experts(layer: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the arguments of the layer's experts, see Experts.forward. x: (batch, seq, dim)."""
    given = []
    hook = layer.experts.register_forward_pre_hook(lambda module, args: given.extend(args))
    with torch.no_grad():
        layer(x)
    hook.remove()
    rows, counts = given
    return rows.detach().requires_grad_(), counts
