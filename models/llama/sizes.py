"""Named sizes of the Llama families, with the dimensions that Meta published."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from models.spec import SizeError

# The upper limits keep arithmetic in range: of int64 for the bytes of a matrix, and of fp32 for the rotary frequencies.
_RULES: dict[type, tuple[str, Callable[[Any], bool]]] = {
    int: ("an integer from 1 to 2**24", lambda value: type(value) is int and 1 <= value <= 2**24),
    float: ("a number from 1e-30 to 1e30", lambda value: type(value) in (int, float) and 1e-30 <= value <= 1e30),
    bool: ("true or false", lambda value: type(value) is bool),
}


def text_of(value: Any) -> str:
    """Return a value of a configuration file as the file writes it, in at most 40 characters."""
    return f"{json.dumps(value):.40}"


def require(name: str, value: Any, type_: type) -> None:
    """Raise SizeError if the value is not of this type or out of range."""
    rule, holds = _RULES[type_]
    if not holds(value):
        raise SizeError(f"{name} {text_of(value)} must be {rule}", name)


@dataclass(frozen=True, kw_only=True)
class LlamaSizes:
    """Dimensions of a Llama model. Raises SizeError if they are invalid or do not fit each other."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    """Width of the feed-forward layer."""
    vocab_size: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    """Whether the output projection uses the embedding table as its weight."""
    rope_factor: float = 1.0
    """Factor by which positions may exceed original_seq_len (Llama 3.1); 1 disables the scaling of frequencies."""
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    original_seq_len: int = 8192
    """Sequence length of the original training, before the frequencies were scaled. It is used only if rope_factor is not 1."""

    def __post_init__(self) -> None:
        for field in fields(self):
            require(field.name, getattr(self, field.name), field.type)
        if self.n_layers > 1024:  # building a layer takes some milliseconds
            raise SizeError(f"n_layers {self.n_layers} must be at most 1024", "n_layers")
        if self.dim % self.n_heads:
            raise SizeError(f"n_heads {self.n_heads} must divide dim {self.dim}", "n_heads", "dim")
        if self.head_dim % 2:
            message = f"dim {self.dim} / n_heads {self.n_heads} must be even: rotary embeddings rotate pairs"
            raise SizeError(message, "n_heads", "dim")
        if self.n_heads % self.n_kv_heads:
            raise SizeError(f"n_kv_heads {self.n_kv_heads} must divide n_heads {self.n_heads}", "n_kv_heads", "n_heads")
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        if high <= low:
            message = f"rope_high_freq_factor {high} must be above rope_low_freq_factor {low}"
            raise SizeError(message, "rope_high_freq_factor", "rope_low_freq_factor")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


_llama2 = partial(LlamaSizes, vocab_size=32000, rope_theta=10_000.0)
LLAMA2 = {
    "7b": _llama2(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, hidden_dim=11008),
    "13b": _llama2(dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, hidden_dim=13824),
    "70b": _llama2(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=28672),
}

_llama3 = partial(LlamaSizes, n_kv_heads=8, vocab_size=128256)
LLAMA3 = {
    # Small enough for a laptop, and divisible by every layout on eight ranks. The vocabulary is that of the shipped tokenizer.
    "debug": LlamaSizes(dim=128, n_layers=8, n_heads=8, n_kv_heads=4, hidden_dim=352, vocab_size=2048),
    "8b": _llama3(dim=4096, n_layers=32, n_heads=32, hidden_dim=14336),
    "70b": _llama3(dim=8192, n_layers=80, n_heads=64, hidden_dim=28672),
}

_llama3_1 = partial(_llama3, rope_factor=8.0)
LLAMA3_1 = {
    "8b": _llama3_1(dim=4096, n_layers=32, n_heads=32, hidden_dim=14336),
    "70b": _llama3_1(dim=8192, n_layers=80, n_heads=64, hidden_dim=28672),
    "405b": _llama3_1(dim=16384, n_layers=126, n_heads=128, hidden_dim=53248),
}

_llama3_2 = partial(_llama3, tied_embeddings=True, rope_factor=32.0)
LLAMA3_2 = {
    "1b": _llama3_2(dim=2048, n_layers=16, n_heads=32, hidden_dim=8192),
    "3b": _llama3_2(dim=3072, n_layers=28, n_heads=24, hidden_dim=8192),
}
