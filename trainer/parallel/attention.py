"""Attention masks and kernels for documents packed into one sample and for sequences split over the cp axis.

The mask is computed once per forward, for all blocks. On a CPU it is a dense tensor that is added to the scores. On a GPU it is
the block mask of flex_attention (Dong et al. 2024, arXiv:2412.05496), which skips fully masked blocks.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from models.spec import ParallelPlan
from trainer.parallel.context import AllGatherAttention, all_gather_sequence, shard_tensor


class Mask(nn.Module):
    """A module that computes a causal mask. If by_document is true, tokens attend only to tokens of their own document."""

    def __init__(self, cp: DeviceMesh, by_document: bool, create: Callable[..., Tensor | BlockMask]):
        """create: torch's create_block_mask, or another function with the same signature."""
        super().__init__()
        self.cp = cp
        self.by_document = by_document
        self.create = create

    def forward(self, positions: Tensor, documents: Tensor) -> Tensor | BlockMask:
        """positions, documents: (batch, seq / cp). The mask has one row for each token of this rank and one column for each
        token of the full sequence."""
        ranks, num_rows = self.cp.size(), documents.shape[1]
        tokens = torch.arange(num_rows * ranks, device=documents.device)
        rows = shard_tensor(tokens[None], self.cp.get_local_rank(), ranks)[0]  # the token index of each row
        column_docs = all_gather_sequence(documents, self.cp, dim=1) if self.by_document else None

        def is_visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            causal = rows[row] >= column
            return causal if column_docs is None else causal & (documents[batch, row] == column_docs[batch, column])

        batch = len(documents) if self.by_document else None
        return self.create(is_visible, batch, None, num_rows, len(tokens), device=documents.device.type)


def create_dense_mask(is_visible: Callable[..., Tensor], *sizes: int | None, device: str, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to the attention scores. sizes: (batch, heads, rows, columns), where None becomes 1. dtype:
    dtype of the computation, because attention would convert a mask of another dtype in every block."""
    batch, head, row, column = (torch.arange(size or 1, device=device) for size in sizes)
    visible = is_visible(batch[:, None, None, None], head[:, None, None], row[:, None], column)
    mask = torch.zeros([size or 1 for size in sizes], dtype=dtype, device=device)
    return mask.masked_fill_(~visible, float("-inf"))


class FlexAttention(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]):
        """attend: torch's flex_attention, which materializes all scores unless it is compiled."""
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        """q: (batch, heads, seq / cp, head_dim); k, v: (batch, kv heads, seq, head_dim)."""
        return self.attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@dataclass(frozen=True)
class AttentionBackend:
    """Functions that make the mask and the kernel of attention over split sequences or within document boundaries."""

    mask: Callable[[DeviceMesh, bool, torch.dtype], nn.Module]
    """Function (cp axis, by_document, dtype of the computation) -> module that computes the mask."""
    attention: Callable[[nn.Module], nn.Module]
    """Function (attention kernel of the model) -> kernel that takes the mask."""


CPU_BACKEND = AttentionBackend(
    lambda cp, by_document, dtype: Mask(cp, by_document, partial(create_dense_mask, dtype=dtype)), lambda kernel: kernel
)
GPU_BACKEND = AttentionBackend(
    lambda cp, by_document, dtype: Mask(cp, by_document, torch.compile(create_block_mask)),
    lambda kernel: FlexAttention(torch.compile(flex_attention)),
)


def kernel_name(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], masked: bool, dtype: torch.dtype, device: torch.device
) -> str:
    """Return the name of the attention kernel in training, such as "flash_attention". shapes: of q and of k and v on this rank.
    masked: whether attention gets a mask."""
    if masked and device.type != "cpu":
        return "flex_attention"
    q, k = (torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
    mask = torch.empty(1, 1, q.shape[2], k.shape[2], dtype=dtype, device=device) if masked else None
    gqa = q.shape[1] != k.shape[1]
    return SDPBackend(torch._fused_sdp_choice(q, k, k, mask, is_causal=not masked, enable_gqa=gqa)).name.lower()


def apply_attention(
    model: nn.Module,
    plan: ParallelPlan,
    cp: DeviceMesh,
    by_document: bool,
    dtype: torch.dtype,
    attention_backend: AttentionBackend,
    recompute_gathers: Collection[str],
) -> None:
    """Replace the model's attention kernels and mask, in place, if sequences are split or by_document is true. by_document:
    whether attention ends at document boundaries. recompute_gathers: names of the blocks in which backward repeats
    the gather of keys and values."""
    if cp.size() == 1 and not by_document:
        return
    model.set_submodule(plan.mask, attention_backend.mask(cp, by_document, dtype))
    for name, block in model.get_submodule(plan.blocks).named_children():
        kernel = attention_backend.attention(block.get_submodule(plan.attention))
        if cp.size() > 1:
            kernel = AllGatherAttention(kernel, cp, name in recompute_gathers)
        block.set_submodule(plan.attention, kernel)
