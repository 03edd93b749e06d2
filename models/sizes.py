"""Dimensions of models, and the rules that they must satisfy."""

import json
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self, TypeVar

from models.attention import AttentionKind
from models.rope import LinearRope, Llama3Rope, LongRope, Rope, YarnRope
from models.spec import SizeError

T = TypeVar("T")

# The upper limits keep arithmetic in range: of int64 for the bytes of a matrix, and of fp32 for the rotary frequencies.
_RULES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("an integer from 1 to 2**24", lambda value: type(value) is int and 1 <= value <= 2**24),
    float: ("a number from 1e-30 to 1e30", lambda value: type(value) in (int, float) and 1e-30 <= value <= 1e30),
    bool: ("true or false", lambda value: type(value) is bool),
    types.NoneType: ("null", lambda value: value is None),
}


def text_of(value: Any) -> str:
    """Return a value of a configuration file as JSON, in at most 40 characters."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text:.37}..."


def require(name: str, value: Any, type_: Any) -> None:
    """Raise SizeError if the value is not of this type or out of range."""
    rule, holds = _rule(type_)
    if not holds(value):
        raise SizeError(f"{name} {text_of(value)} must be {rule}", name)


def _rule(type_: Any) -> tuple[str, Callable[[Any], bool]]:
    if type_ in _RULES:
        return _RULES[type_]
    arguments = typing.get_args(type_)
    if typing.get_origin(type_) is Literal:
        return f"one of {', '.join(arguments)}", lambda value: value in arguments
    if typing.get_origin(type_) is tuple:
        member, holds = _rule(arguments[0])
        text = f"a list, each value {member}"
        return text, lambda value: isinstance(value, tuple | list) and all(map(holds, value))
    rules = [_rule(option) for option in arguments]  # a union
    return " or ".join(text for text, _ in rules), lambda value: any(holds(value) for _, holds in rules)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Dimensions of a decoder. Subclasses have a `head_dim`, a `rope_type` and the sizes that this type uses. Raises SizeError if
    they are invalid or do not fit each other."""

    ROPE_TYPES: ClassVar[tuple[str, ...]]
    """Supported extensions of the context window, keys of ROPES."""
    ALWAYS_USED: ClassVar[tuple[str, ...]] = ()
    """Sizes of an extension that the family uses without an extension too."""
    GROWING: ClassVar[tuple[str, ...]] = ("dim", "n_heads", "n_kv_heads", "hidden_dim")
    """Sizes that are in proportion to dim in wider models (models/width.py). Heads keep their width."""
    prediction_layers: ClassVar[int | None] = None
    """See PredictionSizes. Other families have none."""
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    """Width of the feed-forward layer."""
    vocab_size: int
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    """Whether the output projection uses the embedding table as its weight."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies. models/rope.py explains the sizes that begin with rope_."""
    rope_factor: float = 1.0
    """Factor by which positions may exceed the sequence length of the original training. 1: not at all."""
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            require(field.name, value, field.type)
            # JSON files have lists, and integers where a number is meant.
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))
            if type(value) is int and field.type in (float, float | None):
                object.__setattr__(self, field.name, float(value))
        if self.n_layers > 1024:  # building a layer takes some milliseconds
            raise SizeError(f"n_layers {self.n_layers} must be at most 1024", "n_layers")
        if self.n_heads % self.n_kv_heads:
            raise SizeError(f"n_kv_heads {self.n_kv_heads} must divide n_heads {self.n_heads}", "n_kv_heads", "n_heads")

    def _require_frequency_range(self) -> None:
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        if high <= low:
            message = f"rope_high_freq_factor {high} must be above rope_low_freq_factor {low}"
            raise SizeError(message, "rope_high_freq_factor", "rope_low_freq_factor")

    def for_seq_len(self, seq_len: int) -> Self:
        """Return the sizes for sequences of this length."""
        return self

    @property
    def predictions(self) -> range:
        """Indices of the layers for multi-token prediction."""
        return range(self.n_layers, self.n_layers + (self.prediction_layers or 0))

    def without_prediction(self) -> Self:
        """Return the sizes of the model without layers for multi-token prediction."""
        return replace(self, prediction_layers=None) if self.prediction_layers else self

    def of_width(self, dim: int) -> dict[str, int]:
        """Return the sizes that grow, of a model of another dim. Raises SizeError if one would not be an integer."""
        grown = {name: value for name in self.GROWING if (value := getattr(self, name)) is not None}
        for name, value in grown.items():
            if value * dim % self.dim:
                raise SizeError(f"{name} {value} x {dim} / dim {self.dim} must be an integer", name)
        return {name: value * dim // self.dim for name, value in grown.items()}

    @property
    def context_window(self) -> int:
        """Sequence length that an extension of the context window allows, or 0 if its factor does not state one."""
        # The windows of Llama 3.1 and 3.2 are equal, but their factors are 8 and 32. The longest sequence of training counts.
        has_original = "original_seq_len" in (f.name for f in fields(ROPES[self.rope_type]))
        return (
            round(self.rope_original_seq_len * self.rope_factor) if has_original and self.rope_type != "llama3" else 0
        )

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dims of each head."""
        return self.head_dim

    def rope(self) -> Rope:
        """Return the positional encoding."""
        rope = ROPES[self.rope_type]
        values = {f.name: getattr(self, f"rope_{f.name}") for f in fields(rope) if f.name != "dim"}
        return rope(dim=self.rotary_dim, **values)

    @property
    def head_widths(self) -> tuple[int, int]:
        """Width of a head's queries and keys, and of its values."""
        return self.head_dim, self.head_dim

    def kinds(self) -> dict[str, AttentionKind]:
        """Return name -> kind of layer."""
        return {"full": self.attention_kind()}

    def attention_kind(self) -> AttentionKind:
        """Return the kind of layers with attention to all earlier tokens."""
        return AttentionKind(
            n_heads=self.n_heads, n_kv_heads=self.n_kv_heads, widths=self.head_widths, rope=self.rope()
        )

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Name of each layer's kind."""
        return ("full",) * self.n_layers


ROPES = {"default": Rope, "linear": LinearRope, "llama3": Llama3Rope, "yarn": YarnRope, "longrope": LongRope}


@dataclass(frozen=True, kw_only=True)
class DecoderSizes(Sizes):
    """Sizes of a family whose files name the head dim and the extension of the context window."""

    ROPE_TYPES: ClassVar[tuple[str, ...]] = tuple(ROPES)
    head_dim: int
    rope_type: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    """Extension of the context window, by its name in Hugging Face's files. An extension uses the fields of its class in
    models/rope.py."""
    rope_original_seq_len: int = 4096
    """Sequence length of the training before the extension."""
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = True
    rope_attention_factor: float | None = None
    rope_mscale: float | None = None
    rope_mscale_all_dim: float | None = None
    rope_short_factors: tuple[float, ...] = ()
    """Factors of LongRope for sequences up to rope_original_seq_len."""
    rope_long_factors: tuple[float, ...] = ()
    """Factors of LongRope for longer sequences."""
    rope_is_long: bool = False
    """Whether LongRope uses the factors for longer sequences. The sequence length of the run decides."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_type not in self.ROPE_TYPES:
            raise SizeError(f"rope_type {self.rope_type} must be one of {', '.join(self.ROPE_TYPES)}", "rope_type")
        used = {f"rope_{f.name}" for f in fields(ROPES[self.rope_type])}
        used |= {"rope_type", "rope_is_long", *self.ALWAYS_USED}
        for f in fields(DecoderSizes):
            if f.name.startswith("rope_") and f.name not in used and getattr(self, f.name) != f.default:
                value, default = text_of(getattr(self, f.name)), text_of(f.default)
                message = f"{f.name} {value} must be {default}, because rope_type {self.rope_type} does not use it"
                raise SizeError(message, f.name, "rope_type")
        self._require_frequency_range()
        rotated, theta, original = self.rotary_dim, self.rope_theta, self.rope_original_seq_len
        if rotated % 2 or not 2 <= rotated <= self.head_dim:
            message = (
                f"the number of rotated dims of a head, {rotated}{self._rotated_part()}, must be even, and from 2 to head_dim "
                f"{self.head_dim}"
            )
            raise SizeError(message, "head_dim", "partial_rotary_factor")
        for name in ("rope_short_factors", "rope_long_factors") if self.rope_type == "longrope" else ():
            if len(getattr(self, name)) != rotated // 2:
                message = f"{name} must have {rotated // 2} values, one for each pair of rotated dims"
                raise SizeError(message, name, "rope_type", "head_dim", "partial_rotary_factor")
        if self.rope_type in ("yarn", "longrope") and not (theta > 1 and original > 1):
            message = f"rope_theta {theta} and rope_original_seq_len {original} must be above 1"
            raise SizeError(message, "rope_theta", "rope_original_seq_len", "rope_type")

    def _rotated_part(self) -> str:
        """Return where the number of rotated dims comes from, for messages."""
        fraction = getattr(self, "partial_rotary_factor", None)
        return "" if fraction is None else f" = partial_rotary_factor {fraction} x head_dim {self.head_dim}"

    def for_seq_len(self, seq_len: int) -> Self:
        is_long = self.rope_type == "longrope" and seq_len > self.rope_original_seq_len
        return replace(self, rope_is_long=is_long)


@dataclass(frozen=True, kw_only=True)
class PartlyRotatedSizes(DecoderSizes):
    """Sizes of a family that rotates a part of each head."""

    partial_rotary_factor: float = 1.0
    """Fraction of each head's dims that is rotated."""

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)


@dataclass(frozen=True, kw_only=True)
class WindowedSizes(DecoderSizes):
    """Sizes of a family whose layers may all attend to a window of keys."""

    window: int | None = None
    """Number of keys that a query attends to, its own included."""

    def kinds(self) -> dict[str, AttentionKind]:
        kind = self.attention_kind()
        return {"full": kind, "sliding": replace(kind, window=self.window)}

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        return ("full" if self.window is None else "sliding",) * self.n_layers


@dataclass(frozen=True, kw_only=True)
class PredictionSizes(Sizes):
    """Sizes of a family that may have layers for multi-token prediction (PredictionBlock in models/blocks.py)."""

    MAX_PREDICTION_LAYERS: ClassVar[int] = 16
    prediction_layers: int | None = None
    """Number of layers after the others, each of which predicts one token further. None: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.predictions) > self.MAX_PREDICTION_LAYERS:
            rule = (
                f"must be at most {self.MAX_PREDICTION_LAYERS}"
                if self.MAX_PREDICTION_LAYERS
                else "this family has none"
            )
            raise SizeError(f"prediction_layers {self.prediction_layers}: {rule}", "prediction_layers")


class TypedLayers:
    """Part of the sizes of a family whose layers are of several types: `layer_types`, which is repeated up to n_layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layer_types:
            raise SizeError("layer_types must name at least one type", "layer_types")
        # Equal models have equal sizes.
        object.__setattr__(self, "layer_types", shortest_period(self.all_layer_types))

    @property
    def all_layer_types(self) -> tuple[str, ...]:
        return repeated(self.layer_types, self.n_layers)

    layer_kinds = all_layer_types


@dataclass(frozen=True, kw_only=True)
class MixedSizes(TypedLayers, WindowedSizes):
    """Sizes of a family in which some layers attend to a window of keys."""

    layer_types: tuple[Literal["full", "sliding"], ...] = ("full",)
    """Types of the layers in order. The sequence is repeated up to n_layers. Layers of the type "sliding" have the window."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if ("sliding" in self.all_layer_types) != (self.window is not None):
            message = (
                f"window {self.window}: a window is needed if layer_types contains sliding, and has no effect otherwise"
            )
            raise SizeError(message, "window", "layer_types", "n_layers")


DEBUG = dict(dim=128, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=24, hidden_dim=352, vocab_size=2048)
"""Dimensions for a laptop, with the vocabulary of the shipped tokenizer. Heads are wider than dim / n_heads."""
DEBUG_DERIVED = DEBUG | dict(head_dim=16)
"""Dimensions for families whose heads always have dim / n_heads values. Some readers of their files do not read the head dim."""


def shortest_period(values: Sequence[T]) -> tuple[T, ...]:
    """Return the shortest sequence whose repetition has all values as its beginning."""
    lengths = range(1, len(values) + 1)
    return tuple(next(values[:n] for n in lengths if all(v == values[i % n] for i, v in enumerate(values))))


def repeated(pattern: Sequence[T], length: int) -> tuple[T, ...]:
    """Return the first `length` values of the repeated pattern."""
    return tuple(pattern[i % len(pattern)] for i in range(length))
