"""Roofline estimate of a step's time (Williams et al. 2009)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.base.config import ParallelConfig
from trainer.parallel.stages import SCHEDULES, stages_per_rank
from trainer.runtime.accelerators import AcceleratorSpec
from trainer.tools.planner.simulate import Simulation

FLOPS_EFFICIENCY, BANDWIDTH_EFFICIENCY, NETWORK_EFFICIENCY = 0.75, 0.85, 0.8
"""Fractions of peak FLOP/s, memory bandwidth and network bandwidth that matmuls, other operators and collectives reach."""

OVERLAPPED_AXES = ("fsdp", "efsdp", "dp_replicate", "pp")
"""Mesh axes whose collectives overlap with computation."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Time of a step on one rank, in seconds."""

    matmuls_s: float
    """Time of the operators bound by FLOPs."""
    memory_s: float
    """Time of the operators bound by memory bandwidth."""
    collectives_s: Mapping[str, float]
    """Mesh axis -> time of its collectives."""
    host_copies_s: float
    """Time of the copies to and from host memory that overlap with computation."""
    host_update_s: float
    """Time of the update in host memory after backward: its copies or its computation, whichever takes longer."""
    bubble: float
    """Fraction of the step during which a pipeline rank is idle."""

    @property
    def exposed_comm_s(self) -> float:
        """Time of the collectives that do not overlap with computation."""
        return sum(seconds for axis, seconds in self.collectives_s.items() if axis not in OVERLAPPED_AXES)

    @property
    def overlapped_comm_s(self) -> float:
        return sum(seconds for axis, seconds in self.collectives_s.items() if axis in OVERLAPPED_AXES)

    @property
    def critical_path_s(self) -> float:
        return max(self.matmuls_s + self.memory_s + self.exposed_comm_s, self.overlapped_comm_s, self.host_copies_s)

    @property
    def total_s(self) -> float:
        return self.critical_path_s / (1 - self.bubble) + self.host_update_s

    @property
    def bound(self) -> str:
        """Name of the component that takes the most time."""
        if self.host_update_s > self.total_s / 2:
            return "update in host memory"
        if self.critical_path_s == self.host_copies_s:
            return "copies to and from host memory"
        if self.critical_path_s == self.overlapped_comm_s:
            axis = max((a for a in self.collectives_s if a in OVERLAPPED_AXES), key=lambda a: self.collectives_s[a])
            return f"collectives over {axis}"
        shares = {
            "matmuls": self.matmuls_s,
            "memory bandwidth": self.memory_s,
            "pipeline bubble": self.critical_path_s / (1 - self.bubble) - self.critical_path_s,
            "update in host memory": self.host_update_s,
        }
        shares |= {f"collectives over {a}": s for a, s in self.collectives_s.items() if a not in OVERLAPPED_AXES}
        return max(shares, key=lambda name: shares[name])


def step_time(simulation: Simulation, accelerator: AcceleratorSpec, bubble: float) -> StepTime:
    """Return the time of a simulated step on an accelerator. bubble: see StepTime."""
    matmuls_s = memory_s = 0.0
    for (precision, flops, num_bytes), count in simulation.op_costs.items():
        flops_s = flops / (accelerator.flops[precision] * FLOPS_EFFICIENCY)
        bytes_s = num_bytes / (accelerator.memory_bandwidth * BANDWIDTH_EFFICIENCY)
        if flops_s > bytes_s:
            matmuls_s += count * flops_s
        else:
            memory_s += count * bytes_s
    collectives_s: Counter[str] = Counter()
    for (axis, collective), calls in simulation.traffic.items():
        collectives_s[axis] += collective_s(collective, calls.num_bytes, simulation.group_ranks[axis], accelerator)
    pcie = accelerator.pcie_bandwidth * NETWORK_EFFICIENCY
    host_memory = accelerator.host_memory_bandwidth * BANDWIDTH_EFFICIENCY
    copied = simulation.host_transfer_bytes
    return StepTime(
        matmuls_s=matmuls_s,
        memory_s=memory_s,
        collectives_s=dict(collectives_s),
        host_copies_s=copied.get(False, 0.0) / pcie,
        host_update_s=max(copied.get(True, 0.0) / pcie, simulation.host_compute_bytes / host_memory),
        bubble=bubble,
    )


def wire_bytes(collective: str, num_bytes: float, ranks: int) -> float:
    """Return the number of bytes that each rank sends with a bandwidth-optimal algorithm. num_bytes: size of the full tensors."""
    if collective in ("send", "receive"):
        return num_bytes
    once = num_bytes * (ranks - 1) / ranks
    return 2 * once if collective == "all-reduce" else once


def collective_s(collective: str, num_bytes: float, ranks: Sequence[int], accelerator: AcceleratorSpec) -> float:
    """Return the time of collectives over a process group, in seconds.

    Args:
        collective: Name, as in Simulation.traffic.
        num_bytes: Size of the full tensors.
        ranks: Of the process group.
        accelerator: Has the bandwidths.
    """
    within, between = accelerator.intra_node_bandwidth, accelerator.inter_node_bandwidth
    on_nodes = Counter(rank // accelerator.gpus_per_node for rank in ranks)
    fewest = min(on_nodes.values())
    if len(on_nodes) == 1:
        seconds = wire_bytes(collective, num_bytes, len(ranks)) / within
    elif collective == "all-to-all":
        # A rank sends other bytes to each rank, to its node and to others at the same time.
        to_a_rank = num_bytes / len(ranks)
        seconds = max(to_a_rank * (len(ranks) - fewest) / between, to_a_rank * (max(on_nodes.values()) - 1) / within)
    else:
        # A hierarchical collective sends each byte out of a node only once, so the bandwidths of the node's ranks add up.
        seconds = wire_bytes(collective, num_bytes, len(ranks)) / min(within, between * fewest)
    return seconds / NETWORK_EFFICIENCY


def pipeline_bubble(parallel: ParallelConfig, microbatches: int) -> float:
    """Return the fraction of a step during which a pipeline rank is idle (Narayanan et al. 2021, arXiv:2104.04473)."""
    if SCHEDULES[parallel.pipeline_schedule].splits_backward:
        return 0.0
    idle = (parallel.pp - 1) / (stages_per_rank(parallel) * microbatches)
    return idle / (1 + idle)
