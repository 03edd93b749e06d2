"""Attention masks and kernels for windows, for documents packed into one sample and for sequences split over the cp axis.

Each kind of layer has one mask per forward. On a CPU it is a dense tensor that is added to the scores. On a GPU it is the block
mask of flex_attention (Dong et al. 2024, arXiv:2412.05496), which skips fully masked blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from models.attention import AttentionKind, attention_kernel
from models.context import Context
from trainer.parallel.context_parallel import AllGatherAttention, all_gather_sequence, shard_tensor
from trainer.parallel.sample_layout import Replacement, SampleLayout


class Mask(nn.Module):
    """A module that computes a causal mask. If by_document is true, tokens attend only to tokens of their own document."""

    def __init__(
        self, kind: AttentionKind, cp: DeviceMesh, by_document: bool, create: Callable[..., Tensor | BlockMask]
    ):
        """create: torch's create_block_mask, or another function with the same signature."""
        super().__init__()
        self.window = kind.window
        self.cp = cp
        self.by_document = by_document
        self.create = create

    def forward(self, context: Context) -> Tensor | BlockMask:
        """Return a mask with one row for each token of this rank and one column for each token of the full sequence."""
        documents = context.documents  # (batch, seq / cp)
        ranks, num_rows = self.cp.size(), documents.shape[1]
        tokens = torch.arange(num_rows * ranks, device=documents.device)
        rows = shard_tensor(tokens[None], self.cp.get_local_rank(), ranks)[0]  # the token index of each row
        if self.by_document and context.last_readers is not None:
            is_visible = self._visible_to_readers(rows, context)
        else:
            is_visible = self._visible_in_document(rows, documents)
        batch = len(documents) if self.by_document else None
        return self.create(is_visible, batch, None, num_rows, len(tokens), device=documents.device.type)

    def _visible_in_document(self, rows: Tensor, documents: Tensor) -> Callable[..., Tensor]:
        """Return the function (batch, head, row, column) -> whether the row's token attends to the column's. rows: index of each
        row's token."""
        column_docs = all_gather_sequence(documents, self.cp, dim=1) if self.by_document else None

        def is_visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            visible = rows[row] >= column
            if self.window is not None:
                visible = visible & (rows[row] - column < self.window)
            return visible if column_docs is None else visible & (documents[batch, row] == column_docs[batch, column])

        return is_visible

    def _visible_to_readers(self, rows: Tensor, context: Context) -> Callable[..., Tensor]:
        """Return such a function for documents that share tokens. A window then counts positions: the tokens of other documents
        stand between."""
        last_readers = all_gather_sequence(context.last_readers, self.cp, dim=1)
        positions, column_positions = context.positions, all_gather_sequence(context.positions, self.cp, dim=1)

        def is_visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            visible = (rows[row] >= column) & (rows[row] <= last_readers[batch, column])
            if self.window is not None:
                visible = visible & (positions[batch, row] - column_positions[batch, column] < self.window)
            return visible

        return is_visible


def create_dense_mask(is_visible: Callable[..., Tensor], *sizes: int | None, device: str, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to the attention scores. sizes: (batch, heads, rows, columns), where None becomes 1. dtype:
    dtype of the computation, because attention would convert a mask of another dtype in every block."""
    batch, head, row, column = (torch.arange(size or 1, device=device) for size in sizes)
    visible = is_visible(batch[:, None, None, None], head[:, None, None], row[:, None], column)
    mask = torch.zeros([size or 1 for size in sizes], dtype=dtype, device=device)
    return mask.masked_fill_(~visible, float("-inf"))


class FlexAttention(nn.Module):
    def __init__(self, kind: AttentionKind, attend: Callable[..., Tensor]):
        """attend: torch's flex_attention, which materializes all scores unless it is compiled."""
        super().__init__()
        self.kind = kind
        self.attend = attend
        cap = kind.softcap

        def capped(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

        self.score_mod = None if cap is None else capped

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, sinks: Tensor | None = None) -> Tensor:
        """Return the result of attention, (batch, heads, seq / cp, head_dim).

        Args:
            q: (batch, heads, seq / cp, head_dim).
            k: (batch, kv heads, seq, head_dim).
            v: (batch, kv heads, seq, head_dim).
            sinks: (heads,), in kinds of layers with sinks.
        """
        options = {"score_mod": self.score_mod, "block_mask": mask, "scale": self.kind.scale}
        options["enable_gqa"] = q.shape[1] != k.shape[1]
        if sinks is None:
            return self.attend(q, k, v, **options)
        out, aux = self.attend(q, k, v, **options, return_aux=AuxRequest(lse=True))
        return with_sinks(out, aux.lse, sinks)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the result of attention with a sink for each head, which takes a share of the softmax.

    Args:
        out: Result without sinks, (batch, heads, seq, head_dim).
        lse: Logarithm of the sum of the exponentials of each query's scores, (batch, heads, seq), fp32.
        sinks: Scores of the sinks, (heads,).
    """
    return (out * (lse - sinks[:, None]).sigmoid()[..., None]).type_as(out)


@dataclass(frozen=True)
class AttentionBackend:
    """Functions that make the masks and the kernels of attention."""

    mask: Callable[[AttentionKind, DeviceMesh, bool, torch.dtype], nn.Module]
    """Function (kind of layer, cp axis, by_document, dtype of the computation) -> module that computes the mask."""
    attention: Callable[[AttentionKind], nn.Module]
    """Function (kind of layer) -> kernel that takes the mask."""


CPU_BACKEND = AttentionBackend(
    lambda kind, cp, by_document, dtype: Mask(kind, cp, by_document, partial(create_dense_mask, dtype=dtype)),
    attention_kernel,
)
GPU_BACKEND = AttentionBackend(
    lambda kind, cp, by_document, dtype: Mask(kind, cp, by_document, torch.compile(create_block_mask)),
    lambda kind: FlexAttention(kind, torch.compile(flex_attention)),
)


def backend_of(device: torch.device) -> AttentionBackend:
    return CPU_BACKEND if device.type == "cpu" else GPU_BACKEND


def is_plain(kind: AttentionKind, layout: SampleLayout) -> bool:
    """Return whether a layer has causal attention to all earlier tokens of the sample, without further operations on the
    scores."""
    is_whole = layout.cp.size() == 1 and not layout.by_document
    return is_whole and not kind.has_window(layout.seq_len) and kind.softcap is None and not kind.sinks


def kernel_name(kind: AttentionKind, layout: SampleLayout, tp: int, device: torch.device) -> str:
    """See mixers.py."""
    is_masked = not is_plain(kind, layout)
    if is_masked and device.type != "cpu":
        return "flex_attention"
    if kind.softcap is not None or kind.sinks:
        return "math"
    width, v_width = kind.widths
    shapes = [(1, kind.n_heads // tp, layout.seq_len // layout.cp.size(), width)]
    shapes += [(1, kind.n_kv_heads // tp, layout.seq_len, w) for w in (width, v_width)]
    q, k, v = (torch.empty(shape, dtype=layout.dtype, device=device, requires_grad=True) for shape in shapes)
    mask = torch.empty(1, 1, q.shape[2], k.shape[2], dtype=layout.dtype, device=device) if is_masked else None
    gqa = q.shape[1] != k.shape[1]
    return SDPBackend(torch._fused_sdp_choice(q, k, v, mask, is_causal=not is_masked, enable_gqa=gqa)).name.lower()


def replacement(kind: AttentionKind, layout: SampleLayout, backend: AttentionBackend) -> Replacement | None:
    """Return the mask and the kernels of layers whose attention is not plain. Keys and values are gathered over cp."""
    if is_plain(kind, layout):
        return None

    def kernel(recomputes: bool) -> nn.Module:
        attend = backend.attention(kind)
        return AllGatherAttention(attend, layout.cp, recomputes) if layout.cp.size() > 1 else attend

    return Replacement(backend.mask(kind, layout.cp, layout.by_document, layout.dtype), kernel)
