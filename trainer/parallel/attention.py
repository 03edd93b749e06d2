"""Attention masks and kernels for documents packed into one sample and for sequences split over the cp axis.

The mask is computed once per forward, for all blocks. On a CPU it is a dense tensor that is added to the scores. On a GPU it is
the block mask of flex_attention (Dong et al. 2024, arXiv:2412.05496), which skips fully masked blocks.
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
    """A causal mask over each sample. With by_document, it covers each document of a sample separately."""

    def __init__(self, cp: DeviceMesh, by_document: bool):
        super().__init__()
        self.cp = cp
        self.by_document = by_document

    def forward(self, positions: Tensor, documents: Tensor) -> Tensor | BlockMask:
        """positions, documents: (batch, seq / cp). The mask has one row for each token of this rank and one column for each
        token of the full sequence."""
        ranks = self.cp.size()
        columns = torch.arange(documents.shape[1] * ranks, device=documents.device)
        rows = shard_tensor(columns[None], self.cp.get_local_rank(), ranks)[0]
        if not self.by_document:
            return self._make(rows, columns, None, None)
        return self._make(rows, columns, documents, all_gather_sequence(documents, self.cp, dim=1))

    def _make(self, rows: Tensor, columns: Tensor, row_docs: Tensor | None, column_docs: Tensor | None):
        """rows, columns: token indices in the sequence, shapes (seq / cp,) and (seq,). row_docs, column_docs: document indices,
        shapes (batch, seq / cp) and (batch, seq); None without a document mask."""
        raise NotImplementedError


class DenseMask(Mask):
    """A mask that is added to the attention scores, shape (batch or 1, 1, seq / cp, seq)."""

    def __init__(self, cp: DeviceMesh, by_document: bool, dtype: torch.dtype):
        """dtype: dtype of the computation. Attention would convert a mask of another dtype in every block."""
        super().__init__(cp, by_document)
        self.dtype = dtype

    def _make(self, rows: Tensor, columns: Tensor, row_docs: Tensor | None, column_docs: Tensor | None) -> Tensor:
        visible = (rows[:, None] >= columns)[None]
        if row_docs is not None:
            visible = visible & (row_docs[:, :, None] == column_docs[:, None, :])
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
        return mask.masked_fill_(~visible, float("-inf"))[:, None]


class FlexBlockMask(Mask):
    """The mask of FlexAttention. The compiled function does not materialize the dense mask."""

    def __init__(self, cp: DeviceMesh, by_document: bool, compiled: bool = True):
        super().__init__(cp, by_document)
        self.create = torch.compile(create_block_mask) if compiled else create_block_mask

    def _make(self, rows: Tensor, columns: Tensor, row_docs: Tensor | None, column_docs: Tensor | None) -> BlockMask:
        def is_visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            causal = rows[row] >= column
            return causal if row_docs is None else causal & (row_docs[batch, row] == column_docs[batch, column])

        batch = None if row_docs is None else len(row_docs)
        return self.create(is_visible, batch, None, len(rows), len(columns), device=rows.device.type)


class FlexAttention(nn.Module):
    def __init__(self, compiled: bool = True):
        """compiled: whether to compile FlexAttention. Without compilation it materializes all scores (for tests only)."""
        super().__init__()
        self.attend = torch.compile(flex_attention) if compiled else flex_attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        """q: (batch, heads, seq / cp, head_dim); k, v: (batch, kv heads, seq, head_dim)."""
        return self.attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@dataclass(frozen=True)
class AttentionBackend:
    """The mask and kernel that replace the model's own where attention is split or ends at document boundaries."""

    mask: Callable[[DeviceMesh, bool, torch.dtype], nn.Module]
    """Function (cp axis, by_document, dtype of the computation) -> module that computes the mask."""
    attention: Callable[[nn.Module], nn.Module]
    """The model's attention kernel -> a kernel that takes the mask."""


CPU_BACKEND = AttentionBackend(DenseMask, lambda kernel: kernel)
GPU_BACKEND = AttentionBackend(
    lambda cp, by_document, dtype: FlexBlockMask(cp, by_document), lambda kernel: FlexAttention()
)


def apply_attention(
    model: nn.Module,
    plan: ParallelPlan,
    cp: DeviceMesh,
    by_document: bool,
    dtype: torch.dtype,
    attention_backend: AttentionBackend,
    recompute_gathers: Callable[[str], bool],
) -> None:
    """Replace the model's attention kernels and mask, in place, if sequences are split or attention ends at document boundaries
    (by_document). recompute_gathers: name of a block -> whether its backward repeats the gather."""
    if cp.size() == 1 and not by_document:
        return
    model.set_submodule(plan.mask, attention_backend.mask(cp, by_document, dtype))
    for name, block in model.get_submodule(plan.blocks).named_children():
        kernel = attention_backend.attention(block.get_submodule(plan.attention))
        if cp.size() > 1:
            kernel = AllGatherAttention(kernel, cp, recompute_gathers(name))
        block.set_submodule(plan.attention, kernel)
