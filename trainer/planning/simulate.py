"""The trainer's own update in an imaginary world: every rank but one is pretended, and no tensor has values."""

import gc
import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.batch import Batch
from trainer.config import Config
from trainer.engine import Engine, build_model_parts
from trainer.parallel.attention import CPU_BACKEND
from trainer.parallel.mesh import Meshes
from trainer.parallel.pipeline import SCHEDULES, stages_per_rank
from trainer.planning.patches import (
    FAKE_GPU_KERNELS,
    annotate_fsdp,
    ignore_sharding_trials,
    norms,
    record_host_buffers,
    skip_shape_negotiation,
)
from trainer.planning.recorder import KINDS, ExecutionPoint, Recorder, Traffic
from trainer.run.resolve import ResolvedRun, resolve
from trainer.runtime.dtensor import to_local
from trainer.system.process import cores, die_with_parent

CPU = torch.device("cpu")
_POINTS = 2000
"""Of the course of memory that are kept."""
_SHOWN = 4
"""Microbatches that are run. Where a step has more of them, the third counts for all between the second and the last: FSDP
gathers once more in the second than in those that follow."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What one rank does in a step that is not the first."""

    rank: int
    peak: int
    """Bytes."""
    at: ExecutionPoint
    by_kind: dict[str, int]
    """Bytes at the peak, of each of KINDS."""
    by_module: dict[str, dict[str, int]]
    """The same, by module and kind."""
    course: dict[str, list[int]]
    """Kind -> bytes, over the events of the step; of many events, the one with most memory in each stretch."""
    course_in_backward: list[bool]
    """Of the same events."""
    host: int
    """Peak of the bytes in host memory, of what is offloaded; not in the others."""
    host_moved: dict[bool, float]
    """Bytes that go between device and host memory: in the update (True), and before it."""
    host_work: float
    """Bytes that operators in host memory read and write."""
    traffic: dict[tuple[str, str], Traffic]
    """By (axis, collective)."""
    group_ranks: dict[str, list[int]]
    """Axis -> the ranks of this rank's group."""
    work: dict[tuple[str, int, int], float]
    """(precision, FLOPs, bytes moved) of an operator -> how often."""
    state_per_parameter: float
    """Bytes that a checkpoint holds of each."""


@contextmanager
def fake_process_group(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def simulate(jobs: Sequence[tuple[Config, int]], world_size: int, on_gpu: bool) -> list[Simulation]:
    """One step of each (configuration, rank), as it is on a CPU or on a GPU. Each in a process of its own: DTensor remembers the
    groups of a world, and would look for them in the next."""
    processes = min(len(jobs), cores())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainer.planning.simulate"])
    with ProcessPoolExecutor(processes, context, initializer=die_with_parent, max_tasks_per_child=1) as pool:
        return list(pool.map(partial(_simulate, world_size=world_size, on_gpu=on_gpu), jobs))


def _simulate(job: tuple[Config, int], world_size: int, on_gpu: bool) -> Simulation:
    config, rank = job
    whole = resolve(config, world_size)
    count, shown = whole.grad_accum, _shown(config, whole)
    resolved = replace(whole, grad_accum=shown)
    with fake_process_group(rank, resolved.dims.world_size):
        meshes = Meshes(resolved.dims, CPU)
        parts = build_model_parts(config, resolved, meshes, FAKE_GPU_KERNELS if on_gpu else CPU_BACKEND)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, norms(on_gpu), record_host_buffers() as buffers:
            engine = Engine(config, resolved, CPU, meshes, parts, set(resolved.parameter_names))
            if resolved.dims.pp > 1:
                skip_shape_negotiation(engine.forward_backward.schedule)
            # What is made once, and is no part of a step: DTensor tries each operator on whole tensors, FSDP makes its buffers.
            first = shown if resolved.dims.pp > 1 else min(shown, 2)
            _update(engine, [_batch(config) for _ in range(first)])
            engine.optimizer.start_step(1e-4)
            on_host = on_gpu and config.parallel.cpu_offload
            recorder = Recorder(on_gpu)
            for known in _there_already(engine, fake, on_gpu, on_host, buffers):
                recorder.know(*known)
            _tell_shards(engine, recorder, on_host)
            batches = [_batch(config) for _ in range(shown)]
            if resolved.dims.pp == 1:
                batches = _Microbatches(batches, recorder, count)
            else:
                schedule = engine.forward_backward.schedule
                schedule.step = _weighted(schedule.step, recorder, count / shown)
            # Unless it frees parameters in between, a pipeline gathers them once a step.
            once = resolved.dims.pp > 1 and config.parallel.reshard_after_forward in ("default", "never")
            with (
                recorder,
                recorder.following(parts.values()),
                annotate_fsdp(recorder, once),
                ignore_sharding_trials(recorder),
            ):
                _update(engine, batches)
            return _result(rank, meshes, engine, recorder, count / shown if resolved.dims.pp > 1 else 1.0)


def _shown(config: Config, resolved: ResolvedRun) -> int:
    """Microbatches that are run."""
    if resolved.dims.pp == 1:
        return min(resolved.grad_accum, _SHOWN)
    # From so many on a pipeline is filled, and what it holds grows no more.
    filled = resolved.dims.pp * (2 if stages_per_rank(config.parallel) == 1 else 3)
    bounds_memory = SCHEDULES[config.parallel.pipeline_schedule].bounds_memory
    return min(resolved.grad_accum, filled) if bounds_memory else resolved.grad_accum


def _weighted(run: Callable, recorder: Recorder, weight: float) -> Callable:
    """A pipeline's schedule, with so many times more microbatches."""

    def weighted(*args, **kwargs) -> None:
        recorder.stepping = True
        try:
            with recorder.weighted(weight):
                run(*args, **kwargs)
        finally:
            recorder.stepping = False

    return weighted


def _update(engine: Engine, microbatches: Sequence[Batch]) -> None:
    engine.step(microbatches, lr=1e-4, stop=False, on_before_update=lambda: None)


def _batch(config: Config) -> Batch:
    shape = config.training.local_batch_size, config.training.seq_len
    return Batch(*(torch.zeros(shape, dtype=torch.int64) for _ in fields(Batch)))


class _Microbatches(Sequence[Batch]):
    """Of a step that has `count` of them; the last but one counts for those that are left out too."""

    def __init__(self, batches: Sequence[Batch], recorder: Recorder, count: int):
        self.batches = batches
        self.recorder = recorder
        self.count = count

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self.batches):
            self.recorder.weight = 1.0 + (self.count - len(self.batches)) * (number == len(self.batches) - 2)
            yield batch


def _there_already(
    engine: Engine, fake: FakeTensorMode, on_gpu: bool, on_host: bool, buffers: Sequence[Tensor]
) -> Iterator[tuple[Tensor, str, bool]]:
    """With their kinds, and whether they are in host memory where that is not the device's; of buffers of the device, what is
    done with them will tell the kind. on_host: all of the parameters and their state is there. buffers: those there."""
    yield from ((tensor, "optimizer", on_gpu) for tensor in engine.optimizer.host_tensors())
    if on_gpu:
        yield from ((tensor, "activations", True) for tensor in buffers)
    yield from ((parameter.detach(), "parameters", on_host) for parameter in engine.parameters.values())
    yield from ((tensor, "optimizer", on_host) for tensor in engine.optimizer.state().values())
    gc.collect()
    for tensor in gc.get_objects():
        if type(tensor) is FakeTensor and tensor.fake_mode is fake:
            yield tensor, "", False


def _tell_shards(engine: Engine, recorder: Recorder, on_host: bool) -> None:
    """Gradients that have been reduced. on_host: they go there."""

    def told(parameter: Tensor) -> None:
        if parameter.grad is not None:
            recorder.mark(parameter.grad, "gradients", on_host)
            if on_host:
                recorder.move(to_local(parameter.grad).nbytes)

    for parameter in engine.optimizer.names:
        parameter.register_post_accumulate_grad_hook(told)


# ---------------------------------------------------------------- what came of it


def _state_per_parameter(engine: Engine) -> float:
    state = [tensor for name, tensor in engine.tensors().items() if not name.startswith("stability/")]
    count = sum(to_local(p.detach()).numel() for p in engine.parameters.values())
    return sum(to_local(tensor).nbytes for tensor in state if tensor.dim()) / count


def _result(rank: int, meshes: Meshes, engine: Engine, recorder: Recorder, microbatches: float) -> Simulation:
    """microbatches: how many times those of a pipeline that were run. For what each of them receives it has a buffer."""
    buffers = sum(a.size for a in recorder.allocations if a.born < 0 and a.final_kind() == "communication")
    more = int((microbatches - 1) * buffers)
    course = recorder.course()
    course[KINDS.index("communication")] += more
    together = course.sum(axis=0)
    event = int(together.argmax()) - 1
    by_kind: dict[str, int] = dict.fromkeys(KINDS, 0)
    by_module: dict[str, Counter[str]] = defaultdict(Counter)
    for allocation in recorder.alive(event):
        kind = allocation.final_kind()
        by_kind[kind] += allocation.size
        by_module[allocation.module][kind] += allocation.size
    by_kind["communication"] += more
    by_module[""]["communication"] += more
    axes = _axes(meshes)
    traffic: dict[tuple[str, str], Traffic] = {}
    for (group, collective), seen in recorder.traffic.items():
        of_axis = traffic.setdefault((axes.get(group, "world"), collective), Traffic())
        of_axis.count += seen.count
        of_axis.size += seen.size
    shown = [
        chunk[together[chunk].argmax()] for chunk in np.array_split(np.arange(len(together)), _POINTS) if len(chunk)
    ]
    return Simulation(
        rank=rank,
        peak=int(together.max()),
        at=recorder.moment(event),
        by_kind=by_kind,
        by_module={name: dict(kinds) for name, kinds in by_module.items()},
        course={kind: sizes[shown].tolist() for kind, sizes in zip(KINDS, course, strict=True)},
        course_in_backward=[recorder.moment(event - 1).in_backward for event in shown],
        host=int(recorder.course(host=True).sum(axis=0).max()),
        host_moved=dict(recorder.host_moved),
        host_work=recorder.host_work,
        traffic=traffic,
        group_ranks=_group_ranks(meshes),
        work=dict(recorder.work),
        state_per_parameter=_state_per_parameter(engine),
    )


def _groups(meshes: Meshes) -> Iterator[tuple[str, dist.ProcessGroup]]:
    for mesh in (meshes.model, meshes.data, meshes.loss):
        for axis in mesh.mesh_dim_names or ():
            yield axis, mesh[axis].get_group()


def _axes(meshes: Meshes) -> dict[str, str]:
    """Name of a group -> its axis."""
    return {group.group_name: axis for axis, group in reversed(list(_groups(meshes)))}


def _group_ranks(meshes: Meshes) -> dict[str, list[int]]:
    found = {axis: dist.get_process_group_ranks(group) for axis, group in _groups(meshes)}
    return found | {"world": list(range(dist.get_world_size()))}
