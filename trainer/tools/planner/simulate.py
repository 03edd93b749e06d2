"""Simulation of one rank's training step with the trainer's own engine, fake tensors and a fake process group."""

import gc
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.base.config import CompileConfig, Config, ConfigError, ParallelConfig
from trainer.base.system.children import exit_with_parent, for_pool, start_fork_server
from trainer.base.system.console import progress
from trainer.base.system.process import cores
from trainer.batch import Batch
from trainer.engine import Engine, build_model_parts, build_objective
from trainer.parallel.attention import CPU_BACKEND
from trainer.parallel.compilation import may_compile
from trainer.parallel.mesh import Meshes
from trainer.parallel.stages import SCHEDULES, stages_per_rank
from trainer.run.resolve import ResolvedRun, resolve
from trainer.runtime.dtensor import to_local
from trainer.tools.planner.patches import (
    FAKE_GPU_KERNELS,
    annotate_fsdp,
    assumed_splits,
    bound_loss_chunks,
    fused_conversions,
    fused_norms,
    ignore_sharding_trials,
    own_groups,
    record_host_buffers,
    skip_shape_negotiation,
)
from trainer.tools.planner.recorded import MEMORY_CATEGORIES, ExecutionPoint, Traffic
from trainer.tools.planner.recorder import Recorder

CPU = torch.device("cpu")
_TIMELINE_POINTS = 2000
_REFRESH_S = 1.0
"""Seconds after which the progress is shown again although no simulation has ended."""
_MAX_SIMULATED = 4
"""Maximum number of microbatches that are simulated without a pipeline. If a step has more, the third represents all microbatches
between the second and the last. The second cannot represent them, because FSDP runs one more all-gather in it."""

_START_BLOCKS = 10
"""Number of simulated blocks that take as long as the start of a simulation: about a second for Llama 3 8B."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Result of the simulation of one training step on one rank. The simulated step is the second step of a run."""

    rank: int
    peak: int
    """Peak of device memory, in bytes."""
    peak_at: ExecutionPoint
    by_category: dict[str, int]
    """Category (one of MEMORY_CATEGORIES) -> number of bytes at the peak."""
    by_module: dict[str, dict[str, int]]
    """Module -> category -> number of bytes at the peak."""
    timeline: dict[str, list[int]]
    """Category -> number of bytes at each point of the timeline. The events of the step are divided into intervals. Each point
    is the event with the most memory in its interval."""
    timeline_in_backward: list[bool]
    """Whether each point of the timeline is in backward."""
    host: int
    """Peak of offloaded memory on the host, in bytes. The fields about device memory do not include it."""
    host_transfer_bytes: dict[bool, float]
    """Number of bytes copied between device and host memory. Key True: during the update; False: in forward and backward."""
    host_compute_bytes: float
    """Number of bytes that operators in host memory read and write."""
    traffic: dict[tuple[str, str], Traffic]
    """(axis, collective) -> traffic."""
    group_ranks: dict[str, list[int]]
    """Mesh axis -> ranks of the simulated rank's process group along this axis."""
    op_costs: dict[tuple[str, int, int], float]
    """(precision, FLOPs, bytes moved) of an operator -> number of calls."""
    state_per_parameter: float
    """Size of a checkpoint in bytes per trained parameter."""

    @property
    def flops(self) -> float:
        return sum(flops * count for (_, flops, _), count in self.op_costs.items())


def simulate(
    jobs: Sequence[tuple[Config, int]], world_size: int, on_gpu: bool, imbalance: float = 0.0
) -> list[Simulation]:
    """Return the simulations of `simulate_each`, and show the progress."""
    simulations = []
    with progress(len(jobs), " simulations", "simulating") as bar:
        for simulation in simulate_each(jobs, world_size, on_gpu, lambda: bar.update(0), imbalance):
            simulations.append(simulation)
            bar.update(1)
    return simulations


def simulate_each(
    jobs: Sequence[tuple[Config, int]],
    world_size: int,
    on_gpu: bool,
    on_wait: Callable[[], object],
    imbalance: float = 0.0,
) -> Iterator[Simulation]:
    """Simulate one step for each job, and yield the results in order. Each job runs in a new process. Otherwise DTensor would use
    the process groups that it cached for the previous job.

    Args:
        jobs: Pairs (configuration, rank).
        world_size: Number of ranks of the run.
        on_gpu: Whether to simulate the kernels and the allocator of a GPU.
        on_wait: Called every second while no result is available.
        imbalance: The experts of a simulated rank get 1 + imbalance times the mean rows of the ranks of ep.

    Raises:
        ConfigError: A process was killed.
    """
    processes = min(len(jobs), cores())
    context = for_pool(start_fork_server(["trainer.tools.planner.simulate"]))
    with ProcessPoolExecutor(processes, context, initializer=exit_with_parent, max_tasks_per_child=1) as pool:
        try:
            for future in [pool.submit(_simulate, job, world_size, on_gpu, imbalance) for job in jobs]:
                while not wait([future], timeout=_REFRESH_S).done:
                    on_wait()
                yield future.result()
        except (KeyboardInterrupt, GeneratorExit):
            pool.shutdown(wait=False, cancel_futures=True)  # otherwise the pool waits for the simulations in progress
            raise
        except BrokenProcessPool:
            raise ConfigError("", "a process that simulates a rank was killed, possibly for lack of memory") from None


def num_blocks(config: Config, resolved: ResolvedRun) -> int:
    """Return how many blocks the simulation of a rank runs, over the microbatches of its two steps, and those that take as long
    as its start. The simulation's duration is roughly proportional to this number."""
    simulated = _num_simulated(config, resolved)
    warm_up = simulated if resolved.dims.pp > 1 else min(simulated, 2)
    return _START_BLOCKS + math.ceil(blocks_per_rank(resolved) * (warm_up + simulated))


def blocks_per_rank(resolved: ResolvedRun) -> float:
    return sum(len(stage.blocks) for stage in resolved.stages) / resolved.dims.pp


def without_compiler(config: Config) -> Config:
    """Return the settings of an eager run, because the compiler cannot be simulated."""
    parallel = replace(config.parallel, async_tensor_parallel=False)
    return replace(config, compile=CompileConfig(enabled=False), parallel=parallel)


def _simulate(job: tuple[Config, int], world_size: int, on_gpu: bool, imbalance: float = 0.0) -> Simulation:
    config, rank = without_compiler(job[0]), job[1]
    resolved = resolve(config, world_size)
    count, simulated = resolved.grad_accum, _num_simulated(config, resolved)
    resolved = replace(resolved, grad_accum=simulated)
    pipelined = resolved.dims.pp > 1
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    with own_groups():
        meshes = Meshes(resolved.dims, CPU, None, resolved.structure.has_experts, resolved.exchanges_matrices)
    parts = build_model_parts(config, resolved, meshes, FAKE_GPU_KERNELS if on_gpu else CPU_BACKEND)
    recorder = Recorder(on_gpu)
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as fake,
        fused_norms(on_gpu),
        fused_conversions(on_gpu and may_compile(job[0].compile.enabled, job[0].parallel, on_gpu)),
        bound_loss_chunks(recorder),
        assumed_splits(imbalance),
        record_host_buffers() as buffers,
    ):
        engine = Engine(config, resolved, CPU, meshes, parts, build_objective(config, resolved, meshes))
        if pipelined:
            skip_shape_negotiation(engine.forward_backward.schedule)
        # Not recorded: the first step. In it DTensor runs each operator on full-size tensors, and FSDP allocates its buffers.
        _update(engine, [_batch(config) for _ in range(simulated if pipelined else min(simulated, 2))])
        engine.optimizer.start_step(1e-4)
        offloaded = on_gpu and config.parallel.cpu_offload
        _register_preallocated(recorder, engine, fake, on_gpu, offloaded, buffers)
        _annotate_grads(engine, recorder, offloaded)
        batches = _Microbatches([_batch(config) for _ in range(simulated)], recorder, simulated if pipelined else count)
        if pipelined:
            schedule = engine.forward_backward.schedule
            schedule.step = _weighted_schedule(schedule.step, recorder, count / simulated)
        with recorder, recorder.tracking_modules(parts.values()), _annotated_fsdp(recorder, config.parallel):
            _update(engine, batches)
        return _result(rank, meshes, engine, recorder, count / simulated if pipelined else 1.0)


@contextmanager
def _annotated_fsdp(recorder: Recorder, parallel: ParallelConfig) -> Iterator[None]:
    """Context manager that labels FSDP's tensors and weights its collectives. In a pipeline, each simulated microbatch represents
    several real ones, but reductions run once per step, so their weight is 1. The weight of gathers is also 1 if parameters
    stay gathered between microbatches."""

    count_once = partial(patch.object, recorder, "weight", 1.0)

    def around_reduction(group: FSDPParamGroup) -> AbstractContextManager:
        # The optimizer's update in backward is inside it too.
        return count_once() if recorder.in_schedule and group.reduce_grads else nullcontext()

    gathers_once = parallel.pp > 1 and parallel.reshard_after_forward in ("default", "never")
    around_gather = count_once if gathers_once else nullcontext
    with annotate_fsdp(recorder.label, around_reduction, around_gather), ignore_sharding_trials(recorder):
        yield


def _num_simulated(config: Config, resolved: ResolvedRun) -> int:
    """Return the number of microbatches to simulate."""
    if resolved.dims.pp == 1:
        return min(resolved.grad_accum, _MAX_SIMULATED)
    # This many fill the pipeline; with more, its memory does not grow.
    filled = resolved.dims.pp * (2 if stages_per_rank(config.parallel) == 1 else 3)
    bounds_memory = SCHEDULES[config.parallel.pipeline_schedule].bounds_memory
    return min(resolved.grad_accum, filled) if bounds_memory else resolved.grad_accum


def _weighted_schedule(run: Callable, recorder: Recorder, weight: float) -> Callable:
    """Wrap a pipeline schedule's step function, so that each microbatch is recorded as `weight` microbatches."""

    def wrapper(*args, **kwargs) -> None:
        with patch.multiple(recorder, weight=weight, in_schedule=True):
            run(*args, **kwargs)

    return wrapper


def _update(engine: Engine, microbatches: Sequence[Batch]) -> None:
    engine.step(microbatches, lr=1e-4, stop=False, on_before_update=lambda: None)


def _batch(config: Config) -> Batch:
    shape = config.training.local_batch_size, config.training.seq_len
    return Batch(*torch.zeros(4, *shape, dtype=torch.int64), samples=torch.zeros(shape[0], dtype=torch.int64))


class _Microbatches(list[Batch]):
    """Simulated microbatches of a step that has `count` microbatches. The second-to-last simulated microbatch also
    represents all microbatches that are not simulated."""

    def __init__(self, batches: Sequence[Batch], recorder: Recorder, count: int):
        super().__init__(batches)
        self.recorder = recorder
        self.count = count

    def __iter__(self) -> Iterator[Batch]:
        for i in range(len(self)):
            self.recorder.weight = 1.0 + (self.count - len(self)) * (i == len(self) - 2)
            yield self[i]


def _register_preallocated(
    recorder: Recorder, engine: Engine, fake: FakeTensorMode, on_gpu: bool, offloaded: bool, buffers: Sequence[Tensor]
) -> None:
    """Register the tensors that exist before the step. Other device tensors get no explicit category.

    Args:
        offloaded: Whether parameters and optimizer state are in host memory.
        buffers: Buffers in host memory.
    """
    for tensor in engine.host_tensors:
        recorder.register(tensor, "optimizer", host=on_gpu)
    for tensor in buffers if on_gpu else ():
        recorder.register(tensor, "activations", host=True)
    for parameter in engine.parameters.values():
        recorder.register(parameter.detach(), "parameters", offloaded)
    for tensor in engine.optimizer_tensors().values():
        recorder.register(tensor, "optimizer", offloaded)
    gc.collect()
    for tensor in gc.get_objects():
        if type(tensor) is FakeTensor and tensor.fake_mode is fake:
            recorder.register(tensor, "", host=False)


def _annotate_grads(engine: Engine, recorder: Recorder, offloaded: bool) -> None:
    """Register hooks that label summed and reduced gradients. offloaded: whether FSDP copies the gradients to host memory."""

    def label(parameter: Tensor) -> None:
        if parameter in engine.gradient_sums:
            recorder.label(engine.gradient_sums[parameter], "gradients")
        if parameter.grad is not None:
            recorder.label(parameter.grad, "gradients", offloaded)
            if offloaded:
                recorder.transfer(to_local(parameter.grad).nbytes)

    for parameter in engine.optimizer.names:
        parameter.register_post_accumulate_grad_hook(label)


# ---------------------------------------------------------------- the result


def _state_per_parameter(engine: Engine) -> float:
    state = [tensor for name, tensor in engine.tensors().items() if not name.startswith("stability/")]
    count = sum(to_local(p.detach()).numel() for p in engine.optimizer.names)
    return sum(to_local(tensor).nbytes for tensor in state if tensor.dim()) / count


def _result(rank: int, meshes: Meshes, engine: Engine, recorder: Recorder, ratio: float) -> Simulation:
    """Return the result of the simulation. ratio: number of microbatches in a step divided by the number of simulated ones. A
    pipeline has buffers for each microbatch, so this ratio scales their memory."""
    timeline = recorder.timeline(lambda allocation: not allocation.host)
    event = int(timeline.sum(axis=0).argmax()) - 1
    allocated_before = [a for a in recorder.allocations if a.born < 0 and a.final_category() == "communication"]
    # Since torch 2.15, buffers are allocated when they are used. Most, not all of them grow with the number of microbatches.
    buffers = allocated_before or [a for a in recorder.alive(event) if a.between_stages]
    extra = int((ratio - 1) * sum(a.num_bytes for a in buffers))
    timeline[MEMORY_CATEGORIES.index("communication")] += extra
    total = timeline.sum(axis=0)
    by_module: dict[str, Counter[str]] = defaultdict(Counter)
    for allocation in recorder.alive(event):
        by_module[allocation.module][allocation.final_category()] += allocation.num_bytes
    by_module[""]["communication"] += extra
    axes = {group.group_name: axis for axis, group in reversed(list(_groups(meshes)))}
    traffic: dict[tuple[str, str], Traffic] = defaultdict(Traffic)
    for (group, collective), recorded in recorder.traffic.items():
        of_axis = traffic[axes.get(group, "world"), collective]
        of_axis.count += recorded.count
        of_axis.num_bytes += recorded.num_bytes
    intervals = np.array_split(np.arange(len(total)), _TIMELINE_POINTS)
    shown = [interval[total[interval].argmax()] for interval in intervals if len(interval)]
    return Simulation(
        rank=rank,
        peak=int(total.max()),
        peak_at=recorder.point(event),
        by_category=dict(zip(MEMORY_CATEGORIES, timeline[:, event + 1].tolist(), strict=True)),
        by_module={name: dict(categories) for name, categories in by_module.items()},
        timeline={category: row[shown].tolist() for category, row in zip(MEMORY_CATEGORIES, timeline, strict=True)},
        timeline_in_backward=[recorder.point(event - 1).in_backward for event in shown],
        host=int(recorder.timeline(lambda allocation: allocation.host).sum(axis=0).max()),
        host_transfer_bytes=dict(recorder.host_transfer_bytes),
        host_compute_bytes=recorder.host_compute_bytes,
        traffic=dict(traffic),
        group_ranks={axis: dist.get_process_group_ranks(group) for axis, group in _groups(meshes)}
        | {"world": list(range(dist.get_world_size()))},
        op_costs=dict(recorder.op_costs),
        state_per_parameter=_state_per_parameter(engine),
    )


def _groups(meshes: Meshes) -> Iterator[tuple[str, dist.ProcessGroup]]:
    for mesh in filter(None, (meshes.model, meshes.data, meshes.loss, meshes.experts)):
        for axis in mesh.mesh_dim_names or ():
            yield axis, mesh[axis].get_group()
    if meshes.stage is not None:
        yield "stage", meshes.stage
