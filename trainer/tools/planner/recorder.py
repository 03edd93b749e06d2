"""Recording of the memory, communication and computation of each operator, for fake and real tensors."""

import bisect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trainer.parallel.activation_checkpoint import in_backward
from trainer.runtime.dtensor import to_local
from trainer.tools.planner.recorded import MEMORY_CATEGORIES, Allocation, ExecutionPoint, Traffic

aten = torch.ops.aten

_GPU_ALLOCATION_BYTES = 512
"""Granularity of torch's GPU allocator. It rounds allocations up to multiples of this size."""


class Recorder(TorchDispatchMode):
    """Dispatch mode that records operators on plain tensors. An operator on a DTensor is recorded as operators on its shards."""

    def __init__(self, on_gpu: bool = False):
        """on_gpu: whether to record the memory that a GPU's allocator would allocate."""
        super().__init__()
        self.on_cpu = not on_gpu
        self.round_to = _GPU_ALLOCATION_BYTES if on_gpu else 1
        self.allocations: list[Allocation] = []
        self.points: list[tuple[int, ExecutionPoint]] = []
        """Pairs (index of an event, execution point that starts at this event)."""
        self.num_events = 0
        self.weight = 1.0
        """Factor by which the counts and bytes of the next recorded operators and collectives are multiplied."""
        self.op_counts: Counter[str] = Counter()
        """Operator name -> number of calls, not multiplied by `weight`."""
        self.traffic: dict[tuple[str, str], Traffic] = {}
        """(group name, collective) -> traffic."""
        self.op_costs: Counter[tuple[str, int, int]] = Counter()
        """(precision, FLOPs, bytes moved) of an operator -> number of calls."""
        self.host_transfer_bytes: Counter[bool] = Counter()
        """Number of bytes copied between device and host memory. Key True: during the update; False: in forward and backward."""
        self.host_compute_bytes = 0.0
        """Number of bytes that operators in host memory read and write."""
        self.in_schedule = False
        """Whether a pipeline schedule is running. If so, operators outside modules are not attributed to the update."""
        self.paused = False
        """Whether to ignore operators. It is true while operators run that are not part of a real step."""
        self._alive: dict[int, tuple[weakref.ref, Allocation]] = {}
        self._forward: list[str] = []
        """Names of the modules whose forward is running, the innermost module last."""
        self._backward = ""
        """Name of the module whose output gradient was computed most recently."""
        self._patch = patch.object(torch.UntypedStorage, "resize_", self._recorded_resize(torch.UntypedStorage.resize_))

    def register(self, tensor: Tensor, category: str, host: bool) -> None:
        """Add a tensor that was allocated before the recording. host: whether the tensor is in host memory."""
        if self._allocation(to_local(tensor)) is None:
            self._observe(to_local(tensor), -1)
            self.label(tensor, category, host)

    # ------------------------------------------------------------ recording

    def __enter__(self):
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default or self.paused:
            return out
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        for tensor in inputs:
            self._observe(tensor, -1)
        for tensor in outputs:
            self._observe(tensor, self.num_events)
        if self._in_update() and self._all_on_host(inputs):
            for tensor in outputs:
                if not self._is_on_host(tensor):
                    self.label(tensor, "", host=True)
        if self.on_cpu and (num_bytes := _workspace_bytes(func, inputs, outputs)):
            allocation = Allocation(num_bytes, self.num_events, self._module(), in_backward())
            allocation.died, allocation.died_in_backward = self.num_events + 1, in_backward()
            self.allocations.append(allocation)
        self.op_counts[func.overloadpacket.__name__] += 1
        self._record(func, args, kwargs or {}, inputs, outputs)
        self.num_events += 1
        return out

    def _observe(self, tensor: Tensor, event: int) -> None:
        if self._allocation(tensor) is None and tensor.untyped_storage().nbytes():
            self._allocate(tensor.untyped_storage(), event)

    def _allocate(self, storage: torch.UntypedStorage, event: int, category: str = "") -> None:
        num_bytes = -(-storage.nbytes() // self.round_to) * self.round_to
        allocation = Allocation(num_bytes, event, self._module(), in_backward(), category)
        key = storage._cdata
        self._alive[key] = weakref.ref(storage, lambda _: self._free(key)), allocation
        self.allocations.append(allocation)
        point = ExecutionPoint(allocation.module, allocation.in_backward, self.in_schedule)
        # A tensor that existed before the recording may be observed in the middle of it. The events of the points must ascend.
        if not self.points or (event >= 0 and self.points[-1][1] != point):
            self.points.append((event, point))

    def _free(self, key: int) -> None:
        _, allocation = self._alive.pop(key)
        allocation.died, allocation.died_in_backward = self.num_events, in_backward()

    def _recorded_resize(self, resize: Callable) -> Callable:
        """Return a function that calls `resize` and records the change. FSDP allocates and releases gathered parameters with
        resize_, which is not dispatched as an operator."""

        def resize_(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
            result = resize(storage, num_bytes)
            if storage._cdata in self._alive:
                self._free(storage._cdata)
            if storage.nbytes():
                self._allocate(storage, self.num_events, "unsharded parameters")
            self.num_events += 1
            return result

        return resize_

    def label(self, tensor: Tensor, category: str, host: bool = False) -> None:
        """Set the category and location of a tensor's memory. An explicit category overrides the derived one."""
        if allocation := self._allocation(to_local(tensor)):
            allocation.category, allocation.host = category, host

    def _allocation(self, tensor: Tensor) -> Allocation | None:
        _, allocation = self._alive.get(tensor.untyped_storage()._cdata, (None, None))
        return allocation

    # ------------------------------------------------------------ host memory

    def transfer(self, num_bytes: int) -> None:
        """Record a copy between host and device memory."""
        self.host_transfer_bytes[self._in_update()] += num_bytes * self.weight

    def _is_on_host(self, tensor: Tensor) -> bool:
        allocation = self._allocation(tensor)
        return allocation is not None and allocation.host

    def _all_on_host(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether all tensors are in host memory. Scalars are ignored, because they are copied implicitly."""
        tensors = [tensor for tensor in tensors if tensor.dim()]
        return bool(tensors) and all(map(self._is_on_host, tensors))

    def _in_update(self) -> bool:
        return not (self.in_schedule or self._forward or in_backward())

    # ------------------------------------------------------------ costs

    def _record(self, func, args: tuple, kwargs: dict, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._record_collective(func.overloadpacket.__name__.strip("_"), args, inputs, outputs)
            return
        if func.is_view:
            return
        flops = _flops(func, args, kwargs, outputs)
        written = _written(func, args, kwargs) if func._schema.is_mutable else outputs
        num_bytes = sum(t.nbytes for t in (*inputs, *written))
        on_host = [t for t in (*inputs, *outputs) if t.dim() and self._is_on_host(t)]
        if on_host and self._all_on_host((*inputs, *outputs)):
            self.host_compute_bytes += num_bytes * self.weight
            return
        if on_host:
            self.transfer(sum({t.untyped_storage()._cdata: t.nbytes for t in on_host}.values()))
        precision = "bf16" if outputs and outputs[0].dtype == torch.bfloat16 else "fp32"
        if func is aten._scaled_mm.default:
            precision = "fp8"
        self.op_costs[(precision, flops, num_bytes)] += self.weight

    def _record_collective(self, name: str, args: tuple, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        for tensor in (*inputs, *outputs):
            if allocation := self._allocation(tensor):
                allocation.sent = True
                allocation.between_stages |= _COLLECTIVES.get(name) in ("send", "receive")
        if name in ("wait_tensor", "wrap_tensor_autograd"):  # neither sends anything
            return
        group = _group_of(args)
        if group.size() == 1:
            return
        traffic = self.traffic.setdefault((group.group_name, _COLLECTIVES[name]), Traffic())
        traffic.count += self.weight
        traffic.num_bytes += self.weight * _full_bytes(args, (*inputs, *outputs), group)

    # ------------------------------------------------------------ modules

    @contextmanager
    def tracking_modules(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Context manager that attributes allocations to the modules of the models."""
        names = {module: name for model in models for name, module in model.named_modules()}

        def enter(module: nn.Module, args: Any) -> None:
            if module in names:
                self._forward.append(names[module])

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if module not in names:
                return
            self._forward.pop()
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda gradient: enter_backward(names[module]))

        def enter_backward(name: str) -> None:
            self._backward = name
            self._forward.clear()

        handles = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _module(self) -> str:
        if self._forward:
            return self._forward[-1]
        return self._backward if in_backward() else ""

    # ------------------------------------------------------------ results

    def timeline(self, include: Callable[[Allocation], bool]) -> np.ndarray:
        """Return the number of bytes in each category over time: an int64 array of shape (categories, events + 2). Column i + 1
        is the memory after event i."""
        changes = np.zeros((len(MEMORY_CATEGORIES), self.num_events + 2), dtype=np.int64)
        for allocation in filter(include, self.allocations):
            row = MEMORY_CATEGORIES.index(allocation.final_category())
            changes[row, allocation.born + 1] += allocation.num_bytes
            if allocation.died is not None:
                changes[row, allocation.died + 1] -= allocation.num_bytes
        return changes.cumsum(axis=1)

    def alive(self, event: int) -> list[Allocation]:
        """Return the allocations of device memory that exist after the event."""
        return [a for a in self.allocations if not a.host and a.born <= event and (a.died is None or a.died > event)]

    def point(self, event: int) -> ExecutionPoint:
        return self.points[bisect.bisect_right(self.points, event, key=lambda entry: entry[0]) - 1][1]


def _workspace_bytes(func, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Return the number of bytes of temporary copies that a CPU operator makes when it converts its inputs to one precision."""
    if func is aten.embedding_dense_backward.default:  # sums in fp32
        return outputs[0].numel() * 4 if outputs[0].element_size() < 4 else 0
    if torch.Tag.pointwise not in func.tags:
        return 0
    tensors = [t for t in inputs if t.dim() and t.is_floating_point()]
    common = max((t.element_size() for t in tensors), default=0)
    return sum(t.numel() * common for t in tensors if t.element_size() < common)


def _arguments(func, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return the arguments of an operator call as a dict. Arguments that have a default value may be missing."""
    return dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs


def _written(func, args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the arguments that an operator modifies in place."""
    values = _arguments(func, args, kwargs)
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for t in tree_leaves([values.get(name) for name in names]) if isinstance(t, Tensor)]


_COLLECTIVES = {
    "allgather_base": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_coalesced": "all-reduce",
    "alltoall_base": "all-to-all",
    "all_to_all_single": "all-to-all",
    "send": "send",
    "recv": "receive",
}


def _group_of(args: tuple) -> dist.ProcessGroup:
    for argument in reversed(args):
        if isinstance(argument, str) and argument not in ("sum", "max", "avg", "min"):
            return dist.distributed_c10d._resolve_process_group(argument)
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    raise AssertionError("collective without a process group")


def _full_bytes(args: tuple, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> float:
    """Return the size of the full tensors of a collective. For an all-to-all with split sizes: the size of a tensor in equal
    parts that sends as much to the other ranks.

    Args:
        args: Of the operator.
        tensors: Its inputs and outputs.
        group: Its process group.
    """
    ranks = group.size()
    lists = [a for a in args if isinstance(a, list) and len(a) == ranks and all(isinstance(n, int) for n in a)]
    exchanged = [
        t.nbytes * (1 - splits[group.rank()] / sum(splits))
        for splits in lists
        for t in tensors
        if sum(splits) == len(t) > 0
    ]
    return max(exchanged) * ranks / (ranks - 1) if exchanged else max(t.nbytes for t in tensors)


def _flops(func, args: tuple, kwargs: dict, outputs: list[Tensor]) -> int:
    """Return the number of FLOPs. Attention has two matmuls in forward and five in backward. A causal mask halves their FLOPs."""
    packet = func.overloadpacket
    forward, backward = (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
    if packet in (forward, backward):
        values = _arguments(func, args, kwargs)
        products = 5 if packet is backward else 2
        return products * 2 * values["query"].numel() * values["key"].shape[2] // (2 if values.get("is_causal") else 1)
    formula = flop_registry.get(packet)
    return formula(*args, **kwargs, out_val=outputs[0]) if formula is not None else 0
