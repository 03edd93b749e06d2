"""The parameters that a run trains: all of the model's, or low-rank adapters, "LoRA" (Hu et al. 2021, arXiv:2106.09685).

With [lora] rank, the model's parameters are frozen, except those of the modules in [lora] train_fully. An adapter adds the scaled
product of two small matrices to the result of a linear module: base(x) + scale * x A^T B^T. The matrices are parameters of the
module, `lora_a` (rank, inputs) and `lora_b` (outputs, rank), so FSDP, recomputation and compilation treat them like any other
parameter. Each expert has its own adapters. Those of its matrices `w1` are stacked too: `w1_lora_a` (experts, rank, inputs) and
`w1_lora_b` (experts, outputs, rank). trainer/adapters/apply.py adds them to a model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Generator, Tensor, nn

from models.components import Gate
from models.moe import Experts, is_stack
from models.row_groups import ALIGNMENT
from models.spec import Model, Structure, multiply_adds
from trainer.adapters.nf4 import BLOCK
from trainer.base.config import ConfigError, LoraConfig
from trainer.base.config.patterns import matching
from trainer.runtime.device import DTYPES

LORA_A, LORA_B = "lora_a", "lora_b"
SCALE_SETTINGS = ("rank", "alpha", "rslora")
"""Settings that decide on LoraConfig.scale."""


@dataclass(frozen=True)
class TrainedParameters:
    """The parameters that a run trains. All others are frozen."""

    fully: frozenset[str]
    """Names of the trained parameters that belong to the model itself."""
    shapes: Mapping[str, tuple[int, ...]]
    """Name of an adapter's matrix -> shape."""

    @property
    def names(self) -> frozenset[str]:
        return self.fully | self.shapes.keys()

    @property
    def adapted(self) -> list[str]:
        """Names of the weights with an adapter."""
        return [weight_of(name) for name in self.shapes if name.endswith(LORA_A)]

    def of_experts(self, model: nn.Module) -> dict[str, tuple[int, ...]]:
        """Return name of a stack of adapters' matrices, one for each expert -> shape. model: the complete model."""
        return {name: shape for name, shape in self.shapes.items() if is_stack(model, name)}

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return name -> trained parameter, on the meta device. model: the complete model, without adapters."""
        own = {name: p for name, p in model.named_parameters() if name in self.fully}
        return own | {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}

    def flops_per_token(self, model: Model, seq_len: int) -> int:
        """Return the number of floating-point operations per token. Backward computes no gradient of a frozen matrix."""
        trained = {id(p) for name, p in model.named_parameters() if name in self.fully}
        counts = multiply_adds(model)
        frozen = sum(count for name, count in counts.items() if id(model.get_parameter(name)) not in trained)
        adapters = 0
        for name, (*_, rows, columns) in self.shapes.items():
            weight = model.get_parameter(weight_of(name))
            products = counts[weight_of(name)] // weight.shape[-2:].numel()  # per token, as many as experts process it
            adapters += products * rows * columns
        return model.flops_per_token(seq_len) - 2 * frozen + 6 * adapters


def select_parameters(model: nn.Module, structure: Structure, config: LoraConfig) -> TrainedParameters:
    """Return the parameters that the settings select. model: the complete model, without adapters. Raises ConfigError if a
    pattern matches nothing."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    if config.rank is None:
        return TrainedParameters(frozenset(names.values()), {})
    adaptable = {target_of(name): name for name in _adaptable_in_blocks(model, structure)}
    owners = {n: m for n, m in model.named_modules() if list(m.parameters(recurse=False))}
    kind = "linear module or matrix of experts" if structure.has_experts else "linear module"
    others = {n: "can only be trained fully, see [lora] train_fully" for n in owners if n not in adaptable}
    targets = matching("lora.targets", config.targets, adaptable, f"{kind} of the blocks", others)
    modules = matching("lora.train_fully", config.train_fully, owners, "module with parameters")
    weights = [adaptable[target] for target in targets]
    if both := [owner for weight in weights if (owner := weight.rpartition(".")[0]) in modules]:
        raise ConfigError(
            "lora.train_fully", f"{both[0]} has an adapter ([lora] targets), so it cannot be trained fully"
        )
    if not targets and not modules:
        raise ConfigError("lora.targets", "is empty, so the run would train nothing; see also [lora] train_fully")
    fully = frozenset(names[p] for name in modules for p in owners[name].parameters(recurse=False))
    return TrainedParameters(fully, adapter_shapes(model, weights, config.rank))


def trained_base(model: nn.Module, structure: Structure, trained: TrainedParameters) -> str:
    """Return a module of the blocks whose matrix is trained fully, although it could have an adapter, or "". model: the complete
    model, without adapters."""
    return next((target_of(name) for name in _adaptable_in_blocks(model, structure) if name in trained.fully), "")


def select_quantized(model: nn.Module, structure: Structure, config: LoraConfig) -> frozenset[str]:
    """Return the names of the weights that [lora] base_dtype keeps in 4 bits. model: the complete model, without adapters. Raises
    ConfigError if one of them has rows that are not a multiple of a block."""
    if config.base_dtype == "keep":
        return frozenset()
    gates = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Gate)}
    names = [name for name in _adaptable_in_blocks(model, structure) if name not in gates]
    columns = {name: model.get_parameter(name).shape[-1] for name in names}
    if uneven := [name for name in names if columns[name] % BLOCK]:
        message = f"needs rows of a multiple of {BLOCK} values, but those of {uneven[0]} have {columns[uneven[0]]}"
        raise ConfigError("lora.base_dtype", message)
    return frozenset(names)


def frozen_vocabulary(model: nn.Module, structure: Structure, trained: TrainedParameters) -> str:
    """Return the modules with one row for each token, separated by commas, if one of them is frozen, or "". model: the complete
    model, without adapters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    tables = {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding | nn.Linear)}
    weights = [names[tables[n].weight] for n in tables if not n.startswith(f"{structure.blocks_path}.")]
    if all(name in trained.fully for name in weights):
        return ""
    return ",".join(dict.fromkeys(name.removesuffix(".weight") for name in weights))


def _adaptable_in_blocks(model: nn.Module, structure: Structure) -> list[str]:
    return [name for name in adaptable_weights(model) if name.startswith(f"{structure.blocks_path}.")]


def adaptable_weights(model: nn.Module) -> list[str]:
    """Return the names of the weights that can have an adapter: those of linear modules, and the stacked matrices of experts."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            names.append(f"{name}.weight")
        elif isinstance(module, Experts):
            names += [f"{name}.{leaf}" for leaf in module.MATRICES]
    return names


def target_of(weight: str) -> str:
    """Return the name by which [lora] targets selects a weight: its module's, or, of stacked matrices, their own."""
    return weight.removesuffix(".weight")


def matrices_of(weight: str) -> tuple[str, str]:
    """Return the names of the first and the second matrix of the adapter of a weight, or of `parameter@expert` of a stack."""
    parameter, at, expert = weight.partition("@")
    prefix = f"{target_of(parameter)}{'.' if parameter.endswith('.weight') else '_'}"
    return f"{prefix}{LORA_A}{at}{expert}", f"{prefix}{LORA_B}{at}{expert}"


def weight_of(matrix: str) -> str:
    """Return the name of the weight to which a matrix of an adapter belongs. Inverse of matrices_of."""
    name, at, expert = matrix.partition("@")
    prefix = name.removesuffix(LORA_A).removesuffix(LORA_B)
    return (prefix.removesuffix("_") if prefix.endswith("_") else f"{prefix}weight") + at + expert


def adapter_shapes(model: nn.Module, weights: Iterable[str], rank: int) -> dict[str, tuple[int, ...]]:
    """Return name of an adapter's matrix -> shape. weights: names of weights of the model."""
    shapes = {}
    for name in weights:
        *experts, rows, columns = model.get_parameter(name).shape
        a, b = matrices_of(name)
        shapes |= {a: (*experts, rank, columns), b: (*experts, rows, rank)}
    return shapes


def excessive_rank(trained: TrainedParameters, rank: int) -> str:
    """Return a line about adapters whose rank exceeds that of the matrix to which they are added, or ""."""
    matrices = {target_of(name): map(trained.shapes.get, matrices_of(name)) for name in trained.adapted}
    sides = {name: (b[-2], a[-1]) for name, (a, b) in matrices.items()}
    small = [name for name, shape in sides.items() if min(shape) < rank]
    if not small:
        return ""
    rows, columns = sides[small[0]]
    return (
        f"lora.rank = {rank}: exceeds the smaller side of {len(small)} of {len(sides)} matrices, such as {small[0]} "
        f"({rows} x {columns}), of which rank {min(rows, columns)} can represent every change"
    )


def expert_adapters(trained: TrainedParameters, model: nn.Module, name: str) -> str:
    """Return a line about adapters of experts, or "".

    Args:
        model: The complete model.
        name: Of the model.
    """
    own, total = (sum(map(prod, shapes.values())) for shapes in (trained.of_experts(model), trained.shapes))
    if not own:
        return ""
    return (
        f"lora: each expert of {name} has adapters of its own, {own:,} of {total:,} values; [lora] targets can "
        f"leave experts out"
    )


def unaligned_rank(trained: TrainedParameters, model: nn.Module, rank: int, dtype: str) -> str:
    """Return a line about adapters of experts whose products have no grouped kernel, or "".

    Args:
        model: The complete model.
        dtype: Of the computation, "bf16" or "fp32".
    """
    multiple = ALIGNMENT // DTYPES[dtype].itemsize
    if rank % multiple == 0 or not trained.of_experts(model):
        return ""
    return (
        f"lora.rank = {rank}: is no multiple of {multiple}, which the grouped kernel needs with [training] compute_dtype = "
        f"{dtype}, so the adapters of each expert are multiplied one by one"
    )


def init_adapter(config: LoraConfig, name: str, rows: Tensor, generator: Generator) -> None:
    """Draw the initial values of rows of an adapter's matrix, as the package peft does. rows: fp32, with all columns."""
    if name.endswith(LORA_B):
        rows.zero_()
    elif config.init == "kaiming":
        bound = rows.shape[1] ** -0.5
        rows.uniform_(-bound, bound, generator=generator)
    else:
        rows.normal_(0.0, 1 / config.rank, generator=generator)
