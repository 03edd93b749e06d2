"""The matrix products and attention kernels of a training step, replayed alone: a lower bound of an eager step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from trainer.parallel.activation_checkpoint import SAVEABLE_OPS

aten = torch.ops.aten
KERNELS = (
    *SAVEABLE_OPS["matmuls"],
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


class KernelRecorder(TorchDispatchMode):
    """Dispatch mode that records calls of KERNELS. `calls` repeats them on random tensors of the same shapes and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
        self._copies: dict[tuple, Tensor] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in KERNELS:
            copied_args, copied_kwargs = tree_map_only(Tensor, self._copy, (args, kwargs or {}))
            self.calls.append(partial(function, *copied_args, **copied_kwargs))
        return function(*args, **(kwargs or {}))

    def _copy(self, tensor: Tensor) -> Tensor:
        """Return a tensor that later calls share if the original has the same memory, so that caches are used alike."""
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._copies:
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            self._copies[key] = copy.normal_() if copy.is_floating_point() else copy.copy_(tensor)
        return self._copies[key]
