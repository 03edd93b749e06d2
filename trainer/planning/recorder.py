"""What a piece of code allocates, sends and computes, operator by operator; of fake tensors as of real ones."""

import bisect
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trainer.runtime.dtensor import to_local

aten = torch.ops.aten

KINDS = (
    "parameters",
    "optimizer",
    "gradients",
    "activations",
    "unsharded parameters",
    "communication",
    "temporaries",
)
"""Of memory. gradients: before their reduction too; activations: what forward leaves for backward; communication: buffers of
collectives; temporaries: all else, what backward computes again among it."""


_GPU_ALLOCATION = 512
"""Of torch's allocator there: memory is given in multiples of so many bytes."""


@dataclass(slots=True)
class Allocation:
    """A stretch of time in which a storage had memory."""

    size: int
    born: int
    """Number of the event, counted from 0; -1: before the recording."""
    module: str
    """Where it was made."""
    in_backward: bool
    kind: str = ""
    """As far as it is known from what is done with it."""
    sent: bool = False
    host: bool = False
    """In host memory, where the device has one of its own."""
    died: int | None = None
    """Number of the event; None: not in the recording."""
    died_in_backward: bool = False

    def final_kind(self) -> str:
        if self.kind:
            return self.kind
        if not self.in_backward and self.died_in_backward:
            return "activations"
        return "communication" if self.sent else "temporaries"


@dataclass(frozen=True)
class ExecutionPoint:
    """Which work is under way."""

    module: str
    in_backward: bool

    def __str__(self) -> str:
        return f"{'backward' if self.in_backward else 'forward'} of {self.module}" if self.module else "the update"


@dataclass
class Traffic:
    """Collectives of one kind over one group."""

    count: float = 0
    size: float = 0
    """Bytes of the whole tensors: of what a gather gives, a reduction gets."""


@dataclass
class _Place:
    """What is being computed: the innermost module; in backward, that whose output's gradient came last."""

    forward: list[str] = field(default_factory=list)
    backward: str = ""


class Recorder(TorchDispatchMode):
    """Operators on plain tensors; a DTensor's are those that it consists of."""

    def __init__(self, on_gpu: bool = False):
        """on_gpu: record what it would be there."""
        super().__init__()
        self.on_cpu = not on_gpu
        self.round_to = _GPU_ALLOCATION if on_gpu else 1
        self.allocations: list[Allocation] = []
        self.moments: list[tuple[int, ExecutionPoint]] = []
        self.events = 0
        self.weight = 1.0
        """Of the work and traffic that follow: how often they happen."""
        self.traffic: dict[tuple[str, str], Traffic] = {}
        """By (name of the group, collective)."""
        self.work: Counter[tuple[str, int, int]] = Counter()
        """(precision, FLOPs, bytes moved) of an operator -> how often."""
        self.host_moved: Counter[bool] = Counter()
        """Bytes that go between device and host memory: in the update (True), and before it."""
        self.host_work = 0.0
        """Bytes that operators in host memory read and write."""
        self.stepping = False
        """Whether what is done belongs to forward and backward, where no module tells so: a pipeline's schedule."""
        self._looking = True
        self._alive: dict[int, tuple[weakref.ref, Allocation]] = {}
        self._place = _Place()
        self._resize = torch.UntypedStorage.resize_

    def know(self, tensor: Tensor, kind: str, host: bool) -> None:
        """Of what is there before the recording. host: in host memory."""
        if to_local(tensor).untyped_storage()._cdata not in self._alive:
            self._see(to_local(tensor), -1)
            self.mark(tensor, kind, host)

    # ------------------------------------------------------------ the recording

    def __enter__(self):
        recorder, resize = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int):  # no operator tells of it
            result = resize(storage, size)
            recorder._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default or not self._looking:
            return out
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        for tensor in made:
            self._see(tensor, self.events)
        if self._in_update() and self._all_on_host(given):
            for tensor in made:
                if not self._is_on_host(tensor):
                    self.mark(tensor, "", host=True)
        if self.on_cpu and (size := _workspace(func, given, made)):
            allocation = Allocation(size, self.events, self._module(), in_backward())
            allocation.died, allocation.died_in_backward = self.events + 1, in_backward()
            self.allocations.append(allocation)
        self._note(func, args, kwargs or {}, given, made)
        self.events += 1
        return out

    @contextmanager
    def weighted(self, weight: float) -> Iterator[None]:
        before, self.weight = self.weight, weight
        try:
            yield
        finally:
            self.weight = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """From what no real step would do."""
        self._looking = False
        try:
            yield
        finally:
            self._looking = True

    def _see(self, tensor: Tensor, now: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._alive and storage.nbytes():
            self._allocate(storage, now, "")

    def _allocate(self, storage: torch.UntypedStorage, now: int, kind: str) -> None:
        size = -(-storage.nbytes() // self.round_to) * self.round_to
        allocation = Allocation(size, now, self._module(), in_backward(), kind)
        key = storage._cdata
        self._alive[key] = weakref.ref(storage, lambda _: self._free(key)), allocation
        self.allocations.append(allocation)
        moment = ExecutionPoint(allocation.module, allocation.in_backward)
        if not self.moments or self.moments[-1][1] != moment:
            self.moments.append((now, moment))

    def _free(self, key: int) -> None:
        _, allocation = self._alive.pop(key)
        allocation.died, allocation.died_in_backward = self.events, in_backward()

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP gives storage to gathered parameters, and takes it away again, in this way."""
        if storage._cdata in self._alive:
            self._free(storage._cdata)
        if storage.nbytes():
            self._allocate(storage, self.events, "unsharded parameters")
        self.events += 1

    def mark(self, tensor: Tensor, kind: str, host: bool = False) -> None:
        """Say what a tensor is, whatever was done with it, and where."""
        found = self._alive.get(to_local(tensor).untyped_storage()._cdata)
        if found is not None:
            found[1].kind, found[1].host = kind, host

    # ------------------------------------------------------------ host memory

    def move(self, size: int) -> None:
        """Between host memory and the device's."""
        self.host_moved[self._in_update()] += size * self.weight

    def _is_on_host(self, tensor: Tensor) -> bool:
        found = self._alive.get(tensor.untyped_storage()._cdata)
        return found is not None and found[1].host

    def _all_on_host(self, tensors: Sequence[Tensor]) -> bool:
        """But for scalars, which go there without being asked."""
        large = [tensor for tensor in tensors if tensor.dim()]
        return bool(large) and all(map(self._is_on_host, large))

    def _in_update(self) -> bool:
        return not (self.stepping or self._place.forward or in_backward())

    # ------------------------------------------------------------ what is done

    def _note(self, func, args: tuple, kwargs: dict, given: list[Tensor], made: list[Tensor]) -> None:
        space = func.namespace
        if space in ("c10d", "_c10d_functional"):
            self._note_collective(func.overloadpacket.__name__.strip("_"), args, given, made)
            return
        if func.is_view:
            return
        flops = _flops(func, args, kwargs, made)
        written = _written(func, args, kwargs) if func._schema.is_mutable else made
        size = sum(t.nbytes for t in (*given, *written))
        on_host = [t for t in (*given, *made) if t.dim() and self._is_on_host(t)]
        if on_host and self._all_on_host((*given, *made)):
            self.host_work += size * self.weight
            return
        if on_host:
            self.move(sum({t.untyped_storage()._cdata: t.nbytes for t in on_host}.values()))
        precision = "bf16" if made and made[0].dtype == torch.bfloat16 else "fp32"
        self.work[(precision, flops, size)] += self.weight

    def _note_collective(self, name: str, args: tuple, given: list[Tensor], made: list[Tensor]) -> None:
        for tensor in (*given, *made):
            if found := self._alive.get(tensor.untyped_storage()._cdata):
                found[1].sent = True
        if name == "wait_tensor":
            return
        group = _group_of(args)
        if group.size() == 1:
            return
        traffic = self.traffic.setdefault((group.group_name, _COLLECTIVES[name]), Traffic())
        traffic.count += self.weight
        traffic.size += self.weight * max(t.nbytes for t in (*given, *made))

    # ------------------------------------------------------------ modules

    @contextmanager
    def following(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Know which module of the models is at work."""
        names = {module: name for model in models for name, module in model.named_modules()}

        def enter(module: nn.Module, args: Any) -> None:
            if module in names:
                self._place.forward.append(names[module])

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if module not in names:
                return
            name = self._place.forward.pop()
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._turn_to(name))

        handles = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _turn_to(self, name: str) -> None:
        self._place.backward = name
        self._place.forward.clear()

    def _module(self) -> str:
        if self._place.forward:
            return self._place.forward[-1]
        return self._place.backward if in_backward() else ""

    # ------------------------------------------------------------ what was seen

    def course(self, host: bool = False) -> np.ndarray:
        """Bytes that are allocated after each event, from the state before the first on: (kinds, events), int64."""
        changes = np.zeros((len(KINDS), self.events + 2), dtype=np.int64)
        for allocation in self.allocations:
            if allocation.host == host:
                kind = KINDS.index(allocation.final_kind())
                changes[kind, allocation.born + 1] += allocation.size
                if allocation.died is not None:
                    changes[kind, allocation.died + 1] -= allocation.size
        return changes.cumsum(axis=1)

    def alive(self, event: int) -> list[Allocation]:
        """What has memory of the device after that event."""
        return [a for a in self.allocations if not a.host and a.born <= event and (a.died is None or a.died > event)]

    def moment(self, event: int) -> ExecutionPoint:
        return self.moments[bisect.bisect_right(self.moments, event, key=lambda entry: entry[0]) - 1][1]


def _workspace(func, given: list[Tensor], made: list[Tensor]) -> int:
    """Bytes that an operator needs while it works on a CPU, where it first brings all that it is given to one precision."""
    if func is aten.embedding_dense_backward.default:  # sums in fp32
        return made[0].numel() * 4 if made[0].element_size() < 4 else 0
    if torch.Tag.pointwise not in func.tags:
        return 0
    tensors = [t for t in given if t.dim() and t.is_floating_point()]
    common = max((t.element_size() for t in tensors), default=0)
    return sum(t.numel() * common for t in tensors if t.element_size() < common)


def _written(func, args: tuple, kwargs: dict) -> list[Tensor]:
    """What an operator changes of what it is given."""
    named = [*zip(func._schema.arguments, args, strict=False)]
    named += [(a, kwargs[a.name]) for a in func._schema.arguments[len(args) :] if a.name in kwargs]
    changed = [value for argument, value in named if argument.alias_info is not None and argument.alias_info.is_write]
    return [t for t in tree_leaves(changed) if isinstance(t, Tensor)]


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


_COLLECTIVES = {
    "allgather_base": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_coalesced": "all-reduce",
    "send": "send",
    "recv": "receive",
}


def _group_of(args: tuple) -> dist.ProcessGroup:
    for argument in reversed(args):
        if isinstance(argument, str) and argument not in ("sum", "max", "avg", "min"):
            return dist.distributed_c10d._resolve_process_group(argument)
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    raise AssertionError("a collective without a group")


def _flops(func, args: tuple, kwargs: dict, made: list[Tensor]) -> int:
    packet = func.overloadpacket
    if packet in (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    ):
        return _attention_flops(packet, args, kwargs)
    formula = flop_registry.get(packet)
    return formula(*args, **kwargs, out_val=made[0]) if formula is not None else 0


def _attention_flops(packet, args: tuple, kwargs: dict) -> int:
    """Two products forward, five backward; of a causal mask, the half that is seen."""
    backward = packet is aten._scaled_dot_product_flash_attention_for_cpu_backward
    q, k = args[1:3] if backward else args[:2]
    causal = args[7] if backward else (args[4] if len(args) > 4 else kwargs.get("is_causal", False))
    products = 5 if backward else 2
    return products * 2 * q.numel() * k.shape[2] // (2 if causal else 1)
