"""Measurement of a rank's memory during a step, based on the allocator events that torch's profiler records."""

import gc
import os
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter, itemgetter
from pathlib import Path
from threading import get_native_id
from time import sleep
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.base.config import Config
from trainer.base.config.load import load_config
from trainer.batch import Batch
from trainer.engine import Engine, build_model_parts, build_objective
from trainer.parallel.attention import CPU_BACKEND
from trainer.parallel.mesh import Meshes
from trainer.run.resolve import resolve
from trainer.runtime.dtensor import to_local
from trainer.tools.planner.patches import annotate_fsdp
from trainer.tools.testing.routing import even_routes

_POINT_TO_POINT = (torch.ops.c10d.send.default, torch.ops.c10d.recv_.default, torch.ops.c10d.recv_any_source_.default)
"""Operations that another rank may only complete after later operations of this rank."""
START, STEP, BACKWARD = "start of the measurement", "measured step", "backward"


@dataclass(slots=True)
class Buffer:
    """Block of memory from its allocation to its release."""

    address: int
    num_bytes: int
    born: int
    """Time of allocation, in nanoseconds."""
    died: float = float("inf")
    category: str = ""


def _label(tensor: Tensor, category: str) -> None:
    """Record a profiler event whose name contains the tensor's category and address."""
    with record_function(f"{category}@{to_local(tensor.detach()).untyped_storage().data_ptr()}"):
        pass


def _wait_for_threads() -> None:
    """Wait until all other threads of this process are idle: in two successive observations, none of them is running."""
    idle = 0
    while idle < 2:
        sleep(0.001)  # without the GIL, for which another thread may be waiting
        others = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != get_native_id()]
        is_idle = all(task.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "S" for task in others)
        idle = idle + 1 if is_idle else 0


def _wait_for_collective(func: OpOverload, result: object) -> None:
    """Wait until a collective that was just called has ended on this rank."""
    for item in result if isinstance(result, (tuple, list)) else [result]:
        if isinstance(item, torch.ScriptObject):
            item.wait()  # a torch.distributed.Work
        elif func.namespace == "_c10d_functional":
            torch.ops._c10d_functional.wait_tensor(item)


class _WaitForRelease(TorchDispatchMode):
    """Dispatch mode that waits for each collective, and then until the communication thread no longer refers to its buffers.
    Otherwise, that thread releases them later if the machine is busy or another rank is late, and the profiler records no
    release."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            if func not in _POINT_TO_POINT:
                _wait_for_collective(func, result)
            _wait_for_threads()
        return result


def build_step(config: Config) -> tuple[Engine, Callable[[], None]]:
    """Return an engine on this rank's CPU, and a function that runs one training step on random tokens."""
    cpu, training = torch.device("cpu"), config.training
    resolved = resolve(config, dist.get_world_size())
    meshes = Meshes(resolved.dims, cpu, None, resolved.structure.has_experts, resolved.exchanges_matrices)
    parts = build_model_parts(config, resolved, meshes, CPU_BACKEND)
    engine = Engine(config, resolved, cpu, meshes, parts, build_objective(config, resolved, meshes))
    engine.initialize(loaded=())
    shape = training.local_batch_size, training.seq_len

    def batch() -> Batch:
        tokens = torch.randint(resolved.sizes.vocab_size, shape)
        positions = torch.arange(training.seq_len).repeat(shape[0], 1)
        return Batch(tokens, tokens.clone(), positions, torch.zeros_like(tokens), torch.arange(shape[0]))

    def step() -> None:
        batches = [batch() for _ in range(resolved.grad_accum)]
        engine.step(batches, lr=1e-4, stop=False, on_before_update=lambda: None)

    return engine, step


def silence_profiler() -> None:
    """Suppress the profiler's log lines on ranks that are started after this call."""
    os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def measure(argv: Sequence[str], repeats: int) -> Counter[str]:
    """Measure the memory of `repeats` steps after a warm-up step. Return category -> number of bytes, at the memory peak of
    the step with the lowest peak. Experts get equally many rows, as the planner assumes. Every rank must call this."""
    engine, step = build_step(load_config(argv))

    def label_gradients(parameter: Tensor) -> None:
        if parameter in engine.gradient_sums:
            _label(engine.gradient_sums[parameter], "gradients")
        if parameter.grad is not None:
            _label(parameter.grad, "gradients")

    for parameter in engine.optimizer.names:
        parameter.register_post_accumulate_grad_hook(label_gradients)
    recorded_backward = record_function(BACKWARD)(torch.autograd._engine_run_backward)
    # One profile for all steps: on a busy machine, ranks with several profiles sometimes die (torch 2.13).
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler,
        annotate_fsdp(_label),
        patch.object(torch.autograd, "_engine_run_backward", recorded_backward),
        even_routes(),
        _WaitForRelease(),
    ):
        # The profiler does not record the release of a buffer that was allocated before the profile.
        step()
        engine.optimizer.start_step(1e-4)
        before = _allocated_buffers()
        with record_function(START):
            pass
        for _ in range(repeats):
            with record_function(STEP):
                step()
                for parameter in engine.parameters.values():
                    _label(parameter, "parameters")
                for tensor in (*engine.optimizer_tensors().values(), *engine.host_tensors):
                    _label(tensor, "optimizer")
            engine.optimizer.start_step(1e-4)
        _wait_for_threads()
    return min(_peaks(profiler.profiler.kineto_results.experimental_event_tree(), before), key=Counter.total)


def _allocated_buffers() -> list[Buffer]:
    """Return the buffers that are allocated now."""
    gc.collect()
    num_bytes: dict[int, int] = {}
    for tensor in gc.get_objects():
        if issubclass(type(tensor), Tensor) and tensor.device.type == "cpu":
            storage = to_local(tensor.detach()).untyped_storage()
            num_bytes[storage.data_ptr()] = storage.nbytes()
    return [Buffer(address, n, born=0) for address, n in num_bytes.items() if n]


# ---------------------------------------------------------------- profiler events


def _flat(events: Iterable) -> Iterator:
    for event in events:
        yield event
        yield from _flat(event.children)


def _peaks(tree: Sequence, before: list[Buffer]) -> list[Counter[str]]:
    """Return category -> number of bytes, at the memory peak of each step."""
    events = sorted(_flat(tree), key=lambda event: event.start_time_ns)
    (start,) = [event.start_time_ns for event in events if event.name == START]
    events = [event for event in events if event.start_time_ns >= start]
    buffers = _buffers(events, before)
    by_address: dict[int, list[Buffer]] = defaultdict(list)
    for buffer in buffers:
        by_address[buffer.address].append(buffer)

    def find(address: int, time: int) -> Buffer | None:
        last = bisect_right(by_address[address], time, key=attrgetter("born")) - 1
        found = by_address[address][last] if last >= 0 else None
        return found if found is not None and time <= found.died else None

    sent: set[int] = set()
    for event in events:
        category, _, address = event.name.partition("@")
        if address.isdigit() and (buffer := find(int(address), event.start_time_ns)):
            buffer.category = category
        elif event.name.startswith(("c10d::", "_c10d_functional::")):
            sent |= {id(buffer) for address in _inputs(event) if (buffer := find(address, event.start_time_ns))}
    backward = [(event.start_time_ns, event.end_time_ns) for event in events if event.name == BACKWARD]

    def in_backward(time: float) -> bool:
        return any(start <= time <= end for start, end in backward)

    def peak(step) -> Counter[str]:
        alive = [b for b in buffers if b.born <= step.end_time_ns and b.died >= step.start_time_ns]
        changes: Counter[float] = Counter()
        for buffer in alive:
            changes[max(buffer.born, step.start_time_ns)] += buffer.num_bytes
            changes[buffer.died] -= buffer.num_bytes
        times = sorted(changes)
        _, peak_time = max(zip(accumulate(changes[time] for time in times), times, strict=True), key=itemgetter(0))
        by_category: Counter[str] = Counter()
        for buffer in alive:
            if buffer.born <= peak_time < buffer.died:
                saved = not in_backward(buffer.born) and in_backward(buffer.died)
                derived = "activations" if saved else "communication" if id(buffer) in sent else "temporaries"
                by_category[buffer.category or derived] += buffer.num_bytes
        return by_category

    return [peak(event) for event in events if event.name == STEP]


def _buffers(events: Iterable, before: list[Buffer]) -> list[Buffer]:
    buffers, collective_end = list(before), 0
    alive = {buffer.address: buffer for buffer in before}
    for event in events:
        if event.name.startswith("c10d::"):
            collective_end = max(collective_end, event.end_time_ns)
        if event.name != "[memory]":
            continue
        fields = event.extra_fields
        if fields.alloc_size > 0:
            alive[fields.ptr] = Buffer(fields.ptr, fields.alloc_size, event.start_time_ns)
            buffers.append(alive[fields.ptr])
            if event.start_time_ns < collective_end:  # gloo's copy; its thread often releases it without an event
                alive[fields.ptr].died = collective_end
        elif fields.ptr in alive:
            alive.pop(fields.ptr).died = event.start_time_ns
    return buffers


def _inputs(event) -> Iterator[int]:
    """Yield the storage addresses of an operator's inputs."""
    for argument in getattr(event.extra_fields, "inputs", ()):
        for tensor in argument if isinstance(argument, list) else [argument]:
            if getattr(tensor, "storage_data_ptr", None):
                yield tensor.storage_data_ptr
