"""What a piece of code did, operator by operator, and what memory it holds."""

from collections import Counter

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operators(TorchDispatchMode):
    """Counts operators on plain tensors; a DTensor's are those that it consists of."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def all_gathers(self) -> int:
        return self.counts["all_gather_into_tensor"]

    @property
    def matmuls(self) -> int:
        return self.counts["mm"]


class Memory(TorchDispatchMode):
    """Bytes of the storages that operators made inside the context and that are still alive."""

    def __init__(self, ignored_shape: tuple[int, ...] | None = None):
        """ignored_shape: of tensors that are not counted."""
        super().__init__()
        self.ignored_shape = ignored_shape
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                is_new = storage._cdata not in known  # no view of what was there
                if is_new and tensor.shape != self.ignored_shape:
                    self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.live())
        return out

    def live(self) -> int:
        self.storages = {key: kept for key, kept in self.storages.items() if not kept[0].expired()}
        return sum(size for _, size in self.storages.values())
