"""Tensors in Hugging Face's format: their names, and the parameters, matrices and rows that they contain."""

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate

import torch
from torch import Tensor

from models.blocks import PredictionBlock
from models.huggingface import HuggingFace, StoredStack
from models.sizes import Sizes

TEXT_MODEL = "model"
"""Name of the text model among the modules of transformers' classes for models without other modalities."""


def is_stacked(hf: HuggingFace, parameter: str) -> bool:
    """Return whether a parameter is a stack, whose matrices or vectors are read and written one by one."""
    _, module, leaf = _split(parameter)
    return "{}" in hf.names.get(f"{module}.{leaf}", "") or stack_of(hf, parameter) is not None


def stack_of(hf: HuggingFace, matrix: str) -> StoredStack | None:
    """Return the place of a matrix, or of its parameter, in a stored stack. None: it is not in a stored stack."""
    _, module, leaf = _split(matrix.partition("@")[0])
    return hf.stacks.get(f"{module}.{leaf}")


def by_matrix(hf: HuggingFace, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters by name, with the matrices of a stack as `name@expert`."""
    values: dict[str, Tensor] = {}
    for name, value in parameters.items():
        values |= {f"{name}@{i}": matrix for i, matrix in enumerate(value)} if is_stacked(hf, name) else {name: value}
    return values


def stored_name(hf: HuggingFace, matrix: str) -> str:
    """Return the name of the stored tensor that contains a matrix: a parameter, or `name@expert` of a stack. See name_in_files
    for layers for multi-token prediction."""
    parameter, _, expert = matrix.partition("@")
    prefix, module, leaf = _split(parameter)
    if (stack := stack_of(hf, parameter)) is not None:
        return f"model.{prefix}{stack.name}"
    if expert:
        stored = f"{hf.names[f'{module}.{leaf}'].format(expert)}.weight"
    else:
        stored = hf.names.get(f"{module}.{leaf}") or f"{hf.names[module]}.{leaf}"
    return f"model.{prefix}{stored}" if prefix else stored


def name_in_files(hf: HuggingFace, sizes: Sizes, stored: str) -> str:
    """Return the name in the files of a tensor that `stored_name` calls so."""
    return _with_other_beginning(_prediction_names(hf, sizes), stored)


def name_from_files(hf: HuggingFace, sizes: Sizes, name: str) -> str:
    """Inverse of `name_in_files`. A name that no file of the family has gets a remark."""
    own = _with_other_beginning({stored: own for own, stored in _prediction_names(hf, sizes).items()}, name)
    in_files = name_in_files(hf, sizes, name)
    return f"{in_files}, which is called {name}," if own == name != in_files else own


def _prediction_names(hf: HuggingFace, sizes: Sizes) -> dict[str, str]:
    """Return beginning of a name, as `stored_name` returns it -> that in the files, where they differ."""
    return {f"model.layers.{sizes.n_layers}.{inner}": stored for inner, stored in hf.prediction_names.items()}


def stored_prediction_layers(names: Collection[str], sizes: Sizes) -> int:
    """Return the number of layers for multi-token prediction that have some of the tensors of no other layer. names: of stored
    tensors, as `stored_name` returns them."""
    own = set(PredictionBlock.NAMES.values())
    found = (re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.weight", name) for name in names)
    return len({index[1] for index in found if index and index[2] in own and int(index[1]) >= sizes.n_layers})


def _with_other_beginning(beginnings: Mapping[str, str], name: str) -> str:
    return next((new + name.removeprefix(old) for old, new in beginnings.items() if name.startswith(old)), name)


def prediction_copies(hf: HuggingFace, sizes: Sizes) -> dict[str, str]:
    """Return module in the files -> module of the model whose weight it repeats, of all layers for multi-token prediction."""
    return {
        f"model.layers.{i}.{copy}": module for i in sizes.predictions for copy, module in hf.prediction_copies.items()
    }


def own_names(hf: HuggingFace, keys: Mapping[str, str], matrices: Iterable[str]) -> dict[str, str]:
    """Return name of a stored tensor -> key, in which other names of the family's files are replaced (HuggingFace.other_names).

    Args:
        hf: Of the family.
        keys: Name of a tensor in the files -> any key.
        matrices: Names of all matrices, see `stored_name`.
    """
    own = dict(keys)
    for name in {stored_name(hf, matrix) for matrix in matrices} - keys.keys() if hf.other_names else ():
        others = (name.replace(*parts) for parts in hf.other_names.items())
        if (other := next((n for n in others if n in own), None)) is not None:
            own[name] = own.pop(other)
    return own


def stored_tensors(hf: HuggingFace, matrices: Iterable[str]) -> dict[str, list[str]]:
    """Return name of a stored tensor -> names of the matrices whose rows it contains, in order. See `stored_name`."""
    stored: dict[str, list[str]] = {}
    for matrix in matrices:
        stored.setdefault(stored_name(hf, matrix), []).append(matrix)
    joined = {name for name, group in stored.items() if len(group) > 1 and stack_of(hf, group[0]) is None}
    return {
        name: sorted(group, key=lambda matrix: _place(hf, matrix)) if name in joined else group
        for name, group in stored.items()
    }


def _place(hf: HuggingFace, parameter: str) -> int:
    """Return the place of a parameter's name among those of the family."""
    _, module, leaf = _split(parameter)
    names = list(hf.names)
    return names.index(f"{module}.{leaf}" if f"{module}.{leaf}" in names else module)


def stored_shape(hf: HuggingFace, parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the stored tensor of a parameter, with -1 for its values if `shape` is empty. shape: that of the rows
    together."""
    _, module, leaf = _split(parameter)
    dims = hf.stored_shapes.get(f"{module}.{leaf}")
    return shape if dims is None else tuple(shape[0] if shape and size == -1 else size for size in dims)


def stacked_matrix(hf: HuggingFace, matrices: Mapping[str, Tensor]) -> Tensor:
    """Return the matrix of one expert in a stored stack. matrices: by name, all that this matrix contains."""
    first = next(iter(matrices.values()))
    stored = first.new_empty(sum(map(len, matrices.values())), *first.shape[1:])
    for name, rows in matrices.items():
        stack = stack_of(hf, name)
        stored[stack.first :: stack.step] = rows
    return stored.mT if stack.transposed else stored


def first_rows(hf: HuggingFace, matrices: Mapping[str, Tensor]) -> dict[str, int]:
    """Return name of a matrix -> its first row in the stored tensor."""
    rows = {}
    for group in stored_tensors(hf, matrices).values():
        ends = accumulate((matrices[name].shape[0] for name in group), initial=0)
        rows |= dict(zip(group, ends, strict=False))
    return rows


def is_permuted(hf: HuggingFace, parameter: str) -> bool:
    """Return whether Hugging Face's format has the parameter's rows in another order within each head."""
    return hf.is_paired and parameter.endswith(("attention.wq.weight", "attention.wk.weight"))


def reorder_rows(hf: HuggingFace, parameter: str, rows: Tensor, head_dim: int) -> Tensor:
    """Return rows of a parameter in Hugging Face's order. rows: of complete heads."""
    return permute_to_hf(rows, head_dim) if is_permuted(hf, parameter) else rows


def restore_rows(hf: HuggingFace, parameter: str, rows: Tensor, head_dim: int) -> Tensor:
    """Inverse of `reorder_rows`."""
    return permute_from_hf(rows, head_dim) if is_permuted(hf, parameter) else rows


def join_tensors(hf: HuggingFace, parameters: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """Return name of a stored tensor -> tensor. parameters: by native name."""
    matrices = by_matrix(hf, parameters)
    return {
        stored: torch.cat([reorder_rows(hf, name, matrices[name], head_dim) for name in names]).view(
            stored_shape(hf, names[0], (-1, *matrices[names[0]].shape[1:]))
        )
        if stack_of(hf, names[0]) is None
        else torch.stack([stacked_matrix(hf, {n: matrices[n] for n in group}) for group in by_expert(names)])
        for stored, names in stored_tensors(hf, matrices).items()
    }


def split_tensors(
    hf: HuggingFace, tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor], head_dim: int
) -> dict[str, Tensor]:
    """Inverse of `join_tensors`. parameters: tensors of the native shapes."""
    matrices, rows = by_matrix(hf, parameters), {}
    keys = own_names(hf, {name: name for name in tensors}, matrices)
    tensors = {name: tensors[key] for name, key in keys.items()}
    for stored, names in stored_tensors(hf, matrices).items():
        if stack_of(hf, names[0]) is not None:
            for name in names:
                rows[name] = stack_of(hf, name).rows(tensors[stored][int(name.partition("@")[2])])
            continue
        joined = tensors[stored].view(-1, *matrices[names[0]].shape[1:])
        parts = joined.split([len(matrices[name]) for name in names])
        for name, part in zip(names, parts, strict=True):
            rows[name] = restore_rows(hf, name, part, head_dim)
    return {
        name: torch.stack([rows[f"{name}@{i}"] for i in range(len(value))]) if is_stacked(hf, name) else rows[name]
        for name, value in parameters.items()
    }


def _split(parameter: str) -> tuple[str, str, str]:
    """Return the prefix of the block ("layers.0." or ""), the name of the module and that of the parameter in the module."""
    module, _, leaf = parameter.rpartition(".")
    if not module.startswith("layers."):
        return "", module, leaf
    _, index, inner = module.split(".", 2)
    return f"layers.{index}.", inner, leaf


def by_expert(matrices: Iterable[str]) -> list[list[str]]:
    """Return the names of matrices, `name@expert`, by expert in order."""
    groups: dict[int, list[str]] = {}
    for matrix in matrices:
        groups.setdefault(int(matrix.partition("@")[2]), []).append(matrix)
    return [groups[expert] for expert in sorted(groups)]


def text_name(name: str) -> str | None:
    """Return the name of a tensor in the text model, given its name in a multimodal model. None if the tensor belongs to another
    modality."""
    for prefix in ("model.language_model.", "language_model."):  # in new and in old files
        if name.startswith(prefix):
            inner = name.removeprefix(prefix)
            return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"
    return name if name.startswith(("lm_head.", "mtp.")) else None


def permute_to_hf(rows: Tensor, head_dim: int) -> Tensor:
    """Return rows in Hugging Face's order. rows: weights of complete heads in Meta's order, shape (heads * head_dim, columns).
    In Meta's order, the two rows of a rotated pair are neighbours. In Hugging Face's order, the first rows of all pairs of a head
    precede the second rows of these pairs."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def permute_from_hf(rows: Tensor, head_dim: int) -> Tensor:
    """Inverse of permute_to_hf."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
