"""Sizes of hybrid families: most layers are recurrences, the others have attention."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from models.delta_net import RecurrentKind
from models.sizes import DecoderSizes, SizeError, Sizes, TypedLayers
from models.spec import LayerKind


def require_filter(width: int) -> None:
    """Raise SizeError if short convolutions read only their own token."""
    if width < 2:
        raise SizeError(f"linear_conv_kernel_dim {width} must be at least 2", "linear_conv_kernel_dim")


@dataclass(frozen=True, kw_only=True)
class HybridSizes(TypedLayers, DecoderSizes):
    """Sizes of a family with layers of the types "linear", a recurrence, and "full", attention to all earlier tokens."""

    GROWING: ClassVar = (*Sizes.GROWING, "linear_num_key_heads", "linear_num_value_heads")
    layer_types: tuple[Literal["linear", "full"], ...] = ("linear", "linear", "linear", "full")
    """Types of the layers in order. The sequence is repeated up to n_layers."""
    linear_num_key_heads: int
    """Number of heads of a recurrence's queries and keys."""
    linear_num_value_heads: int
    """Number of heads of its values, each with a state."""
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    """Number of tokens that a short convolution reads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            message = f"linear_num_key_heads {keys} must divide linear_num_value_heads {values}"
            raise SizeError(message, "linear_num_key_heads", "linear_num_value_heads")
        require_filter(self.linear_conv_kernel_dim)

    def kinds(self) -> dict[str, LayerKind]:
        recurrent = RecurrentKind(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            widths=(self.linear_key_head_dim, self.linear_value_head_dim),
            filter_width=self.linear_conv_kernel_dim,
        )
        return {"full": self.attention_kind(), "linear": recurrent}


DEBUG_HYBRID = dict(
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    norm_eps=1e-3,
)
"""Recurrences for a laptop. The first results of a sequence are small, and norms divide by them: with a larger constant, rounding
errors grow less."""
