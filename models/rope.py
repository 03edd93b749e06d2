"""Rotary positional embeddings (Su et al. 2021, arXiv:2104.09864) and their extensions to longer sequences."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Angles by which queries and keys are rotated. Subclasses scale the frequencies."""

    dim: int
    """Number of rotated dims of each head."""
    theta: float

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the rotation of each pair of dims, in radians per position. Shape (dim / 2,), fp32."""
        pairs = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device)
        return self.theta ** (-pairs / self.dim)

    @property
    def amplitude(self) -> float:
        """Factor of cosine and sine."""
        return 1.0

    def __call__(self, positions: Tensor) -> Tensor:
        """Return the cosine and the sine of each pair's angle, shape (batch, seq, 1, dim / 2, 2), fp32. Every forward computes
        them, because a buffer could be damaged by a checkpoint, a cast or a move between devices."""
        angles = positions[:, :, None, None].float() * self.frequencies(positions.device)
        table = torch.stack((angles.cos(), angles.sin()), dim=-1)
        return table if self.amplitude == 1.0 else table * self.amplitude


@dataclass(frozen=True, kw_only=True)
class LinearRope(Rope):
    """Positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float

    def frequencies(self, device: torch.device) -> Tensor:
        return super().frequencies(device) / self.factor


@dataclass(frozen=True, kw_only=True)
class ProportionalRope(Rope):
    """Rotates only the fastest pairs, with the frequencies that they have if all are rotated. The others do not turn."""

    fraction: float
    """Part of the pairs that is rotated."""

    def frequencies(self, device: torch.device) -> Tensor:
        frequencies = super().frequencies(device)
        rotated = int(self.fraction * self.dim // 2)
        return torch.cat((frequencies[:rotated], torch.zeros_like(frequencies[rotated:])))


@dataclass(frozen=True, kw_only=True)
class Llama3Rope(Rope):
    """Llama 3.1's scaling. It depends on how many turns a pair makes within original_seq_len. Below low_freq_factor turns, the
    frequency is divided by `factor`. Above high_freq_factor turns, the frequency is unchanged. Between these two limits, the
    frequency is interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_seq_len: int

    def frequencies(self, device: torch.device) -> Tensor:
        frequencies = super().frequencies(device)
        turns = self.original_seq_len * frequencies / (2 * math.pi)
        unscaled = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies * (unscaled + (1 - unscaled) / self.factor)


@dataclass(frozen=True, kw_only=True)
class YarnRope(Rope):
    """YaRN (Peng et al. 2023, arXiv:2309.00071). Pairs that turn more than beta_fast times within original_seq_len keep their
    frequency. Pairs that turn less than beta_slow times have it divided by `factor`. Between, it is interpolated by index."""

    factor: float
    original_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the indices of the first and the last interpolated pair are rounded to integers."""
    attention_factor: float | None = None
    """Factor of cosine and sine. None: computed from `factor`, mscale and mscale_all_dim."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    """If both are set, cosine and sine have the factor (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)."""

    def frequencies(self, device: torch.device) -> Tensor:
        first, last = (
            self.dim * math.log(self.original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.dim - 1)
        pairs = torch.arange(self.dim // 2, dtype=torch.float32, device=device)
        scaled = ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
        return super().frequencies(device) * (1 - scaled + scaled / self.factor)

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.amplitude_of(self.mscale) / self.amplitude_of(self.mscale_all_dim)
        return self.amplitude_of(1.0)

    def amplitude_of(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class LongRope(Rope):
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): each pair's frequency is divided by its own factor."""

    short_factors: tuple[float, ...]
    """Divisor of each pair's frequency, for sequences of at most original_seq_len."""
    long_factors: tuple[float, ...]
    """Divisor of each pair's frequency, for longer sequences."""
    is_long: bool = False
    """Whether the run has longer sequences, which use the long factors."""
    factor: float
    """Context window divided by original_seq_len."""
    original_seq_len: int
    attention_factor: float | None = None
    """Factor of cosine and sine. None: computed from `factor` and original_seq_len."""

    def frequencies(self, device: torch.device) -> Tensor:
        factors = self.long_factors if self.is_long else self.short_factors
        # Not tensor(..., device=device), for which the host would wait for the device.
        return super().frequencies(device) / torch.tensor(factors).to(device, non_blocking=True)

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_seq_len)) if self.factor > 1 else 1.0


def rotate_pairs(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate each pair of neighbouring values in the last dim (Meta's layout).

    Args:
        x: (batch, seq, heads, head_dim).
        rope: Result of Rope.
    """
    (even, odd), (cos, sin) = x.float().unflatten(-1, (-1, 2)).unbind(-1), rope.unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)


def rotate_halves(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate pairs whose values are half of the rotated dims apart (Hugging Face's layout). If rope has fewer pairs than
    head_dim / 2, the last dims are not rotated.

    Args:
        x: (batch, seq, heads, head_dim).
        rope: Result of Rope.
    """
    cos, sin = rope.unbind(-1)
    pairs = cos.shape[-1]
    first, second, rest = x.float().split((pairs, pairs, x.shape[-1] - 2 * pairs), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).type_as(x)


def without_rotation(x: Tensor, rope: None) -> Tensor:
    """Return x: the layer has no positional encoding (Kazemnejad et al. 2023, arXiv:2305.19466)."""
    return x
