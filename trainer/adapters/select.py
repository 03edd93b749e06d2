"""The parameters that a run trains: all of the model's, or low-rank adapters, "LoRA" (Hu et al. 2021, arXiv:2106.09685).

With [lora] rank, the model's parameters are frozen, except those of the modules in [lora] train_fully. An adapter adds the scaled
product of two small matrices to the result of a linear module: base(x) + scale * x A^T B^T. The matrices are parameters of the
module, `lora_a` (rank, inputs) and `lora_b` (outputs, rank), so FSDP, recomputation and compilation treat them like any other
parameter. trainer/adapters/apply.py adds them to a model.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from models.moe import Experts
from models.spec import Model, ParallelPlan, multiply_adds
from trainer.config import ConfigError, LoraConfig
from trainer.config.fields import matching

LORA_A, LORA_B = "lora_a", "lora_b"
SCALE_SETTINGS = ("rank", "alpha", "rslora")
"""Settings that decide on LoraConfig.scale."""


_OWN_NAMES = {
    **{"q_proj": "*.attention.wq", "k_proj": "*.attention.wk", "v_proj": "*.attention.wv", "o_proj": "*.attention.wo"},
    **{"gate_proj": "*.feed_forward.w1", "up_proj": "*.feed_forward.w3", "down_proj": "*.feed_forward.w2"},
    **{"lm_head": "output", "embed_tokens": "tok_embeddings"},
}
"""Name of a module in most of Hugging Face's models -> pattern of its name in this project."""


@dataclass(frozen=True)
class TrainedParameters:
    """The parameters that a run trains. All others are frozen."""

    fully: frozenset[str]
    """Names of the trained parameters that belong to the model itself."""
    shapes: Mapping[str, tuple[int, int]]
    """Name of an adapter's matrix -> shape."""

    @property
    def names(self) -> frozenset[str]:
        return self.fully | self.shapes.keys()

    @property
    def targets(self) -> list[str]:
        """Names of the linear modules with an adapter."""
        return [name.removesuffix(f".{LORA_A}") for name in self.shapes if name.endswith(LORA_A)]

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return name -> trained parameter, on the meta device. model: the complete model, without adapters."""
        own = {name: p for name, p in model.named_parameters() if name in self.fully}
        return own | {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}

    def flops_per_token(self, model: Model, seq_len: int) -> int:
        """Return the number of floating-point operations per token. Backward computes no gradient of a frozen matrix."""
        trained = {id(p) for name, p in model.named_parameters() if name in self.fully}
        counts = multiply_adds(model).items()
        frozen = sum(count for name, count in counts if id(model.get_parameter(name)) not in trained)
        adapters = sum(rows * columns for rows, columns in self.shapes.values())
        return model.flops_per_token(seq_len) - 2 * frozen + 6 * adapters


def select_parameters(model: nn.Module, plan: ParallelPlan, config: LoraConfig) -> TrainedParameters:
    """Return the parameters that the settings select. model: the complete model, without adapters. Raises ConfigError if a
    pattern matches nothing."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    if config.rank is None:
        return TrainedParameters(frozenset(names.values()), {})
    blocks = f"{plan.blocks_path}."
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith(blocks)}
    owners = {n: m for n, m in model.named_modules() if list(m.parameters(recurse=False))}
    with _own_names():
        targets = matching("lora.targets", config.targets, linear, "linear module of the blocks")
        modules = matching("lora.train_fully", config.train_fully, owners, "module with parameters")
    if both := [name for name in targets if name in modules]:
        raise ConfigError(
            "lora.train_fully", f"{both[0]} has an adapter ([lora] targets), so it cannot be trained fully"
        )
    if not targets and not modules:
        raise ConfigError("lora.targets", "is empty, so the run would train nothing; see also [lora] train_fully")
    fully = frozenset(names[p] for name in modules for p in owners[name].parameters(recurse=False))
    return TrainedParameters(fully, adapter_shapes(model, targets, config.rank))


@contextmanager
def _own_names() -> Iterator[None]:
    """Context manager that adds this project's name of a module to an error about its name in Hugging Face's models."""
    try:
        yield
    except ConfigError as error:
        pattern = error.message.split()[0]
        if own := _OWN_NAMES.get(pattern.rpartition(".")[2]):
            raise ConfigError(error.key, f"{error.message}; {pattern} is called {own} here") from None
        if "expert" in pattern and error.key == "lora.targets":
            raise ConfigError(error.key, f"{error.message}; experts cannot have adapters") from None
        raise


def require_trained_vocabulary(model: nn.Module, plan: ParallelPlan, trained: TrainedParameters) -> None:
    """Raise ConfigError if a matrix with one row for each token is frozen. model: the complete model, without adapters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    tables = {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding | nn.Linear)}
    outside = [n for n in tables if not n.startswith(f"{plan.blocks_path}.")]
    if any(names[tables[n].weight] not in trained.fully for n in outside):
        needed = ",".join(dict.fromkeys(names[tables[n].weight].removesuffix(".weight") for n in outside))
        message = (
            f"must include {needed} with [checkpoint] resize_embeddings: the rows of new tokens would stay untrained"
        )
        raise ConfigError("lora.train_fully", message)


def adapter_shapes(model: nn.Module, targets: Iterable[str], rank: int) -> dict[str, tuple[int, int]]:
    """Return name of an adapter's matrix -> shape. targets: names of linear modules."""
    shapes = {}
    for name in targets:
        rows, columns = model.get_submodule(name).weight.shape
        shapes |= {f"{name}.{LORA_A}": (rank, columns), f"{name}.{LORA_B}": (rows, rank)}
    return shapes


def excessive_rank(trained: TrainedParameters, rank: int) -> str:
    """Return a line about adapters whose rank exceeds that of the matrix to which they are added, or ""."""
    sides = {
        name: (trained.shapes[f"{name}.{LORA_B}"][0], trained.shapes[f"{name}.{LORA_A}"][1]) for name in trained.targets
    }
    small = [name for name, shape in sides.items() if min(shape) < rank]
    if not small:
        return ""
    rows, columns = sides[small[0]]
    return (
        f"lora.rank = {rank}: exceeds the smaller side of {len(small)} of {len(sides)} matrices, such as {small[0]} "
        f"({rows} x {columns}), of which rank {min(rows, columns)} can represent every change"
    )


def frozen_experts(model: nn.Module, trained: TrainedParameters, name: str) -> str:
    """Return a line about experts that are not trained, or "".

    Args:
        model: The complete model, without adapters.
        trained: What is trained of it.
        name: Of the model.
    """
    modules = [n for n, module in model.named_modules() if isinstance(module, Experts)]
    parameters = [f"{n}.{leaf}" for n in modules for leaf, _ in model.get_submodule(n).named_parameters()]
    frozen = sum(model.get_parameter(n).numel() for n in parameters if n not in trained.fully)
    return f"lora: the experts of {name} get no adapter; their {frozen:,} parameters stay frozen" if frozen else ""


def init_adapter(config: LoraConfig, name: str, rows: Tensor, generator: Generator) -> None:
    """Draw the initial values of rows of an adapter's matrix, as the package peft does. rows: fp32, with all columns."""
    if name.endswith(LORA_B):
        rows.zero_()
    elif config.init == "kaiming":
        bound = rows.shape[1] ** -0.5
        rows.uniform_(-bound, bound, generator=generator)
    else:
        rows.normal_(0.0, 1 / config.rank, generator=generator)
