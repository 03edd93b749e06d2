"""Attention: its masks, its kernels, and the mixer that most families use."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.context import Context
from models.rope import rotate_halves, without_rotation
from models.spec import LayerKind


@dataclass(frozen=True, kw_only=True)
class AttentionKind(LayerKind):
    """A kind of layer whose mixer is causal attention."""

    MIXER: ClassVar = "attention"
    HEADS: ClassVar = ("n_heads", "n_kv_heads")
    n_heads: int
    n_kv_heads: int
    """Number of heads of keys and values."""
    widths: tuple[int, int]
    """Width of a head's queries and keys, and of its values."""
    window: int | None = None
    """Number of keys that a query attends to: its own and those before it. None: all of them."""
    scale: float | None = None
    """Factor of the scores. None: 1 / sqrt(width of a query)."""
    softcap: float | None = None
    """Limit of the scores: softcap * tanh(score / softcap) replaces a score (Gemma Team 2024, arXiv:2408.00118)."""
    sinks: bool = False
    """Whether the softmax of each head has one more score, a parameter without a key and a value (OpenAI 2025,
    arXiv:2508.10925). The kernels receive these scores."""

    def has_window(self, seq_len: int) -> bool:
        """Return whether a query of a sequence of this length does not attend to all earlier keys."""
        return self.window is not None and self.window < seq_len

    def pairs(self, seq_len: int) -> int:
        """Return the number of pairs of a query and a key that it attends to, in a sequence."""
        window = min(self.window or seq_len, seq_len)
        return window * (window + 1) // 2 + (seq_len - window) * window

    def reach(self, seq_len: int) -> int:
        return min(self.window or seq_len, seq_len) - 1

    def multiply_adds(self, seq_len: int) -> int:
        """See LayerKind: the products of queries and keys, and of weights and values."""
        return self.n_heads * sum(self.widths) * self.pairs(seq_len)

    def mask(self) -> "CausalMask":
        return CausalMask(self.window)


def visible_keys(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return whether a query attends to a key, (queries, keys), boolean. The queries belong to the last keys."""
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return visible if window is None else visible.triu_(keys - queries + 1 - window)


class CausalMask(nn.Module):
    """A token attends to itself and to earlier tokens of its sample and of its window, even if they belong to other documents."""

    def __init__(self, window: int | None):
        super().__init__()
        self.window = window

    def forward(self, context: Context) -> Tensor | None:
        """Return whether each token (row) attends to each token (column), (seq, seq), boolean. None if the window hides nothing:
        without a mask, the kernel is causal."""
        seq = context.positions.shape[1]
        if self.window is None or self.window >= seq:
            return None
        return visible_keys(seq, seq, self.window, context.positions.device)


class CausalAttention(nn.Module):
    """The attention kernel. Without a mask, q, k and v must contain the full sequence in order."""

    def __init__(self, kind: AttentionKind):
        super().__init__()
        self.kind = kind

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None = None) -> Tensor:
        """Return the result of attention, (batch, heads, seq, head_dim).

        Args:
            q: (batch, heads, seq, head_dim).
            k: (batch, kv heads, seq, head_dim).
            v: (batch, kv heads, seq, head_dim).
            mask: Added to the scores, or boolean; broadcast to (batch, heads, seq, seq). None: causal attention, in which a
                single query attends to all keys.
            sinks: One score for each head, (heads,), in kinds of layers with sinks. Otherwise None.
        """
        is_causal = mask is None and q.shape[2] > 1
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=self.kind.scale, enable_gqa=gqa)


class ExplicitAttention(CausalAttention):
    """The attention kernel with a limit for the scores, or with sinks. It computes all scores at once, so it takes memory in
    proportion to the square of the sequence length."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None = None) -> Tensor:
        scale, cap = q.shape[-1] ** -0.5 if self.kind.scale is None else self.kind.scale, self.kind.softcap
        groups = q.unflatten(1, (k.shape[1], -1))  # (batch, kv heads, heads per kv head, seq, head_dim)
        scores = groups @ k[:, :, None].mT * (scale if cap is None else scale / cap)
        if cap is not None:
            scores = scores.tanh() * cap
        if mask is None and q.shape[2] > 1:
            mask = visible_keys(*scores.shape[-2:], None, scores.device)
        if mask is not None:
            mask = mask[:, :, None] if mask.dim() == 4 else mask
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        if sinks is None:
            weights = scores.softmax(-1, dtype=torch.float32)
        else:
            sink = sinks.view(k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)  # a column without a key
            weights = torch.cat((scores, sink), -1).softmax(-1, dtype=torch.float32)[..., :-1]
        return (weights.type_as(v) @ v[:, :, None]).flatten(1, 2)


def attention_kernel(kind: AttentionKind) -> CausalAttention:
    return CausalAttention(kind) if kind.softcap is None and not kind.sinks else ExplicitAttention(kind)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245)."""

    TENSOR: ClassVar = {
        "": "gather",
        "wq": "column",
        "wk": "column",
        "wv": "column",
        "wo": "row",
        "q_norm": "head_norm",
        "k_norm": "head_norm",
    }
    INTO_RESIDUAL: ClassVar = ("wo",)
    BIASES: ClassVar = ("sinks",)

    def __init__(
        self,
        dim: int,
        kind: AttentionKind,
        rotate: Callable[[Tensor, Any], Tensor] = rotate_halves,
        qkv_bias: bool = False,
        out_bias: bool = False,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
    ):
        """Build the layer.

        Args:
            dim: Width of the hidden state.
            kind: Kind of the layer.
            rotate: Function that applies the positional encoding to queries and keys.
            qkv_bias: Whether wq, wk and wv have biases.
            out_bias: Whether wo has a bias.
            q_norm: Norm of the queries, (batch, seq, heads, head_dim). None: no norm.
            k_norm: Norm of the keys, likewise.
        """
        super().__init__()
        self.kind = kind
        self.head_dim, _ = kind.widths
        self.rotate = rotate if kind.rope is not None else without_rotation
        q_dim, kv_dim = kind.n_heads * self.head_dim, kind.n_kv_heads * self.head_dim
        self.wq = nn.Linear(dim, q_dim, bias=qkv_bias)
        self.wk = nn.Linear(dim, kv_dim, bias=qkv_bias)
        self.wv = nn.Linear(dim, kv_dim, bias=qkv_bias)
        self.wo = nn.Linear(q_dim, dim, bias=out_bias)
        self.q_norm = q_norm or nn.Identity()
        self.k_norm = k_norm or nn.Identity()
        self.sinks = nn.Parameter(torch.empty(kind.n_heads)) if kind.sinks else None
        self.core = attention_kernel(kind)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x: (batch, seq, dim)."""
        # -1, not n_heads: under tensor parallelism a rank holds only its own heads.
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim))  # (batch, seq, local heads, head_dim)
            for w in (self.wq, self.wk, self.wv)
        )
        return self.wo(self.attend(q, k, v, context).flatten(-2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Return the result of each head, (batch, seq, local heads, head_dim), for queries, keys and values likewise."""
        q, k = self.encode_positions(self.q_norm(q), self.k_norm(k), context.rope)
        out = self.core(*(x.transpose(1, 2) for x in (q, k, v)), context.mask, self.sinks)
        return out.transpose(1, 2)

    def encode_positions(self, q: Tensor, k: Tensor, rope: Any) -> tuple[Tensor, Tensor]:
        return self.rotate(q, rope), self.rotate(k, rope)
