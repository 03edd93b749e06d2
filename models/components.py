"""Components of a decoder: norms, feed-forward layers, attention, embedding and output.

A module states facts about itself in class variables: TENSOR, BUFFERS and BIASES, which models/spec.py explains, WIDTH
(models/width.py), and INTO_RESIDUAL, the names of its matrices whose products are added to the residual stream.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.context import Context
from models.rope import rotate_halves, without_rotation
from models.sizes import Sizes
from models.spec import Head, LayerKind

Norm = Callable[[int], nn.Module]
"""Function (width) -> norm."""
Activation = Callable[[Tensor], Tensor]

# ---------------------------------------------------------------- norms


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in fp32. The weight starts at zero."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)


class AllHeadsRMSNorm(nn.RMSNorm):
    """RMSNorm over the dims of all heads together."""

    TENSOR: ClassVar = {"": "all_heads_norm"}

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq, heads, head_dim)."""
        return super().forward(x.flatten(-2)).view_as(x)


# ---------------------------------------------------------------- feed-forward layers


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class FeedForward(nn.Module):
    """SwiGLU, or GeGLU with the activation gelu_tanh (Shazeer 2020, arXiv:2002.05202)."""

    TENSOR: ClassVar = {"": "gather", "w1": "column", "w3": "column", "w2": "row"}
    INTO_RESIDUAL: ClassVar = ("w2",)

    def __init__(self, dim: int, hidden_dim: int, activation: Activation = F.silu):
        super().__init__()
        self.activation = activation
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """x: (batch, seq, dim). The context has no effect; blocks pass it to every kind of layer."""
        return self.w2(self.activation(self.w1(x)) * self.w3(x))


# ---------------------------------------------------------------- attention


def visible_keys(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return whether a query attends to a key, (queries, keys), boolean. The queries belong to the last keys."""
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return visible if window is None else visible.triu_(keys - queries + 1 - window)


class CausalMask(nn.Module):
    """The mask of one kind of layer, computed once for all layers of the kind. The trainer replaces this module if a run needs
    another mask.

    Every token attends to itself and to earlier tokens of its sample and of its window, even if they belong to other documents.
    """

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

    def __init__(self, kind: LayerKind):
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


def attention_kernel(kind: LayerKind) -> CausalAttention:
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
        sizes: Sizes,
        kind: LayerKind,
        rotate: Callable[[Tensor, Any], Tensor] = rotate_halves,
        qkv_bias: bool = False,
        out_bias: bool = False,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
    ):
        """Build the layer.

        Args:
            sizes: Dimensions of the model.
            kind: Kind of the layer, which has the scale and the window of its attention.
            rotate: Function that applies the positional encoding to queries and keys.
            qkv_bias: Whether wq, wk and wv have biases.
            out_bias: Whether wo has a bias.
            q_norm: Norm of the queries, (batch, seq, heads, head_dim). None: no norm.
            k_norm: Norm of the keys, likewise.
        """
        super().__init__()
        self.head_dim = sizes.head_dim
        self.rotate = rotate if kind.rope is not None else without_rotation
        q_dim, kv_dim = sizes.n_heads * sizes.head_dim, sizes.n_kv_heads * sizes.head_dim
        self.wq = nn.Linear(sizes.dim, q_dim, bias=qkv_bias)
        self.wk = nn.Linear(sizes.dim, kv_dim, bias=qkv_bias)
        self.wv = nn.Linear(sizes.dim, kv_dim, bias=qkv_bias)
        self.wo = nn.Linear(q_dim, sizes.dim, bias=out_bias)
        self.q_norm = q_norm or nn.Identity()
        self.k_norm = k_norm or nn.Identity()
        self.sinks = nn.Parameter(torch.empty(sizes.n_heads)) if kind.sinks else None
        self.core = attention_kernel(kind)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x: (batch, seq, dim)."""
        # -1, not n_heads: under tensor parallelism a rank holds only its own heads.
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim))  # (batch, seq, local heads, head_dim)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k = self.encode_positions(self.q_norm(q), self.k_norm(k), context.rope)
        out = self.core(*(x.transpose(1, 2) for x in (q, k, v)), context.mask, self.sinks)
        return self.wo(out.transpose(1, 2).flatten(-2))

    def encode_positions(self, q: Tensor, k: Tensor, rope: Any) -> tuple[Tensor, Tensor]:
        return self.rotate(q, rope), self.rotate(k, rope)


# ---------------------------------------------------------------- embedding and output


class ScaledEmbedding(nn.Embedding):
    """An embedding whose result is multiplied by a constant."""

    def __init__(self, vocab_size: int, dim: int, scale: float):
        super().__init__(vocab_size, dim)
        self.scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale


class Output(nn.Linear):
    """Projection to the vocabulary. The head runs inside this module, because FSDP gathers the weight only for this module. The
    weight may have a higher precision than the hidden states."""

    WIDTH: ClassVar = "output"

    def __init__(self, dim: int, vocab_size: int, softcap: float | None = None):
        """softcap: limit of the logits: softcap * tanh(logit / softcap) replaces a logit."""
        super().__init__(dim, vocab_size, bias=False)
        self.softcap = softcap

    def forward(self, h: Tensor, head: Head | None = None) -> Tensor:
        if head is not None:
            return head(h, self.weight, self.softcap)
        logits = F.linear(h, self.weight.to(h.dtype))
        if self.softcap is None:
            return logits
        return (logits / self.softcap).tanh() * self.softcap
