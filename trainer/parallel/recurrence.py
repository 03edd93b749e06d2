"""Recurrences over documents packed into one sample, and over sequences that are split over the cp axis.

A rank has two parts of each sequence (context_parallel.py), which are rows of their own in the kernel. Two things enter a part:
the last tokens of the part before it, which the convolutions read, and the state after that part. A part maps the state before it
by an affine map, whatever its length. So ranks gather the maps of all parts, and each composes those before its own: K x (K + V)
numbers for each head, part and sample, where attention gathers the keys and values of all tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.affine_scan import AffineMaps
from models.context import Context
from models.delta_net import Carry, RecurrentKind
from trainer.parallel.attention import AttentionBackend
from trainer.parallel.context_parallel import all_gather_sequence
from trainer.parallel.sample_layout import Replacement, SampleLayout

_NO_DOCUMENT = -2
"""Document of the tokens before a sequence. Padding has -1."""


class ContextCarry(Carry):
    """What passes from part to part of a sequence. Rows of the kernel are parts: the first ones of all samples of this rank, then
    the second ones."""

    def __init__(self, cp: DeviceMesh):
        """cp: the ranks over which each sequence is split."""
        super().__init__()
        self.cp = cp

    def rows(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1)

    def batch(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (2, -1)).transpose(0, 1).flatten(1, 2)

    def tokens_before(self, parts: Sequence[Tensor], count: int) -> Tensor:
        return self.before(torch.cat([x[:, -count:] for x in parts], -1), 0)

    def state_before(self, maps: AffineMaps) -> Tensor:
        a, b = maps.composed()
        parts = self.all_parts(torch.cat((a[0], b[0]), -1))  # (parts, batch, heads, key_dim, key_dim + value_dim)
        return self.own(AffineMaps(*parts.split((a.shape[-1], b.shape[-1]), -1)).states())

    def before(self, ends: Tensor, first: int) -> Tensor:
        """Return the ends of the parts before this rank's own, (rows, ...).

        Args:
            ends: Of this rank's parts, (rows, ...).
            first: Value before the first part of a sequence.
        """
        parts = self.all_parts(ends)
        return self.own(torch.cat((torch.full_like(parts[:1], first), parts[:-1])))

    def all_parts(self, rows: Tensor) -> Tensor:
        """Gather a tensor of this rank's rows, (rows, ...). Return those of all parts in order, (parts, batch, ...). Backward
        sums the gradients over all ranks."""
        return all_gather_sequence(rows.unflatten(0, (2, -1)).contiguous(), self.cp, dim=0)

    def own(self, parts: Tensor) -> Tensor:
        """Return this rank's rows, (rows, ...), of a tensor of at least all parts in order, (parts, batch, ...)."""
        rank = self.cp.get_local_rank()
        return torch.cat((parts[rank], parts[2 * self.cp.size() - 1 - rank]))


class Documents(nn.Module):
    """The mask of recurrences that begin anew with each document."""

    def __init__(self, kind: RecurrentKind, carry: Carry):
        """carry: what passes from row to row."""
        super().__init__()
        self.before = kind.reads_before
        self.carry = carry

    def forward(self, context: Context) -> Tensor:
        """Return the documents of DeltaRule, (rows, tokens before + tokens)."""
        documents = self.carry.rows(context.documents)
        if isinstance(self.carry, ContextCarry):
            before = self.carry.before(documents[:, -self.before :], _NO_DOCUMENT)
        else:
            before = documents.new_full((len(documents), self.before), _NO_DOCUMENT)
        return torch.cat((before, documents), 1)


def kernel_name(kind: RecurrentKind, layout: SampleLayout, tp: int, device: torch.device) -> str:
    """See mixers.py."""
    return kind.KERNEL


def replacement(kind: RecurrentKind, layout: SampleLayout, backend: AttentionBackend) -> Replacement | None:
    """Return the mask and the kernels of recurrences that end at documents, or that continue those of other ranks."""
    if layout.cp.size() == 1 and not layout.by_document:
        return None
    carry = ContextCarry(layout.cp) if layout.cp.size() > 1 else Carry()
    return Replacement(
        Documents(kind, carry) if layout.by_document else kind.mask(), lambda recomputes: kind.kernel(carry)
    )
