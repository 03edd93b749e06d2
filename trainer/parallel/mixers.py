"""The mixers of a run: kernels and masks for documents packed into one sample, for sequences split over the cp axis, and for
windows. They are replaced as modules, and all that is asked about a mixer here is answered by the file of its kind."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType

import torch
from torch import nn

from models.attention import AttentionKind
from models.delta_net import RecurrentKind
from models.spec import LayerKind, Structure
from trainer.parallel import attention, recurrence
from trainer.parallel.attention import AttentionBackend
from trainer.parallel.sample_layout import SampleLayout

_FILES = {AttentionKind: attention, RecurrentKind: recurrence}
"""Class of a kind -> the module that has `replacement` and `kernel_name` for it."""


def _file_of(kind: LayerKind) -> ModuleType:
    return next(file for cls, file in _FILES.items() if isinstance(kind, cls))


def kernel_name(kind: LayerKind, layout: SampleLayout, tp: int, device: torch.device) -> str:
    """Return the name of the kernel of a kind in training, such as "flash_attention". tp: degree of tensor parallelism."""
    return _file_of(kind).kernel_name(kind, layout, tp, device)


def apply_mixers(
    model: nn.Module,
    structure: Structure,
    layout: SampleLayout,
    backend: AttentionBackend,
    recompute_gathers: Collection[str],
) -> None:
    """Replace the kernels and masks of the layers whose own do not fit, in place.

    Args:
        model: A stage of the model.
        structure: Of the model.
        layout: Of the samples.
        backend: Kernels and masks of the device.
        recompute_gathers: Names of the blocks in which backward repeats the gathers of a kernel.
    """
    replace_modules(model, _modules_of(model, structure, layout, backend, recompute_gathers))


def mixers_by_document(
    models: Iterable[nn.Module], structure: Structure, layout: SampleLayout, backend: AttentionBackend
) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that returns a context manager in which no token sees another document, also if tokens do in training.
    Its modules are made once: compiled blocks are compiled once for them.

    Args:
        models: This rank's stages.
        structure: Of the model.
        layout: Of the samples, by document.
        backend: Kernels and masks of the device.
    """
    modules = [(model, _modules_of(model, structure, layout, backend, ())) for model in models]

    @contextmanager
    def by_document() -> Iterator[None]:
        in_training = [(model, replace_modules(model, own)) for model, own in modules]
        try:
            yield
        finally:
            for model, replaced in in_training:
                replace_modules(model, replaced)

    return by_document


def replace_modules(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Replace modules of a model, which are given by their paths. Return those that were replaced."""
    replaced = {path: model.get_submodule(path) for path in modules}
    for path, module in modules.items():
        model.set_submodule(path, module)
    return replaced


def _modules_of(
    model: nn.Module,
    structure: Structure,
    layout: SampleLayout,
    backend: AttentionBackend,
    recompute_gathers: Collection[str],
) -> dict[str, nn.Module]:
    """Return path -> module of the masks and kernels that are replaced. See apply_mixers."""
    modules: dict[str, nn.Module] = {}
    kernels: dict[str, Callable[[bool], nn.Module]] = {}
    for name, kind in structure.kinds.items():
        if (replaced := _file_of(kind).replacement(kind, layout, backend)) is not None:
            modules[f"{structure.masks}.{name}"] = replaced.mask
            kernels[name] = replaced.kernel
    for block, _ in model.get_submodule(structure.blocks_path).named_children():
        if (kernel := kernels.get(structure.layer_kinds[int(block)])) is not None:
            modules[structure.kernel(int(block))] = kernel(block in recompute_gathers)
    return modules
