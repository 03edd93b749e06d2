"""Recurrences with the delta rule: the kernel, what it carries over the boundaries of a row, and the mixer Gated DeltaNet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from models.affine_scan import AffineMaps
from models.components import Gate, at_least_fp32
from models.context import Context
from models.spec import LayerKind

CHUNK = 64
"""Number of tokens that are computed at once. Chunks follow each other."""


@dataclass(frozen=True, kw_only=True)
class RecurrentKind(LayerKind):
    """A kind of layer whose mixer is a recurrence: short convolutions of queries, keys and values, and a state for each head."""

    MIXER: ClassVar = "delta_net"
    HEADS: ClassVar = ("linear_num_key_heads", "linear_num_value_heads")
    IS_RECURRENT: ClassVar = True
    KERNEL: ClassVar = "gated_delta_rule"
    """Name of the kernel, for messages."""
    key_heads: int
    value_heads: int
    widths: tuple[int, int]
    """Width of a head's queries and keys, and of its values. The state of a head is a matrix of this shape."""
    filter_width: int
    """Number of tokens that a convolution reads: a token's own and those before it."""

    @property
    def reads_before(self) -> int:
        return self.filter_width - 1

    @property
    def channels(self) -> int:
        """Number of values of a token's queries, keys and values together."""
        return 2 * self.key_heads * self.widths[0] + self.value_heads * self.widths[1]

    def reach(self, seq_len: int) -> int:
        return seq_len - 1

    def multiply_adds(self, seq_len: int) -> int:
        """See LayerKind. A token reads its head's state with its key and with its query, and adds one outer product to it. That
        is what the recurrence needs; the chunked form computes more, in matrix products."""
        return seq_len * (3 * self.value_heads * math.prod(self.widths) + self.filter_width * self.channels)

    def mask(self) -> "WholeSample":
        return WholeSample()

    def kernel(self, carry: "Carry") -> "DeltaRule":
        return DeltaRule(carry)


class WholeSample(nn.Module):
    """The mask of recurrences whose state passes through all tokens of a row, even of several documents."""

    def forward(self, context: Context) -> Tensor | None:
        return None


class Carry(nn.Module):
    """What the kernels of one layer carry into the rows of their input. Here a row begins with nothing. The trainer replaces this
    module if a row continues another one: tokens in a cache, or the part of the sequence that another rank has."""

    def rows(self, x: Tensor) -> Tensor:
        """Return the rows of a tensor, (rows, tokens, ...). x: (batch, seq, ...)."""
        return x

    def batch(self, x: Tensor) -> Tensor:
        """Inverse of `rows`."""
        return x

    def tokens_before(self, parts: Sequence[Tensor], count: int) -> Tensor:
        """Return the last tokens before each row, (rows, count, channels of all parts). parts: of the rows' tokens, each (rows,
        tokens, channels)."""
        return parts[0].new_zeros(len(parts[0]), count, sum(x.shape[-1] for x in parts))

    def state_before(self, maps: AffineMaps) -> Tensor | None:
        """Return the state before each row, (rows, heads, key_dim, value_dim), or None for zero. maps: of the chunks."""
        return None

    def keep(self, state: Tensor) -> None:
        """Receive the state after each row."""


class DeltaRule(nn.Module):
    """The kernel of the gated delta rule (Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464). A head's state maps keys
    to values. A token lets it decay by a, then corrects the value that it has for the token's key, in part b:

        S_t = a_t (1 - b_t k_t k_t^T) S_t-1 + b_t k_t v_t^T        o_t = S_t^T q_t

    Before, queries, keys and values pass a short convolution, and queries and keys are divided by their norms. All is computed in
    fp32 (in fp64, if that is the dtype), and in chunks of tokens, as in section 3.3 of the paper: within a chunk by products of
    matrices, from chunk to chunk by the state.
    """

    def __init__(self, carry: Carry):
        super().__init__()
        self.carry = carry

    def forward(
        self,
        qkv: Sequence[Tensor],
        filters: Sequence[Tensor],
        log_decay: Tensor,
        beta: Tensor,
        documents: Tensor | None,
    ) -> Tensor:
        """Return the result of the recurrence, (batch, seq, value heads, value_dim).

        Args:
            qkv: Queries, keys and values, each (batch, seq, heads, width).
            filters: Of their convolutions, each (channels, 1, filter width).
            log_decay: Logarithm of a, (batch, seq, value heads, 1), fp32. With a value for each channel of a key, its last dim is
                key_dim (see ChannelDeltaRule).
            beta: b, (batch, seq, value heads).
            documents: Document of each token, and of the tokens before each row that a convolution reads, (rows, filter width - 1
                + tokens). At a boundary, the state becomes zero. None: no boundaries.
        """
        rows = self.carry.rows
        q, k, v = self._convolved([rows(x) for x in qkv], filters, documents)
        q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
        groups = v.shape[2] // k.shape[2]  # heads of values that share queries and keys
        q, k = (x.repeat_interleave(groups, 2) for x in (q, k)) if groups > 1 else (q, k)
        segments = None if documents is None else segments_of(documents, filters[0].shape[-1] - 1)
        out = self._in_chunks(q, k, v, rows(log_decay), rows(beta), segments)
        return self.carry.batch(out).type_as(qkv[2])

    def _convolved(self, qkv: Sequence[Tensor], filters: Sequence[Tensor], documents: Tensor | None) -> list[Tensor]:
        """Return the convolutions of queries, keys and values, in fp32."""
        flat = [x.flatten(2) for x in qkv]
        before = self.carry.tokens_before(flat, filters[0].shape[-1] - 1)
        parts = before.split([x.shape[-1] for x in flat], -1)
        convolved = (
            short_convolution(torch.cat((part, x), 1), weights[:, 0], documents)
            for x, part, weights in zip(flat, parts, filters, strict=True)
        )
        return [x.view(original.shape) for x, original in zip(convolved, qkv, strict=True)]

    def _in_chunks(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, segments: Tensor | None
    ) -> Tensor:
        """Return the result for rows of tokens, (rows, tokens, heads, value_dim). See forward and segments_of."""
        tokens = q.shape[1]
        size = min(CHUNK, 1 << (tokens - 1).bit_length())  # a power of two
        q, k, v, g, b = (chunked(x, size) for x in (q, k, v, log_decay, beta[..., None]))
        boundaries = boundaries_of(segments, size, g)
        # Sums over the tokens, (chunks, rows, heads, size, 1 or key_dim). What is beyond a boundary must not change the rounding.
        g = g.cumsum(-2) if segments is None else boundaries.visible.type_as(g) @ g
        from_before, to_after = decays_of(g, boundaries)
        system, scores = self.products((b * k, q), k, g, boundaries.visible)
        # A token corrects u - w S, for the state S before the chunk: its own correction less those of the chunk's earlier tokens.
        corrections = torch.cat((b * v, b * k * from_before), -1)
        u_w = torch.linalg.solve_triangular(system, corrections, upper=False, unitriangular=True)
        u, w = u_w.split((v.shape[-1], k.shape[-1]), -1)
        added = (k * to_after).mT
        remains = from_before[..., -1:, :] * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        maps = AffineMaps(remains - added @ w, added @ u)
        states = maps.states(self.carry.state_before(maps))
        self.carry.keep(states[-1])
        before = states[:-1]
        out = (q * from_before) @ before + scores @ (u - w @ before)
        return out.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :tokens]

    def products(self, factors: Sequence[Tensor], k: Tensor, g: Tensor, visible: Tensor) -> list[Tensor]:
        """Return the products of the tokens of a chunk (rows) with the keys that they see (columns), which have decayed since,
        (chunks, rows, heads, size, size), for each factor.

        Args:
            factors: Each (chunks, rows, heads, size, key_dim).
            k: Likewise.
            g: Sums of the logarithms of the decay, (chunks, rows, heads, size, 1 or key_dim).
            visible: See Boundaries.
        """
        decay = (g - g.mT).masked_fill(~visible, float("-inf")).exp()
        return [x @ k.mT * decay for x in factors]


class Boundaries(NamedTuple):
    """What the tokens of a chunk see, boolean."""

    visible: Tensor
    """Whether a token (row) sees a token (column), (..., size, size)."""
    sees_state: Tensor | None
    """Whether a token sees the state before the chunk, (chunks, rows, 1, size, 1). None: all do."""
    reaches_end: Tensor | None
    """Whether the state after the chunk contains a token, likewise."""


def boundaries_of(segments: Tensor | None, size: int, like: Tensor) -> Boundaries:
    """Return the boundaries in chunks.

    Args:
        segments: Result of segments_of. None: no boundaries.
        size: Number of tokens of a chunk.
        like: A tensor of the device.
    """
    causal = torch.ones(size, size, dtype=torch.bool, device=like.device).tril()
    if segments is None:
        return Boundaries(causal, None, None)
    padding = -segments.shape[1] % size
    segments = torch.cat((segments, segments[:, -1:].expand(-1, padding)), 1)
    own = segments.unflatten(1, (-1, size)).transpose(0, 1)[:, :, None, :, None]
    last = own[..., -1:, :]
    before = torch.cat((torch.zeros_like(last[:1]), last[:-1]))
    return Boundaries(causal & (own == own.mT), own == before, own == last)


def decays_of(g: Tensor, boundaries: Boundaries) -> tuple[Tensor, Tensor]:
    """Return how the state before a chunk has decayed at each token, and each token in the state after it, like g: zero beyond a
    boundary. g: see DeltaRule.products."""
    from_before, to_after = g, g[..., -1:, :] - g
    if boundaries.sees_state is not None:
        from_before = from_before.masked_fill(~boundaries.sees_state, float("-inf"))
        # Sums begin anew at a boundary, so that this difference is large, and positive, for a token before one.
        to_after = to_after.masked_fill(~boundaries.reaches_end, float("-inf"))
    return from_before.exp(), to_after.exp()


def segments_of(documents: Tensor, count: int) -> Tensor:
    """Return the number of boundaries between the token before each row and each token, (rows, tokens).

    Args:
        documents: See DeltaRule.
        count: Number of tokens before each row, at least 1.
    """
    return documents[:, count - 1 :].diff().ne(0).cumsum(1)


def chunked(x: Tensor, size: int) -> Tensor:
    """Return a tensor by chunks, (chunks, rows, heads, size, width), the last one padded with zeros. x: (rows, tokens, heads,
    width)."""
    padded = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size)) if x.shape[1] % size else x
    return padded.unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4).contiguous()


def unit(x: Tensor) -> Tensor:
    """Return vectors divided by their norms."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def short_convolution(x: Tensor, weights: Tensor, documents: Tensor | None) -> Tensor:
    """Return SiLU of the causal convolution of each channel, (rows, tokens, channels), in fp32.

    Args:
        x: (rows, width - 1 + tokens, channels), with the tokens before each row.
        weights: Of each channel, the last one for the token itself, (channels, width).
        documents: See DeltaRule.
    """
    width = weights.shape[1]
    tokens = x.shape[1] - width + 1
    x, weights = at_least_fp32(x), at_least_fp32(weights)
    out = x[:, width - 1 :] * weights[:, -1]
    for i in range(width - 1):
        term = x[:, i : i + tokens] * weights[:, i]
        if documents is not None:
            term = term * (documents[:, i : i + tokens] == documents[:, width - 1 :])[..., None]
        out = out + term
    return F.silu(out)


def init_log_rate(rows: Tensor, generator: Generator) -> None:
    """Draw logarithms of the rates A of the decay (Dao and Gu 2024, "Transformers are SSMs", arXiv:2405.21060)."""
    rows.uniform_(0.01, 16.0, generator=generator).log_()


def init_step_bias(rows: Tensor, generator: Generator) -> None:
    """Draw biases of the step sizes dt = softplus(bias), which are log-uniform in [0.001, 0.1] (likewise)."""
    dt = rows.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
    rows.copy_(dt + (-(-dt).expm1()).log())  # the inverse of softplus


def init_filter(rows: Tensor, generator: Generator) -> None:
    """Draw filters of convolutions with the variance 1 / width."""
    rows.normal_(0.0, rows.shape[-1] ** -0.5, generator=generator)


class RecurrentMixer(nn.Module):
    """What mixers with the delta rule have in common: all but the projections of the hidden state."""

    INTO_RESIDUAL: ClassVar = ("wo",)
    FILTERS: ClassVar = ("q_filter", "k_filter", "v_filter")
    BIASES: ClassVar = ("A_log", "dt_bias", *FILTERS)
    INITIAL: ClassVar = {"A_log": init_log_rate, "dt_bias": init_step_bias} | dict.fromkeys(FILTERS, init_filter)

    def __init__(self, dim: int, kind: RecurrentKind, norm_eps: float, decays: int):
        """Build the modules.

        Args:
            dim: Width of the hidden state.
            kind: Kind of the layer.
            norm_eps: Constant of the norm of each head's result.
            decays: Number of the decays of a token, over all heads.
        """
        super().__init__()
        self.kind = kind
        key_dim, value_dim = kind.widths
        keys, values = kind.key_heads * key_dim, kind.value_heads * value_dim
        self.q_filter, self.k_filter, self.v_filter = (
            nn.Parameter(torch.empty(channels, 1, kind.filter_width)) for channels in (keys, keys, values)
        )
        self.A_log = nn.Parameter(torch.empty(kind.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(decays))
        self.norm = nn.RMSNorm(value_dim, norm_eps)
        self.wo = nn.Linear(values, dim, bias=False)
        self.core = kind.kernel(Carry())

    def recur(self, qkv: Sequence[Tensor], log_decay: Tensor, beta: Tensor, context: Context) -> Tensor:
        """Return the norms of the kernel's results, (batch, seq, local value heads, value_dim). See DeltaRule.forward."""
        filters = self.q_filter, self.k_filter, self.v_filter
        return self.norm(self.core(qkv, filters, log_decay, beta, context.mask))


class GatedDeltaNet(RecurrentMixer):
    """Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): the gated delta rule, and a gate on the norm of each head's result.

    The decay is a = exp(-A softplus(wa x + dt_bias)), the part of a correction b = sigmoid(wb x)."""

    TENSOR: ClassVar = {
        "": "gather",
        **dict.fromkeys(("wq", "wk", "wv", "wz", "wa", "wb"), "column"),
        "norm": "head_norm",
        "wo": "row",
    }

    def __init__(self, dim: int, kind: RecurrentKind, norm_eps: float, beta_scale: float = 1.0):
        """Build the layer. See RecurrentMixer.

        Args:
            dim: Width of the hidden state.
            kind: Kind of the layer.
            norm_eps: Constant of the norm.
            beta_scale: Factor of b. With 2, corrections may reverse the sign of a value (Grazzi et al. 2024, arXiv:2411.12537).
        """
        super().__init__(dim, kind, norm_eps, decays=kind.value_heads)
        self.beta_scale = beta_scale
        self.build_projections(dim, kind.key_heads * kind.widths[0], kind.value_heads * kind.widths[1])

    def build_projections(self, dim: int, keys: int, values: int) -> None:
        """Build the projections.

        Args:
            dim: Width of the hidden state.
            keys: Width of the keys of all heads.
            values: Width of the values of all heads.
        """
        self.wq, self.wk = (nn.Linear(dim, keys, bias=False) for _ in range(2))
        self.wv, self.wz = (nn.Linear(dim, values, bias=False) for _ in range(2))
        self.wa, self.wb = (Gate(dim, self.kind.value_heads) for _ in range(2))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys, values and gates, each (batch, seq, local heads, width), and wa x and wb x, each (batch, seq,
        local value heads). x: (batch, seq, dim)."""
        key_dim, value_dim = self.kind.widths
        widths = zip((self.wq, self.wk, self.wv, self.wz), (key_dim, key_dim, value_dim, value_dim), strict=True)
        # -1, not the number of heads: under tensor parallelism a rank holds only its own heads.
        return *(w(x).unflatten(-1, (-1, width)) for w, width in widths), self.wa(x), self.wb(x)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x: (batch, seq, dim)."""
        q, k, v, z, a, b = self.project(x)
        log_decay = -at_least_fp32(self.A_log).exp() * F.softplus(at_least_fp32(a) + self.dt_bias)
        beta = at_least_fp32(b).sigmoid() * self.beta_scale
        out = self.recur((q, k, v), log_decay[..., None], beta, context)
        return self.wo((out * F.silu(at_least_fp32(z))).type_as(x).flatten(-2))
