"""Sizes of families with mixtures of experts (models/moe.py)."""

from dataclasses import dataclass
from typing import ClassVar

from models.sizes import DecoderSizes, Sizes, repeated, shortest_period
from models.spec import SizeError


@dataclass(frozen=True, kw_only=True)
class MixtureSizes(DecoderSizes):
    """Sizes of a family whose feed-forward layers are mixtures of experts."""

    n_experts: int
    """Number of experts of a layer."""
    experts_per_token: int
    """Number of experts to which a layer sends a token."""
    normalize_weights: bool = False
    """Whether the weights of a token's experts are divided by their sum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts_per_token > self.n_experts:
            message = f"experts_per_token {self.experts_per_token} must be at most n_experts {self.n_experts}"
            raise SizeError(message, "experts_per_token", "n_experts")

    @property
    def expert_dim(self) -> int:
        """Width of an expert."""
        return self.hidden_dim

    @property
    def all_sparse_layers(self) -> tuple[bool, ...]:
        """Whether each layer is a mixture of experts. Those for multi-token prediction, which all are, are not listed."""
        return (True,) * self.n_layers

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer, which is given by its index, is a mixture of experts."""
        return layer in self.predictions or self.all_sparse_layers[layer]


@dataclass(frozen=True, kw_only=True)
class PartlySparseSizes(MixtureSizes):
    """Sizes of a family in which only some layers are mixtures of experts."""

    GROWING: ClassVar = (*Sizes.GROWING, "expert_hidden_dim")
    sparse_layers: tuple[bool, ...] = (True,)
    """Whether each layer is a mixture of experts, in order and repeated up to n_layers. Otherwise it is a feed-forward layer of
    the width hidden_dim."""
    expert_hidden_dim: int
    """Width of an expert."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sparse_layers:
            raise SizeError("sparse_layers must have at least one value", "sparse_layers")
        if not any(self.all_sparse_layers):
            raise SizeError("sparse_layers must contain true: without experts it is a dense model", "sparse_layers")
        object.__setattr__(self, "sparse_layers", shortest_period(self.all_sparse_layers))

    @property
    def expert_dim(self) -> int:
        return self.expert_hidden_dim

    @property
    def all_sparse_layers(self) -> tuple[bool, ...]:
        return repeated(self.sparse_layers, self.n_layers)


@dataclass(frozen=True, kw_only=True)
class GroupedMixtureSizes(PartlySparseSizes):
    """Sizes of a family whose router chooses groups of experts first, and whose layers have shared experts."""

    normalize_weights: bool = True
    n_shared_experts: int
    """Number of experts that all tokens are sent to. They are computed as one feed-forward layer."""
    n_groups: int = 1
    groups_per_token: int = 1
    """Number of groups from which the experts of a token are chosen."""
    weight_scale: float = 1.0
    """Factor of the weights of a token's experts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_experts % self.n_groups:
            message = f"n_groups {self.n_groups} must divide n_experts {self.n_experts}"
            raise SizeError(message, "n_groups", "n_experts")
        size = self.n_experts // self.n_groups
        if size < 2:
            message = (
                f"n_experts {self.n_experts} / n_groups {self.n_groups} must be at least 2: the two best score a group"
            )
            raise SizeError(message, "n_groups", "n_experts")
        if self.groups_per_token > self.n_groups:
            message = f"groups_per_token {self.groups_per_token} must be at most n_groups {self.n_groups}"
            raise SizeError(message, "groups_per_token", "n_groups")
        if self.experts_per_token > self.groups_per_token * size:
            message = f"experts_per_token {self.experts_per_token} must be at most {self.groups_per_token * size}, the number of"
            message = f"{message} experts in groups_per_token {self.groups_per_token} groups"
            raise SizeError(message, "experts_per_token", "groups_per_token", "n_groups", "n_experts")

    @property
    def expert_dim(self) -> int:
        return self.expert_hidden_dim

    @property
    def shared_dim(self) -> int:
        """Width of the shared experts together."""
        return self.n_shared_experts * self.expert_dim


DEBUG_EXPERTS = dict(hidden_dim=96, n_experts=8, experts_per_token=2)
"""Experts for a laptop, which are divisible by every layout on eight ranks."""
