"""The Llama model (Touvron et al. 2023, arXiv:2307.09288; Llama Team 2024, arXiv:2407.21783) and its initial weights.

Plain torch on one device: parallelism, precision, checkpointing and export are applied from outside, by module name.
Names are Meta's: tok_embeddings, layers.N.attention.wq, layers.N.feed_forward.w1, norm, output.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from models.llama.sizes import LlamaSizes
from models.recompute import call_with_recomputed
from models.spec import Head


def rope_frequencies(sizes: LlamaSizes, device: torch.device) -> Tensor:
    """Return the rotation frequency of each pair of head dims (Su et al. 2021, arXiv:2104.09864), in radians per position.
    Shape (head_dim / 2,), fp32.

    If rope_factor is not 1, Llama 3.1's scaling applies. It depends on how many turns a pair makes within original_seq_len. Below
    rope_low_freq_factor turns, the frequency is divided by rope_factor. Above rope_high_freq_factor turns, the frequency is
    unchanged. Between these two limits, the frequency is interpolated.
    """
    pairs = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = sizes.rope_theta ** (-pairs / sizes.head_dim)
    if sizes.rope_factor == 1.0:
        return frequencies
    turns = sizes.original_seq_len * frequencies / (2 * math.pi)
    low, high = sizes.rope_low_freq_factor, sizes.rope_high_freq_factor
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (unscaled + (1 - unscaled) / sizes.rope_factor)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate each pair of neighbouring values in the last dim (Meta's layout). x: (batch, seq, heads, head_dim). rope: result of
    Llama.rope."""
    pairs = x.float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # the compiler cannot fuse complex products
        (even, odd), (cos, sin) = pairs.unbind(-1), rope.unbind(-1)
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    else:
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rope))
    return rotated.flatten(-2).type_as(x)


class CausalMask(nn.Module):
    """The attention mask, computed once for all blocks. The trainer replaces this module if a run needs another mask.

    Every token attends to itself and to all earlier tokens of its sample, even if they belong to other documents. The mask is
    None, because CausalAttention is causal without a mask.
    """

    def forward(self, positions: Tensor, documents: Tensor) -> None:
        """positions, documents: (batch, seq)."""


class CausalAttention(nn.Module):
    """The attention kernel. Without a mask, q, k and v must contain the full sequence in order."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q: (batch, heads, seq, head_dim); k, v: (batch, kv heads, seq, head_dim). mask: added to the scores, broadcast to
        (batch, heads, seq, seq); None for causal attention."""
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=gqa)


class Attention(nn.Module):
    """Grouped-query attention with rotary embeddings."""

    def __init__(self, sizes: LlamaSizes):
        super().__init__()
        self.head_dim = sizes.head_dim
        kv_dim = sizes.n_kv_heads * sizes.head_dim
        self.wq = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.wk = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.wv = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.wo = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.core = CausalAttention()

    def forward(self, x: Tensor, rope: Tensor, mask: Any) -> Tensor:
        # -1, not n_heads: under tensor parallelism a rank holds only its own heads.
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim))  # (batch, seq, local heads, head_dim)
            for w in (self.wq, self.wk, self.wv)
        )
        out = self.core(*(x.transpose(1, 2) for x in (rotate(q, rope), rotate(k, rope), v)), mask)
        return self.wo(out.transpose(1, 2).flatten(-2))


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202). Autograd saves the two factors, but not silu(gate)."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.factors = None
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.factors or ctx.saved_tensors
        ctx.factors = None
        return torch.ops.aten.silu_backward(gradient * up, gate), F.silu(gate).mul_(gradient)

    @staticmethod
    def recompute(ctx: Any) -> Tensor:
        """Compute the result of forward from the saved factors. Backward must not have run yet. ctx: the result's `grad_fn`."""
        gate, up = ctx.factors = ctx.saved_tensors  # an activation checkpoint provides them only once
        return F.silu(gate).mul_(up)


class FeedForward(nn.Module):
    def __init__(self, sizes: LlamaSizes):
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.hidden_dim, bias=False)
        self.w2 = nn.Linear(sizes.hidden_dim, sizes.dim, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x), self.w3(x)  # (batch, seq, local hidden)
        if torch.compiler.is_compiling():
            return self.w2(F.silu(gate) * up)  # the compiler chooses which tensors to save
        hidden = SwiGLU.apply(gate, up)
        if hidden.grad_fn is None:
            return self.w2(hidden)
        # Autograd would save four tensors; two are saved.
        return call_with_recomputed(self.w2, hidden, partial(SwiGLU.recompute, hidden.grad_fn))


class Block(nn.Module):
    def __init__(self, sizes: LlamaSizes):
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.feed_forward = FeedForward(sizes)

    def forward(self, h: Tensor, rope: Tensor, mask: Any) -> Tensor:
        h = h + self.attention(self.attention_norm(h), rope, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class Output(nn.Linear):
    """Projection to the vocabulary. The head runs inside this module, because FSDP gathers the weight only for this module."""

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
        rope, mask = self.rope(positions), self.mask(positions, documents)
        h = self.tok_embeddings(tokens)  # (batch, seq, dim)
        for layer in self.layers.values():
            h = layer(h, rope, mask)
        return self.output(self.norm(h), head)

    def rope(self, positions: Tensor) -> Tensor:
        """Return the cosine and the sine of each pair's angle, shape (batch, seq, 1, head_dim / 2, 2), fp32. Every forward
        computes them, because a buffer could be damaged by a checkpoint, a cast or a move between devices."""
        angles = positions[:, :, None, None].float() * rope_frequencies(self.sizes, positions.device)
        return torch.stack((angles.cos(), angles.sin()), dim=-1)

    def init_parameter(self, name: str, rows: Tensor, generator: Generator) -> None:
        """See models.spec.Model. Matrices are drawn from a normal distribution with variance 1 / (number of inputs)
        (LeCun et al. 1998, "Efficient BackProp"). The variance of the embedding table is 1 / dim, because the table may also be
        the output weight. The weights of wo and w2 are divided by sqrt(2 n_layers), because their outputs are added to the
        residual stream (Radford et al. 2019, GPT-2). Norm weights start at one."""
        if name.endswith("norm.weight"):
            rows.fill_(1.0)
            return
        into_residual = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
        std = rows.shape[1] ** -0.5
        rows.normal_(0.0, std / math.sqrt(2 * self.sizes.n_layers) if into_residual else std, generator=generator)

    def flops_per_token(self, seq_len: int) -> int:
        """See models.spec.Model. A multiply-add is two operations. Backward costs twice as much as forward.

        The count includes every linear layer (also the output projection) and the two matrix products of attention. A token
        attends to (seq_len + 1) / 2 keys on average. Norms, activations and recomputation are not counted.
        """
        linear = sum(m.in_features * m.out_features for m in self.modules() if isinstance(m, nn.Linear))
        attention = self.sizes.n_layers * 2 * self.sizes.dim * (seq_len + 1) // 2
        return 3 * 2 * (linear + attention)
