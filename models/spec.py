"""What a model family gives to the trainer. Plain data and plain torch: nothing here knows how a model is parallelised."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Generator, Tensor


class Model(Protocol):
    """What the trainer asks of a network, beside being a torch.nn.Module."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        documents: Tensor,
        head: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """tokens, positions, documents: (batch, seq), int64.

        Returns logits (batch, seq, vocab), or, with a head, `head(hidden, weight)`, called inside the output module
        with hidden (batch, seq, dim) and weight (vocab, dim).
        """

    def init_parameter(self, name: str, rows: Tensor, generator: Generator) -> None:
        """Fill `rows`, some whole rows of the parameter of that name, with initial values drawn from the generator."""

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of forward and backward for one token."""


class SizeError(ValueError):
    """Dimensions that make no network."""

    def __init__(self, rule: str, *names: str):
        """names: the dimensions that the rule is about."""
        super().__init__(rule)
        self.names = names


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """How a network may be cut, by the names of its modules."""

    blocks: str
    """The container of the blocks, named by their numbers, which pass one hidden state (batch, seq, dim) on: the unit of
    sharding, of recomputation, of compilation, and where a pipeline may be cut."""
    pre_blocks: tuple[str, ...]
    """Modules that work ahead of the blocks, in order."""
    post_blocks: tuple[str, ...]
    """Modules that work behind them, in order; the last one takes the head."""
    fsdp_units: tuple[tuple[str, ...], ...]
    """Modules outside the blocks that are sharded and gathered together."""
    tied: bool
    """Whether a parameter is used both before and after the blocks."""
    tensor: Mapping[str, str]
    """Modules outside the blocks -> how tensor parallelism cuts them: a word of styles() in trainer/parallel/tensor.py."""
    tensor_block: Mapping[str, str]
    """The same for the modules of a block, by their names inside it."""
    tp_divisible: tuple[str, ...]
    """Sizes that the tensor-parallel degree must divide."""
    attention: str
    """The parameterless kernel of a block, by its name inside it: (q, k, v, mask) -> output, with k and v of the whole
    sequence. Other kernels are put in this place."""
    mask: str
    """The parameterless module that makes, once for all blocks, what their kernels take as mask: (positions, documents) ->
    mask. A kernel comes with a mask of its own."""


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """How Hugging Face's libraries write the network."""

    name: Callable[[str], str]
    """The name there of a parameter of ours."""
    is_rope_permuted: Callable[[str], bool]
    """Whether the rows of this parameter stand in another order there, head by head."""
    permute_to_hf: Callable[[Tensor, int], Tensor]
    """(rows of whole heads, head_dim) -> the same in the order there."""
    permute_from_hf: Callable[[Tensor, int], Tensor]
    config: Callable[[Any, int], dict[str, Any]]
    """(sizes, seq_len) -> config.json, as far as the network decides it."""
    sizes: Callable[[Mapping[str, Any]], Any]
    """config.json -> sizes. Raises ValueError for another network."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model family. Sizes are frozen dataclasses with at least `vocab_size`, `dim` and `head_dim`; bad dimensions raise
    SizeError."""

    model: Callable[[Any], Model]
    sizes: Mapping[str, Any]
    plan: Callable[[Any], ParallelPlan]
    huggingface: HuggingFace
