"""Adapters in the format of the package peft: names of their tensors, and reading."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.huggingface_tensors import (
    TEXT_MODEL,
    by_matrix,
    first_rows,
    is_stacked,
    restore_rows,
    stack_of,
    stored_name,
    stored_tensors,
    text_name,
)
from models.moe import is_stack
from models.sizes import text_of
from models.spec import ModelSpec, meta_model
from trainer.adapters.select import LORA_A, LORA_B, TrainedParameters, adaptable_weights, matrices_of, weight_of
from trainer.checkpoint.commit import Tensors, require_match
from trainer.checkpoint.formats.huggingface_files import file_inside, open_tensors, read_object
from trainer.checkpoint.formats.streaming import layer_order
from trainer.checkpoint.manifest import CorruptError
from trainer.checkpoint.tensor_files import DTYPE_OF, TensorMetadata
from trainer.runtime.dtensor import local_region

PEFT_CONFIG, PEFT_TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Beginning of the names of tensors in peft's files."""
_LEAVES = {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight"}
_UNSUPPORTED = (
    *("use_dora", "lora_bias", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "layer_replication"),
    *("trainable_token_indices", "use_qalora", "alora_invocation_tokens", "target_parameters"),
)
"""Keys of adapter_config.json that change the meaning of an adapter. They must be absent or false."""
_WAYS_OUT = {
    "target_parameters": "adapters of stacked experts in this form cannot be continued; merge them in peft "
    "(merge_and_unload), and use the model as a base"
}
"""Key of _UNSUPPORTED -> what its adapters are, and what can be done."""


class PeftNames:
    """Names of parameters in peft's files, whose tensors may contain the rows of several parameters."""

    def __init__(self, spec: ModelSpec, sizes: Any, text_model: str = TEXT_MODEL):
        """text_model: see Weights.text_model, of the base model."""
        self.text_model = text_model
        self.hf, self.head_dim, self.model = spec.huggingface, sizes.head_dim, meta_model(spec.model, sizes)
        self.parameters = dict(self.model.named_parameters())
        matrices = by_matrix(self.hf, self.parameters)
        self.first_row = first_rows(self.hf, matrices)
        """Name of a parameter -> its first row in the stored tensor."""
        self.groups = stored_tensors(self.hf, matrices)
        """Name of a stored tensor of the base model -> names of the parameters whose rows it contains, in order."""
        self.num_rows = {name: sum(matrices[m].shape[0] for m in group) for name, group in self.groups.items()}
        """Name of a stored tensor of the base model -> number of rows."""
        # Without tied output projections, whose parameter has another name: they have no adapters.
        adaptable = [name for name in adaptable_weights(self.model) if name in self.parameters]
        self.adaptable = {
            matrix: module_of(stored_name(self.hf, matrix)) for matrix in self.matrices(adaptable, self.parameters)
        }
        """Name of a matrix that can have an adapter -> name of its module in the base model."""

    def matrices(self, names: Iterable[str], parameters: Mapping[str, Tensor]) -> list[str]:
        """Return the names, each stack replaced by its matrices, `name@expert`. parameters: by name."""
        matrices = []
        for name in names:
            if is_stack(self.model, name):
                matrices += [f"{name}@{i}" for i in range(len(parameters[name]))]
            else:
                matrices.append(name)
        return matrices

    def base(self, name: str) -> str:
        """Return the matrix of the base model to which a trained matrix belongs."""
        return weight_of(name) if _leaf_of(name) else name

    def in_base(self, stored: str) -> str:
        """Return the name in the base model, as transformers builds it, of a tensor of the text model or of a module."""
        if stored.startswith(f"{TEXT_MODEL}."):
            stored = f"{self.text_model}{stored.removeprefix(TEXT_MODEL)}"
        for part, own in self.hf.module_names.items():
            stored = stored.replace(part, own)
        return stored

    def stored(self, name: str) -> str:
        stored, leaf = self.in_base(stored_name(self.hf, self.base(name))), _leaf_of(name)
        return _PREFIX + (f"{stored.removesuffix('weight')}{_LEAVES[leaf]}" if leaf else stored)

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the stored tensor of a trained matrix. shape: of the parameter, which may be a stack."""
        rows, *columns = shape[-2:]
        return rows if _leaf_of(name) == LORA_A else self.num_rows[stored_name(self.hf, self.base(name))], *columns

    def unsupported_adapters(self, adapted: Iterable[str]) -> str:
        """Return why peft cannot load adapters of these weights, or "" if it can. transformers 5 stacks the matrices of experts.
        There, peft converts adapters of experts, which it recognizes by the last words of their names, if none is missing."""
        stacks = [name for name in adaptable_weights(self.model) if is_stack(self.model, name)]
        adapted = set(adapted)
        own = [name for name in stacks if name in adapted]
        if own and stack_of(self.hf, own[0]) is not None:
            return f"{own[0]} has adapters, and those of experts of {self.hf.architecture} are not written in peft's format"
        if own and (missing := [name for name in stacks if name not in adapted]):
            return (
                f"{missing[0]} has no adapters, but {own[0]} has, and peft can only adapt all matrices of all experts"
            )
        words = {last_word(self.adaptable[f"{name}@0"]) for name in stacks if stack_of(self.hf, name) is None}
        for name in sorted(adapted - {*own}):
            if (word := last_word(self.adaptable[name])) in words:
                return f"{name} has an adapter, but peft takes {word} for a matrix of experts"
        return ""

    def unsupported(self, fully: Iterable[str]) -> str:
        """Return why peft cannot train these parameters of the model without training others, or "" if it can."""
        if stack := next((name for name in sorted(fully) if is_stacked(self.hf, name)), ""):
            return f"{stack} contains the matrices of all experts, and peft cannot train them fully"
        uses = [parameter for _, parameter in self.model.named_parameters(remove_duplicate=False)]
        for stored, group in stored_tensors(self.hf, sorted(fully, key=layer_order)).items():
            name = group[0]
            if len(group) < len(self.groups[stored]):
                return f"{name} is a part of {stored}, and peft cannot train a part of a tensor"
            if sum(use is self.parameters[name] for use in uses) > 1:
                return f"{name} is also the output weight, and peft cannot train tied embeddings"
        return ""


def _leaf_of(name: str) -> str:
    """Return LORA_A or LORA_B for a matrix of an adapter, and "" for another parameter."""
    parameter = name.partition("@")[0]
    return next(filter(parameter.endswith, _LEAVES), "")


def module_of(stored: str) -> str:
    return stored.removesuffix(".weight")


def last_word(module: str) -> str:
    return module.rpartition(".")[2]


def unsupported_by_peft(names: PeftNames, trained: TrainedParameters) -> str:
    """Return why peft cannot train these parameters without training others, or ""."""
    return names.unsupported(trained.fully) or names.unsupported_adapters(trained.adapted)


def peft_settings(folder: Path) -> dict[str, Any]:
    """Return setting of [lora] -> value. Raises CorruptError or ConfigError if adapter_config.json does not describe a supported
    adapter."""
    config = read_object(folder / PEFT_CONFIG)
    fixed = {"peft_type": ("LORA",), "bias": ("none", None)}
    fixed |= {"init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", None)}  # others change the base
    for key, values in (fixed | dict.fromkeys(_UNSUPPORTED, (None, False, [], {}))).items():
        if config.get(key) not in values:
            expected = " or ".join(json.dumps(value) for value in values if value is not None)
            rule = f": {_WAYS_OUT[key]}" if key in _WAYS_OUT else f" must be {expected}"
            raise CorruptError(f"{PEFT_CONFIG}: {key} {text_of(config.get(key))}{rule}")
    scale = {"rank": config.get("r", 8), "alpha": config.get("lora_alpha", 8)}
    for key, value in (("r", scale["rank"]), ("lora_alpha", scale["alpha"])):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CorruptError(f"{PEFT_CONFIG}: {key} {text_of(value)} must be a number")
    return scale | {"rslora": bool(config.get("use_rslora"))}


@torch.no_grad()
def load_peft(folder: Path, names: PeftNames, own: Tensors, trained: Tensors) -> None:
    """Load this rank's parameters in place.

    Args:
        own: This rank's parameters, as in load_adapter.
        trained: As in load_adapter.

    Raises:
        CorruptError: The files are damaged.
        ConfigError: The configuration is not supported, or the adapter is another one.
    """
    with open_tensors(file_inside(folder, PEFT_TENSORS)) as tensors:
        index, key_of = {}, {}
        for key in tensors.keys():  # noqa: SIM118
            stored, name = tensors.get_slice(key), key.removeprefix(_PREFIX)
            name = f"{_PREFIX}{names.in_base(text_name(name) or name)}"
            dtype = DTYPE_OF.get(stored.get_dtype(), torch.uint8)
            key_of[name], index[name] = key, TensorMetadata(dtype, tuple(stored.get_shape()), ())

        def read(name: str) -> Tensor:
            return tensors.get_tensor(key_of[name])

        stored = names.matrices([n for n in trained if not is_stacked(names.hf, n)], trained)
        shapes = {name: names.shape(name, trained[name.partition("@")[0]].shape) for name in stored}
        expected = {names.stored(name): torch.empty(shape, device="meta") for name, shape in shapes.items()}
        stacks = [weight for n in trained if _leaf_of(n) and stack_of(names.hf, weight := weight_of(n)) is not None]
        problems = [names.unsupported(trained.keys() & names.parameters.keys()), names.unsupported_adapters(stacks)]
        problems = [*filter(None, problems)]
        problems += [f"{key} is not trained by this run" for key in sorted(index.keys() - expected.keys())]
        require_match(folder, index, expected, cast=True, problems=problems)
        # The rows are compared only now, because all tensors have the expected shapes.
        require_match(folder, {}, {}, cast=True, problems=[*_dropped_rows(names, read, trained)])
        for name, parameter in own.items():
            local, region = local_region(parameter)
            if is_stack(names.model, name):  # the adapters of this rank's experts
                for i, matrix in enumerate(local, region[0].start):
                    matrix.copy_(read(names.stored(f"{name}@{i}"))[region[1:]])
                continue
            value = read(names.stored(name))
            if not name.endswith(LORA_A):
                base = names.base(name)
                value = value[names.first_row[base] :][: parameter.shape[0]]
                value = restore_rows(names.hf, base, value, names.head_dim)
            local.copy_(value[region])


def _dropped_rows(names: PeftNames, read: Callable[[str], Tensor], trained: Tensors) -> Iterator[str]:
    """Yield the problem of each second matrix whose rows of parameters that the run does not train are not zero. read: returns a
    tensor by the name that it has if the base is a text model."""
    second = names.matrices([name for name in trained if name.endswith(LORA_B)], trained)
    for stored, group in stored_tensors(names.hf, map(names.base, second)).items():
        if len(group) < len(names.groups[stored]):
            key = names.stored(matrices_of(group[0])[1])
            untrained = torch.ones(names.num_rows[stored], dtype=torch.bool)
            for name in group:
                untrained[names.first_row[name] :][: len(names.parameters[name])] = False
            if read(key)[untrained].any():
                yield f"{key} has nonzero rows that are not trained by this run"
