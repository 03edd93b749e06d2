"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): updates by the orthogonalized momentum of each matrix.

A rank orthogonalizes whole matrices only: exchange.py brings each one to an owner. So the update is that of one rank, in any
layout. Momentum and weights stay sharded.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from trainer.base.config import OptimizerConfig
from trainer.optim.decay import cautious_factors
from trainer.optim.exchange import BUCKET_VALUES, Exchange, Matrix, Sharding, assign_owners, buckets, matrices_of
from trainer.runtime.device import DTYPES

COEFFICIENTS = {
    # Jordan's blog post: singular values end between about 0.7 and 1.2.
    "jordan": ((3.4445, -4.7750, 2.0315),) * 5,
    # Amsel et al. 2025, "The Polar Express", arXiv:2505.16932, for 5 steps.
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
"""Value of [optimizer] muon_coefficients -> a, b and c of each step of the iteration X <- aX + b(XX^T)X + c(XX^T)^2 X."""

SCALES: Mapping[str, Callable[[int, int], float]] = {
    # Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv:2502.16982: the root mean square of AdamW's updates.
    "match_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    # Jordan's code.
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    # Bernstein 2025, "Deriving Muon": changes the root mean square of outputs by the rate, at any width.
    "unit_rms": lambda rows, columns: math.sqrt(rows / columns),
}
"""Value of [optimizer] muon_scale -> factor of the orthogonalized direction, from the numbers of rows and columns."""

_EPS = 1e-7
_MARGIN = {"jordan": 1.0, "polar_express": 1.01}
"""Factor of the norm by which a matrix is divided: the iteration must start with singular values of at most 1."""
_BATCH_VALUES = 2**26
"""Maximum number of values of matrices of one shape that are orthogonalized together."""


def orthogonalize(matrices: Tensor, coefficients: str) -> Tensor:
    """Return approximately UV^T of the singular value decomposition USV^T of each matrix, in its dtype.

    Args:
        matrices: (matrices, rows, columns).
        coefficients: Key of COEFFICIENTS.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    norms = torch.linalg.matrix_norm(x, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = x / (norms * _MARGIN[coefficients]).clamp(min=_EPS).to(x.dtype)
    for a, b, c in COEFFICIENTS[coefficients]:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def _cost(matrix: Matrix) -> float:
    """Return the multiply-adds of one step of the iteration."""
    small, large = sorted(matrix.shape)
    return 2 * small**2 * large + small**3


class Muon(torch.optim.Optimizer):
    """Muon on the shards of matrices. Its state is the momentum, sharded like the parameters."""

    def __init__(self, groups: Sequence[dict], config: OptimizerConfig, sharding: Sharding):
        """Allocate the state and plan the exchange.

        Args:
            groups: torch's parameter groups, of local tensors (rows, columns) or (matrices, rows, columns).
            config: Settings. muon_dtype must not be "auto".
            sharding: Of these parameters.
        """
        super().__init__(groups, {"lr": config.lr})
        self.config = config
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.shapes = {p: sharding.parameters[p].shape[-2:] for p in parameters}
        """Shard -> rows and columns of the whole matrix."""
        for p in parameters:
            self.state[p] = {"momentum": torch.zeros_like(p, dtype=DTYPES[config.state_dtype])}
        matrices = [matrix for p in parameters for matrix in matrices_of(p, sharding)]
        assign_owners(matrices, _cost, len(sharding.ranks))
        self.exchanges = [Exchange(bucket, sharding) for bucket in buckets(matrices, BUCKET_VALUES)]

    @torch.no_grad()
    def update(self, skip: Tensor, grad_scale: Tensor | None = None) -> None:
        """See Updater. A skipped step exchanges matrices too, because the host does not know that it is skipped."""
        is_skipped = skip.bool()
        directions = {p: self._direction(p, is_skipped, grad_scale) for p in self.shapes}
        like = next(iter(directions.values())).new_empty(0)

        def part_of(matrix: Matrix) -> Tensor:
            return matrix.part_of(directions[matrix.target])

        results: list[dict[Matrix, Tensor]] = []
        for i, exchange in enumerate(self.exchanges):
            if i == 0:
                exchange.send(part_of, like)
            if i + 1 < len(self.exchanges):
                self.exchanges[i + 1].send(part_of, like)  # while this one's matrices are orthogonalized
            results.append(dict(self._orthogonalize(exchange.receive(part_of, like))))
            exchange.send_back(results[-1], like)
        for exchange, result in zip(self.exchanges, results, strict=True):
            for matrix, part in exchange.receive_back(result).items():
                part_of(matrix).copy_(part)
        for group in self.param_groups:
            for p in group["params"]:
                self._move(p, directions[p], group, is_skipped)

    def _direction(self, p: Tensor, skip: Tensor, grad_scale: Tensor | None) -> Tensor:
        """Return the direction that is orthogonalized, and free the gradient. The momentum changes unless the step is skipped."""
        gradient = p.grad.float() if grad_scale is None else p.grad.float().div_(grad_scale)
        p.grad = None
        stored, beta = self.state[p]["momentum"], self.config.muon_momentum
        momentum = stored.float().lerp(gradient, 1 - beta)
        stored.copy_(torch.where(skip, stored, momentum.to(stored.dtype)))
        direction = gradient.lerp_(momentum, beta) if self.config.muon_nesterov else momentum
        return direction.to(DTYPES[self.config.muon_dtype])

    def _orthogonalize(self, matrices: Mapping[Matrix, Tensor]) -> Iterator[tuple[Matrix, Tensor]]:
        """Yield each matrix with its orthogonalized values. Those of one shape are computed together."""
        for shape, same in groupby(sorted(matrices, key=lambda m: m.shape), key=lambda m: m.shape):
            alike = list(same)
            step = max(1, _BATCH_VALUES // math.prod(shape))
            for start in range(0, len(alike), step):
                batch = alike[start : start + step]
                values = orthogonalize(torch.stack([matrices[m] for m in batch]), self.config.muon_coefficients)
                yield from zip(batch, values, strict=True)

    def _move(self, p: Tensor, direction: Tensor, group: dict, skip: Tensor) -> None:
        """Update a shard. direction: orthogonalized."""
        lr, scale = group["lr"], SCALES[self.config.muon_scale](*self.shapes[p])
        decay = lr * group["weight_decay"]
        kept = cautious_factors(p, direction, decay) if self.config.cautious_decay else 1 - decay
        moved = p.float().mul(kept).add_(direction, alpha=-lr * scale)
        p.copy_(torch.where(skip, p, moved.to(p.dtype)))


def muon_bytes(parameter: Tensor, is_bias: bool, config: OptimizerConfig) -> float:
    """Return the bytes of a parameter's momentum. The parameter may be on the meta device."""
    return parameter.numel() * DTYPES[config.state_dtype].itemsize


def muon_width_powers(config: OptimizerConfig) -> dict[str, float]:
    """See Rule. An orthogonal matrix keeps the size of its input. Of the scales, only that of "match_adamw" grows with the width
    of matrices whose rows and columns are in proportion."""
    return {"hidden": 0.5} if config.muon_scale == "match_adamw" else {}
