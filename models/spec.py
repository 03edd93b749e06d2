"""The interface of a model family, in plain data and plain torch. It is independent of how a model is parallelized."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Generator, Tensor, nn

from models.context import Context

Head = Callable[[Tensor, Tensor, float | None], Tensor]
"""Function (hidden, weight, softcap) -> loss, from which backward starts (see Objective.head in
trainer/objective/objective.py). The output module calls it. hidden: (batch, seq, dim); weight: (vocab, dim); softcap: limit of
the logits (see Output in models/components.py)."""


class Model(Protocol):
    """The interface of a model, in addition to that of torch.nn.Module."""

    def forward(self, tokens: Tensor, context: Context | None = None, head: Head | None = None) -> Tensor:
        """Return the result of the head. Without a head, return logits (batch, seq, vocab).

        Args:
            tokens: Token ids, (batch, seq), int64.
            context: None: each row is one document, as in Context.of.
            head: Computes the result from the last hidden states.
        """

    def init_parameter(self, name: str, rows: Tensor, generator: Generator) -> None:
        """Fill `rows` with initial values drawn from the generator. rows: some rows of the parameter `name`, with all columns.
        If the parameter is a stack (models.moe.is_stack), they are rows of the matrix or bias of one expert."""

    def flops_per_token(self, seq_len: int) -> int:
        """Return the number of floating-point operations per token, in forward and backward."""

    def structure(self) -> "Structure":
        """Return how the model may be sharded. The model must be complete and not parallelized."""


def tensor_styles(module: nn.Module) -> dict[str, str]:
    """Return the tensor-parallel styles that the modules inside a module declare, by name: TENSOR maps names relative to the
    declaring module to keys of styles() in trainer/parallel/tensor.py. A module's own declaration overrides that of the module
    that contains it. Modules without parameters, such as the norms that a family does not have, need no style."""
    styles = {}
    for name, owner in module.named_modules():
        for inner, style in getattr(owner, "TENSOR", {}).items():
            if any(True for _ in owner.get_submodule(inner).parameters()):
                styles[f"{name}.{inner}".strip(".")] = style
    return styles


def styles_in_blocks(model: nn.Module, blocks_path: str) -> dict[str, str]:
    """Return the tensor-parallel styles of the modules inside the blocks, by name in the complete model."""
    return {f"{blocks_path}.{name}": style for name, style in tensor_styles(model.get_submodule(blocks_path)).items()}


def multiply_adds(model: nn.Module) -> dict[str, int]:
    """Return name of a matrix, or of stacked matrices -> number of multiply-adds per token in its products. A linear layer
    multiplies each token by its weight. Other modules state their numbers in `multiply_adds_per_token`, by parameter."""
    counts = {}
    for name, module in model.named_modules():
        own = {"weight": module.weight.numel()} if isinstance(module, nn.Linear) else {}
        own = getattr(module, "multiply_adds_per_token", own)
        counts |= {f"{name}.{leaf}".strip("."): count for leaf, count in own.items()}
    return counts


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> buffer that belongs to the model's state, as its parameters do. A module declares these buffers in BUFFERS,
    a dict: name -> initial value of all elements. They are saved, loaded and exported in their own dtype, which Module.to does
    not change. Raises TypeError if a buffer is not declared: it is unknown whether it must be saved or how it starts."""
    buffers = {}
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if leaf not in getattr(model.get_submodule(owner), "BUFFERS", {}):
            raise TypeError(f"{name}: {type(model.get_submodule(owner)).__name__} must declare this buffer in BUFFERS")
        buffers[name] = buffer
    return buffers


def saved_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> parameter or buffer (see saved_buffers). Together they are the weights of a model. A parameter that is
    shared by two modules is listed once."""
    return dict(model.named_parameters()) | saved_buffers(model)


def is_bias(model: nn.Module, name: str) -> bool:
    """Return whether a parameter is a bias, or is treated as one: it is no matrix that mixes hidden values, and has no weight
    decay. Biases are `bias`, and the parameters that the module which has it names in BIASES. The number of dims does not tell:
    the biases of experts are stacked.

    Args:
        model: Contains the parameter. It may be parallelized.
        name: Of the parameter.
    """
    owner, _, leaf = name.rpartition(".")
    return leaf == "bias" or leaf in getattr(model.get_submodule(owner), "BIASES", ())


class SizeError(ValueError):
    """Invalid dimensions of a model."""

    def __init__(self, message: str, *names: str):
        """names: names of the invalid dimensions."""
        super().__init__(message)
        self.names = names


@dataclass(frozen=True, kw_only=True)
class LayerKind(ABC):
    """What the mixers of the layers of one kind are. A mixer is the first half of a block: attention or a recurrence, by which
    tokens see other tokens. Its forward is (hidden state, context) -> hidden state. All that looks at other tokens is its kernel,
    the module `core` in it, which has no parameters and is replaceable. Masks, kernels and caches are made from this
    description. The layers of one kind share a mask and a positional encoding."""

    MIXER: ClassVar[str]
    """Name of the mixer in its block."""
    HEADS: ClassVar[tuple[str, ...]]
    """Names of the sizes that count the mixer's heads, over which tensor parallelism splits it."""
    IS_RECURRENT: ClassVar[bool] = False
    """Whether a state passes from token to token. If not, each token sees others directly."""
    rope: Callable[[Tensor], Any] | None = None
    """Function (positions) -> positional encoding, Context.rope of the blocks. None: the layers have no positional encoding."""

    @property
    def reads_before(self) -> int:
        """Number of tokens before a part of a sequence that the part reads directly, beside a state. 0: none, or all of them."""
        return 0

    @abstractmethod
    def multiply_adds(self, seq_len: int) -> int:
        """Return the number of multiply-adds of a layer's kernel in a sequence."""

    @abstractmethod
    def reach(self, seq_len: int) -> int:
        """Return the largest distance from which a token sees another in one layer, in a sequence of this length."""

    @abstractmethod
    def mask(self) -> nn.Module:
        """Return the module that computes what the kernels of this kind need to know about the positions of the tokens, once
        for all layers. It has no parameters. Its forward is (context) -> mask. The trainer replaces it if a run needs another
        mask."""


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Description of how a model may be sharded. It refers to the model's modules by name."""

    blocks_path: str
    """Name of the container of the blocks. Each block is named by its index. Blocks pass one hidden state (batch, seq, dim) to
    each other and are sharded, recomputed, compiled and pipelined one by one. Their forward is (h, context)."""
    pre_blocks: tuple[str, ...]
    """Names of the modules before the blocks, in order."""
    post_blocks: tuple[str, ...]
    """Names of the modules after the blocks, in order. The head is an argument of the last module's forward."""
    fsdp_units: tuple[tuple[str, ...], ...]
    """Names of modules outside the blocks, in groups. Each group is sharded and gathered as one unit."""
    num_predictions: int = 0
    """Number of the last blocks that are layers for multi-token prediction. They follow the modules after the other blocks, and
    use the first module before the blocks again, the embedding."""
    tied: tuple[str, ...]
    """Names of a module before and of one after the blocks that share their weight, which is named after the first. Empty: none
    do."""
    tensor: Mapping[str, str]
    """Name of a module outside the blocks -> its tensor-parallel style, a key of styles() in trainer/parallel/tensor.py."""
    tp_divisible: tuple[str, ...]
    """Names of the sizes that the tensor-parallel degree must divide."""
    has_experts: bool
    """Whether blocks contain mixtures of experts."""
    masks: str
    """Name of the container of the modules that compute masks (LayerKind.mask), one for each kind of layer. A module must be
    replaced too if a new kernel needs another type of mask."""
    kinds: Mapping[str, LayerKind]
    """Names of the masks, and descriptions of the mixers that use them."""
    layer_kinds: tuple[str, ...]
    """Kind of each block, a key of `kinds`."""

    def is_prediction(self, block: int) -> bool:
        """Return whether a block is a layer for multi-token prediction."""
        return block >= len(self.layer_kinds) - self.num_predictions

    @property
    def table(self) -> str:
        """Name of a module before the blocks whose weight the last stage of a pipeline has too, or ""."""
        if self.tied:
            return self.tied[0]
        return self.pre_blocks[0] if self.num_predictions else ""

    @property
    def is_recurrent(self) -> bool:
        """Whether some mixers are recurrences."""
        return any(kind.IS_RECURRENT for kind in self.kinds.values())

    def kind(self, block: int) -> LayerKind:
        """Return the kind of a block, which is given by its index."""
        return self.kinds[self.layer_kinds[block]]

    def kernel(self, block: int) -> str:
        """Return the name of a block's kernel."""
        return f"{self.blocks_path}.{block}.{self.kind(block).MIXER}.core"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model family. Sizes are frozen dataclasses (models/sizes.py)."""

    model: Callable[[Any], Model]
    by_size: Mapping[str, Any]
    huggingface: Any
    """The mapping between the model and Hugging Face's format of it, a models.huggingface.HuggingFace."""
    gguf: Any
    """What differs in llama.cpp's files of the family, a models.gguf.Gguf. None: such files are not written."""


@lru_cache(maxsize=1)  # the search resolves many layouts of one model, whose construction may take a second
def meta_model(build: Callable[[Any], Model], sizes: Any) -> Model:
    """Return the complete model on the meta device. The model is cached, so callers must not change it."""
    with torch.device("meta"):
        return build(sizes)
