"""Who sees whom, and the kernels that keep to it: documents packed into one sample, sequences cut over the cp axis.

A mask is made once a forward, for all blocks. On a CPU it is a table that is added to the scores; on a GPU it is the block
mask of flex_attention (Dong et al. 2024, arXiv:2412.05496), which skips what nobody sees.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from models.spec import ParallelPlan
from trainer.parallel.context import AllGatherAttention, all_gather_sequence, shard_tensor


class Mask(nn.Module):
    """Every token sees itself and those before it in its sample, or in its document."""

    def __init__(self, cp: DeviceMesh, by_document: bool):
        super().__init__()
        self.cp = cp
        self.by_document = by_document

    def forward(self, positions: Tensor, documents: Tensor) -> Tensor | BlockMask:
        """positions, documents: (batch, seq / cp). The mask has a row for each of this rank's tokens, a column for each of
        the whole sequence."""
        ranks = self.cp.size()
        columns = torch.arange(documents.shape[1] * ranks, device=documents.device)
        rows = shard_tensor(columns[None], self.cp.get_local_rank(), ranks)[0]
        if not self.by_document:
            return self._make(rows, columns, None, None)
        return self._make(rows, columns, documents, all_gather_sequence(documents, self.cp, dim=1))

    def _make(self, rows: Tensor, columns: Tensor, mine: Tensor | None, all_documents: Tensor | None):
        """rows: (seq / cp,), columns: (seq,), places in the sequence; mine: (batch, seq / cp) and all_documents: (batch, seq),
        None where documents make no difference."""
        raise NotImplementedError


class DenseMask(Mask):
    """Added to the scores: (batch or 1, 1, seq / cp, seq)."""

    def __init__(self, cp: DeviceMesh, by_document: bool, dtype: torch.dtype):
        """dtype: of the computation; with another, a kernel would convert it in every block."""
        super().__init__(cp, by_document)
        self.dtype = dtype

    def _make(self, rows: Tensor, columns: Tensor, mine: Tensor | None, all_documents: Tensor | None) -> Tensor:
        seen = (rows[:, None] >= columns)[None]
        if mine is not None:
            seen = seen & (mine[:, :, None] == all_documents[:, None, :])
        table = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        return table.masked_fill_(~seen, float("-inf"))[:, None]


class FlexBlockMask(Mask):
    """For FlexAttention. Made by a compiled function, which does not lay out the whole table."""

    def __init__(self, cp: DeviceMesh, by_document: bool, compiled: bool = True):
        super().__init__(cp, by_document)
        self.create = torch.compile(create_block_mask) if compiled else create_block_mask

    def _make(self, rows: Tensor, columns: Tensor, mine: Tensor | None, all_documents: Tensor | None) -> BlockMask:
        def seen(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            before = rows[row] >= column
            return before if mine is None else before & (mine[batch, row] == all_documents[batch, column])

        batch = None if mine is None else len(mine)
        return self.create(seen, batch, None, len(rows), len(columns), device=rows.device.type)


class FlexAttention(nn.Module):
    def __init__(self, compiled: bool = True):
        """compiled: else it lays out all scores, which only tests want."""
        super().__init__()
        self.attend = torch.compile(flex_attention) if compiled else flex_attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        """q: (batch, heads, seq / cp, head_dim); k, v: (batch, kv heads, seq, head_dim)."""
        return self.attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@dataclass(frozen=True)
class AttentionBackend:
    """What stands in the place of the plain kernel where that does not do."""

    mask: Callable[[DeviceMesh, bool, torch.dtype], nn.Module]
    """(cp axis, whether documents make a difference, precision of the computation) -> what makes the mask."""
    attention: Callable[[nn.Module], nn.Module]
    """The plain kernel -> one that takes the mask."""


CPU_BACKEND = AttentionBackend(DenseMask, lambda plain: plain)
GPU_BACKEND = AttentionBackend(
    lambda cp, by_document, dtype: FlexBlockMask(cp, by_document), lambda plain: FlexAttention()
)


def apply_attention(
    model: nn.Module,
    plan: ParallelPlan,
    cp: DeviceMesh,
    by_document: bool,
    dtype: torch.dtype,
    attention_backend: AttentionBackend,
    gather_again: Callable[[str], bool],
) -> None:
    """Where the plain kernel does not do, put others, and their mask, in its place. by_document: whether attention ends at the
    borders of documents; gather_again: whether a block keeps only its own keys and values for backward."""
    if cp.size() == 1 and not by_document:
        return
    model.set_submodule(plan.mask, attention_backend.mask(cp, by_document, dtype))
    for name, block in model.get_submodule(plan.blocks).named_children():
        kernel = attention_backend.attention(block.get_submodule(plan.attention))
        if cp.size() > 1:
            kernel = AllGatherAttention(kernel, cp, gather_again(name))
        block.set_submodule(plan.attention, kernel)
