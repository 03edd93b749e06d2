"""What a rank really allocates in a step, by the allocator's own events in torch's profiler."""

import bisect
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.batch import Batch
from trainer.config import Config, TrainingConfig
from trainer.config.load import load_config
from trainer.engine import Engine, build_model_parts
from trainer.parallel.attention import CPU_BACKEND
from trainer.parallel.mesh import Meshes
from trainer.run.resolve import resolve
from trainer.runtime.dtensor import to_local

STEP, BACKWARD = "the step that is measured", "a backward"


@dataclass(slots=True)
class Block:
    """Memory, from its allocation to its release."""

    address: int
    size: int
    born: int
    """Nanoseconds."""
    died: float = float("inf")
    kind: str = ""


@dataclass(frozen=True)
class Measured:
    peak: int
    """Bytes."""
    by_kind: dict[str, int]
    """At the peak."""


class _Watch:
    """Tells the profiler, by events whose names say it, what tensors are for, and when backward runs."""

    def note(self, tensor: Tensor | None, kind: str) -> None:
        if tensor is not None:
            address = to_local(tensor).untyped_storage().data_ptr()
            with record_function(f"{kind}@{address}"):
                pass

    @contextmanager
    def over_step(self) -> Iterator[None]:
        reduce, wait = FSDPParamGroup.post_backward, FSDPParamGroup.wait_for_unshard

        def watched_reduce(group: FSDPParamGroup, *args: Any) -> Any:
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    self.note(parameter._unsharded_param.grad, "gradients")
                self.note(parameter.unsharded_accumulated_grad, "gradients")
            result = reduce(group, *args)
            for parameter in group.fsdp_params:
                self.note(parameter.unsharded_accumulated_grad, "gradients")
            return result

        def watched_wait(group: FSDPParamGroup) -> None:
            wait(group)
            for parameter in group.fsdp_params:
                self.note(parameter._unsharded_param.detach(), "unsharded parameters")

        def watched_backward(*args: Any, **kwargs: Any) -> Any:
            with record_function(BACKWARD):
                return backward(*args, **kwargs)

        backward = torch.autograd._engine_run_backward
        FSDPParamGroup.post_backward, FSDPParamGroup.wait_for_unshard = watched_reduce, watched_wait
        torch.autograd._engine_run_backward = watched_backward
        try:
            yield
        finally:
            FSDPParamGroup.post_backward, FSDPParamGroup.wait_for_unshard = reduce, wait
            torch.autograd._engine_run_backward = backward


class _Patient(TorchDispatchMode):
    """After a collective, gives the thread that communicates the time to let go of its buffers: on a busy machine it would come
    to it later, and they would be counted."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            sleep(0.001)
        return result


def a_step(config: Config) -> tuple[Engine, Callable[[], None]]:
    """On each rank of a CPU: the engine, and one update of it, on random tokens."""
    cpu, training = torch.device("cpu"), config.training
    resolved = resolve(config, dist.get_world_size())
    meshes = Meshes(resolved.dims, cpu)
    engine = Engine(
        config, resolved, cpu, meshes, build_model_parts(config, resolved, meshes, CPU_BACKEND), loaded=set()
    )

    def step() -> None:
        batches = [_batch(resolved.sizes.vocab_size, training) for _ in range(resolved.grad_accum)]
        engine.step(batches, lr=1e-4, stop=False, on_before_update=lambda: None)

    return engine, step


def quiet() -> None:
    """Ranks that are started after this do not tell that the profiler starts and ends, nor what it did not see begin."""
    os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def measure(argv: Sequence[str], repeats: int) -> Measured:
    """On each rank: the memory of a step that is not the first; of several, the smallest."""
    watch = _Watch()
    engine, step = a_step(load_config(argv))

    def measured() -> Measured:
        engine.optimizer.start_step(1e-4)
        before = _there_already()
        with (
            profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler,
            record_function(STEP),
            watch.over_step(),
            _Patient(),
        ):
            step()
            for parameter in engine.parameters.values():
                watch.note(parameter.detach(), "parameters")
                watch.note(parameter.grad, "gradients")
            for tensor in (*engine.optimizer.state().values(), *engine.optimizer.host_tensors()):
                watch.note(tensor, "optimizer")
        return _read(profiler.profiler.kineto_results.experimental_event_tree(), before)

    step()
    return min((measured() for _ in range(repeats)), key=lambda one: one.peak)


def _there_already() -> list[Block]:
    """The profiler tells of what is allocated while it looks on."""
    gc.collect()
    sizes: dict[int, int] = {}
    for tensor in gc.get_objects():
        if issubclass(type(tensor), Tensor) and tensor.device.type == "cpu":
            storage = to_local(tensor.detach()).untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return [Block(address, size, born=0) for address, size in sizes.items() if size]


def _batch(vocab_size: int, training: TrainingConfig) -> Batch:
    shape = training.local_batch_size, training.seq_len
    tokens = torch.randint(vocab_size, shape)
    positions = torch.arange(training.seq_len).repeat(training.local_batch_size, 1)
    return Batch(tokens=tokens, labels=tokens.clone(), positions=positions, documents=torch.zeros_like(tokens))


# ---------------------------------------------------------------- the profiler's events


def _flat(events: Iterable) -> Iterator:
    for event in events:
        yield event
        yield from _flat(event.children)


def _read(tree: Sequence, before: list[Block]) -> Measured:
    events = sorted(_flat(tree), key=lambda event: event.start_time_ns)
    (step,) = [event for event in events if event.name == STEP]
    blocks = _blocks(events, before)
    at: dict[int, list[Block]] = {}
    for block in blocks:
        at.setdefault(block.address, []).append(block)

    def find(address: int, time: int) -> Block | None:
        return next((b for b in at.get(address, ()) if b.born <= time <= b.died), None)

    sent: set[int] = set()
    for event in events:
        kind, _, address = event.name.partition("@")
        if address.isdigit() and (block := find(int(address), event.start_time_ns)):
            block.kind = kind
        elif event.name.startswith(("c10d::", "_c10d_functional::")):
            for tensor in _tensors(event):
                if block := find(tensor, event.start_time_ns):
                    sent.add(id(block))
    backward = _backward_windows(events)
    window = [b for b in blocks if b.born <= step.end_time_ns and b.died >= step.start_time_ns]
    times = sorted({b.born for b in window if b.born >= step.start_time_ns} | {step.start_time_ns})
    changes = sorted([(b.born, b.size) for b in window] + [(b.died, -b.size) for b in window])
    peak, when, total, position = 0, 0, 0, 0
    for time in times:
        while position < len(changes) and changes[position][0] <= time:
            total += changes[position][1]
            position += 1
        if total > peak:
            peak, when = total, time
    by_kind: Counter[str] = Counter()
    for block in window:
        if block.born <= when < block.died:
            kept = not backward(block.born) and backward(block.died)
            by_kind[
                block.kind or ("activations" if kept else "communication" if id(block) in sent else "temporaries")
            ] += block.size
    return Measured(peak, dict(by_kind))


def _blocks(events: Iterable, before: list[Block]) -> list[Block]:
    blocks = list(before)
    alive = {block.address: block for block in before}
    for event in events:
        if event.name != "[memory]":
            continue
        fields = event.extra_fields
        if fields.alloc_size > 0:
            alive[fields.ptr] = Block(fields.ptr, fields.alloc_size, event.start_time_ns)
            blocks.append(alive[fields.ptr])
        elif fields.ptr in alive:
            alive.pop(fields.ptr).died = event.start_time_ns
    return blocks


def _tensors(event) -> Iterator[int]:
    """Addresses of the storages that an operator was given."""
    for given in getattr(event.extra_fields, "inputs", ()):
        for one in given if isinstance(given, list) else [given]:
            if getattr(one, "storage_data_ptr", None):
                yield one.storage_data_ptr


def _backward_windows(events: Iterable):
    spans = [(event.start_time_ns, event.end_time_ns) for event in events if event.name == BACKWARD]
    starts = [start for start, _ in spans]

    def inside(time: float) -> bool:
        place = bisect.bisect_right(starts, time) - 1
        return place >= 0 and time <= spans[place][1]

    return inside
