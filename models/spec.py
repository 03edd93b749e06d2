"""The interface of a model family, in plain data and plain torch. It is independent of how a model is parallelized."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

Head = Callable[[Tensor, Tensor], Tensor]
"""Function (hidden, weight) -> summed loss. The output module calls it. hidden: (batch, seq, dim); weight: (vocab, dim)."""


class Model(Protocol):
    """The interface of a model, in addition to that of torch.nn.Module."""

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor, head: Head | None = None) -> Tensor:
        """Return the result of the head. Without a head, return logits (batch, seq, vocab). tokens, positions, documents: (batch,
        seq), int64."""

    def init_parameter(self, name: str, rows: Tensor, generator: Generator) -> None:
        """Fill `rows` with initial values drawn from the generator. rows: some rows of the parameter `name`, with all columns."""

    def flops_per_token(self, seq_len: int) -> int:
        """Return the number of floating-point operations per token, in forward and backward."""


class SizeError(ValueError):
    """Invalid dimensions of a model."""

    def __init__(self, message: str, *names: str):
        """names: names of the invalid dimensions."""
        super().__init__(message)
        self.names = names


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Description of how a model may be sharded. It refers to the model's modules by name."""

    blocks: str
    """Name of the container of the blocks. Each block is named by its index. Blocks pass one hidden state (batch, seq, dim) to
    each other and are sharded, recomputed, compiled and pipelined one by one."""
    pre_blocks: tuple[str, ...]
    """Names of the modules before the blocks, in order."""
    post_blocks: tuple[str, ...]
    """Names of the modules after the blocks, in order. The head is an argument of the last module's forward."""
    fsdp_units: tuple[tuple[str, ...], ...]
    """Names of modules outside the blocks, in groups. Each group is sharded and gathered as one unit."""
    tied: bool
    """Whether a parameter is used both before and after the blocks."""
    tensor: Mapping[str, str]
    """Name of a module outside the blocks -> its tensor-parallel style, a key of styles() in trainer/parallel/tensor.py."""
    tensor_block: Mapping[str, str]
    """Name of a module inside a block -> its tensor-parallel style."""
    tp_divisible: tuple[str, ...]
    """Names of the sizes that the tensor-parallel degree must divide."""
    attention: str
    """Name of the replaceable attention kernel inside a block. The kernel has no parameters. Its forward is (q, k, v, mask) ->
    output, where k and v cover the full sequence."""
    mask: str
    """Name of the replaceable module that computes the mask of all blocks. The module has no parameters. Its forward is
    (positions, documents) -> mask. The module must be replaced too if a new kernel needs another type of mask."""


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """The mapping between a model and Hugging Face's format of this model."""

    name: Callable[[str], str]
    """Function (parameter name) -> its name in Hugging Face's format."""
    is_buffer: Callable[[str], bool]
    """Function (tensor name in Hugging Face's format) -> whether the model computes the tensor, so it is no parameter."""
    is_rope_permuted: Callable[[str], bool]
    """Function (parameter name) -> whether Hugging Face's format has the parameter's rows in another order within each head."""
    permute_to_hf: Callable[[Tensor, int], Tensor]
    """Function (rows of complete heads, head_dim) -> the rows in Hugging Face's order."""
    permute_from_hf: Callable[[Tensor, int], Tensor]
    """Inverse of permute_to_hf."""
    config: Callable[[Any, int], dict[str, Any]]
    """Function (sizes, seq_len) -> the fields of config.json that depend on the model."""
    sizes: Callable[[Mapping[str, Any]], Any]
    """Function (content of config.json) -> sizes. Raises ValueError for an unsupported model."""
    seq_len: Callable[[Mapping[str, Any]], int]
    """Function (content of config.json) -> context window in tokens. Raises ValueError if it is not valid."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model family. Sizes are frozen dataclasses with at least `vocab_size`, `dim` and `head_dim`. Invalid dimensions raise
    SizeError."""

    model: Callable[[Any], Model]
    sizes: Mapping[str, Any]
    plan: Callable[[Any], ParallelPlan]
    huggingface: HuggingFace


@lru_cache(maxsize=1)  # the search resolves many layouts of one model, whose construction may take a second
def meta_model(build: Callable[[Any], Model], sizes: Any) -> Model:
    """Return the complete model on the meta device. The model is cached, so callers must not change it."""
    with torch.device("meta"):
        return build(sizes)
