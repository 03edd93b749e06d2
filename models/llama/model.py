"""The Llama network (Touvron et al. 2023, arXiv:2307.09288; Llama Team 2024, arXiv:2407.21783) and its initial weights.

Plain torch on one device: parallelism, precision, checkpointing and export come from outside, by module name.
Names are Meta's: tok_embeddings, layers.N.attention.wq, layers.N.feed_forward.w1, norm, output.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.llama.sizes import LlamaSizes

Head = Callable[[Tensor, Tensor], Tensor]


def rope_frequencies(sizes: LlamaSizes, device: torch.device) -> Tensor:
    """Radians per position of each pair of a head: (head_dim / 2), fp32.

    Su et al. 2021 (arXiv:2104.09864). With rope_factor, Llama 3.1's scaling: pairs that turn less than low_freq_factor
    times within original_seq_len are slowed by the factor, pairs that turn more than high_freq_factor times stay, and
    those between are interpolated.
    """
    pairs = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = sizes.rope_theta ** (-pairs / sizes.head_dim)
    if sizes.rope_factor == 1.0:
        return frequencies
    turns = sizes.original_seq_len * frequencies / (2 * math.pi)
    low, high = sizes.rope_low_freq_factor, sizes.rope_high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / sizes.rope_factor)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn neighbouring pairs of the last dim (Meta's layout). x: (batch, heads, seq, head_dim)."""
    cos, sin = rope
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).type_as(x)


class CausalMask(nn.Module):
    """Who sees whom: made once for all blocks, in the form that their kernel takes. A seam: exchanged by module name.

    Here every token sees those before it in its sample, of other documents too, which the kernel knows without a mask.
    """

    def forward(self, positions: Tensor, documents: Tensor) -> None:
        """positions, documents: (batch, seq)."""


class CausalAttention(nn.Module):
    """The kernel of attention. The other seam: exchanged by module name, and without parameters. It needs the whole sequence,
    in order."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q: (batch, heads, seq, head_dim); k, v: (batch, kv heads, seq, head_dim); mask: added to the scores, of a shape that
        broadcasts to (batch, heads, seq, seq); None: causal."""
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=gqa)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, sizes: LlamaSizes):
        super().__init__()
        self.head_dim = sizes.head_dim
        kv_dim = sizes.n_kv_heads * sizes.head_dim
        self.wq = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.wk = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.wv = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.wo = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.core = CausalAttention()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        # -1, not n_heads: under tensor parallelism a rank holds only its own heads.
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (batch, local heads, seq, head_dim)
            for w in (self.wq, self.wk, self.wv)
        )
        out = self.core(rotate(q, rope), rotate(k, rope), v, mask)
        return self.wo(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, sizes: LlamaSizes):
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.hidden_dim, bias=False)
        self.w2 = nn.Linear(sizes.hidden_dim, sizes.dim, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x), self.w3(x)  # (batch, seq, local hidden)
        if torch.compiler.is_compiling():
            return self._down(gate, up)  # the compiler decides by itself what is kept
        # Of the four tensors that autograd would keep, two. In backward only the activation is computed again: torch stops
        # where the last kept tensor is there, which is before the product with w2.
        return checkpoint(self._down, gate, up, use_reentrant=False, preserve_rng_state=False)

    def _down(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.w2(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, sizes: LlamaSizes):
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.feed_forward = FeedForward(sizes)

    def forward(self, h: Tensor, rope: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        h = h + self.attention(self.attention_norm(h), rope, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class Output(nn.Linear):
    """Projection to the vocabulary. A head works on the weight in here, while a sharded weight is gathered."""

    def forward(self, h: Tensor, head: Head | None = None) -> Tensor:
        return F.linear(h, self.weight) if head is None else head(h, self.weight)


class Llama(nn.Module):
    def __init__(self, sizes: LlamaSizes):
        super().__init__()
        self.sizes = sizes
        self.mask = CausalMask()
        self.tok_embeddings = nn.Embedding(sizes.vocab_size, sizes.dim)
        self.layers = nn.ModuleDict({str(i): Block(sizes) for i in range(sizes.n_layers)})
        self.norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.output = Output(sizes.dim, sizes.vocab_size, bias=False)
        if sizes.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor, head: Head | None = None) -> Tensor:
        """See models.spec.Network."""
        rope, mask = self.rope(positions), self.mask(positions, documents)
        h = self.tok_embeddings(tokens)  # (batch, seq, dim)
        for layer in self.layers.values():
            h = layer(h, rope, mask)
        return self.output(self.norm(h), head)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each pair's angle: (batch, 1, seq, head_dim / 2), fp32. Computed, so there is no buffer
        that a checkpoint, a cast or a move between devices could spoil."""
        angles = positions[:, None, :, None].float() * rope_frequencies(self.sizes, positions.device)
        return angles.cos(), angles.sin()

    def init_parameter(self, name: str, rows: Tensor, generator: Generator) -> None:
        """See models.spec.Network. Matrices are normal with variance 1 / (number of inputs) (LeCun et al. 1998, "Efficient
        BackProp"), the embedding table, which may be the output's too, with 1 / dim. The two projections that write into
        the residual stream are divided by sqrt(2 n_layers) (Radford et al. 2019, GPT-2). Norms start at one."""
        if name.endswith("norm.weight"):
            rows.fill_(1.0)
            return
        into_residual = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
        std = rows.shape[1] ** -0.5
        rows.normal_(0.0, std / math.sqrt(2 * self.sizes.n_layers) if into_residual else std, generator=generator)

    def flops_per_token(self, seq_len: int) -> int:
        """See models.spec.Network. Two operations per multiply-add; backward costs twice the forward.

        Counted: every linear layer, the output included, and attention's two products over the causal half of the
        scores, (seq_len + 1) / 2 keys on average. Not counted: norms, activations, recomputation.
        """
        linear = sum(m.in_features * m.out_features for m in self.modules() if isinstance(m, nn.Linear))
        attention = self.sizes.n_layers * 2 * self.sizes.dim * (seq_len + 1) // 2
        return 3 * 2 * (linear + attention)
