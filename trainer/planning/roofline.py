"""How long a step should take, from what it computes, moves and sends (Williams et al. 2009, "Roofline")."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.planning.recorder import Traffic
from trainer.runtime.accelerators import AcceleratorSpec

FLOPS_EFFICIENCY, BANDWIDTH_EFFICIENCY, NETWORK_EFFICIENCY = 0.75, 0.85, 0.8
"""What large operators reach of a board's peaks: matrix products, element-wise operators, collectives."""

_BESIDE = ("fsdp", "dp_replicate", "pp")
"""Axes whose collectives run beside the computation."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step on one rank."""

    matmuls_s: float
    """Operators that their FLOPs bound."""
    memory_s: float
    """Operators that the board's memory bounds."""
    collectives_s: Mapping[str, float]
    """By axis."""
    host_copies_s: float
    """To and from host memory, beside the computation."""
    host_update_s: float
    """After backward: copies and what is computed in host memory, whichever takes longer."""
    bubble: float
    """Share of the step in which a pipeline waits for its first and last microbatches."""

    @property
    def exposed_comm_s(self) -> float:
        """Of collectives that nothing runs beside."""
        return sum(seconds for axis, seconds in self.collectives_s.items() if axis not in _BESIDE)

    @property
    def overlapped_comm_s(self) -> float:
        return sum(seconds for axis, seconds in self.collectives_s.items() if axis in _BESIDE)

    @property
    def critical_path_s(self) -> float:
        """What runs beside the computation shows where it takes longer than that."""
        return max(self.matmuls_s + self.memory_s + self.exposed_comm_s, self.overlapped_comm_s, self.host_copies_s)

    @property
    def total_s(self) -> float:
        return self.critical_path_s / (1 - self.bubble) + self.host_update_s

    @property
    def bound(self) -> str:
        """What takes most of it."""
        if self.host_update_s > self.total_s / 2:
            return "the update in host memory"
        if self.critical_path_s == self.host_copies_s:
            return "copies to and from host memory"
        if self.critical_path_s == self.overlapped_comm_s:
            axis = max((a for a in self.collectives_s if a in _BESIDE), key=lambda a: self.collectives_s[a])
            return f"collectives over {axis}"
        shares = {
            "matrix products": self.matmuls_s,
            "memory bandwidth": self.memory_s,
            "the pipeline's bubble": self.critical_path_s / (1 - self.bubble) - self.critical_path_s,
            "the update in host memory": self.host_update_s,
        }
        shares |= {f"collectives over {a}": s for a, s in self.collectives_s.items() if a not in _BESIDE}
        return max(shares, key=lambda name: shares[name])


def step_time(
    work: Mapping[tuple[str, int, int], float],
    traffic: Mapping[tuple[str, str], Traffic],
    group_ranks: Mapping[str, Sequence[int]],
    host_moved: Mapping[bool, float],
    host_work: float,
    board: AcceleratorSpec,
    bubble: float,
) -> StepTime:
    """work, traffic, group_ranks, host_moved and host_work: as in Simulation. bubble: as in StepTime."""
    matmuls_s = memory_s = 0.0
    for (precision, flops, size), count in work.items():
        computing_s = flops / (board.flops[precision] * FLOPS_EFFICIENCY)
        moving_s = size / (board.memory_bandwidth * BANDWIDTH_EFFICIENCY)
        if computing_s > moving_s:
            matmuls_s += count * computing_s
        else:
            memory_s += count * moving_s
    collectives_s: Counter[str] = Counter()
    for (axis, collective), seen in traffic.items():
        rate = _rate(group_ranks[axis], board) * NETWORK_EFFICIENCY
        collectives_s[axis] += wire_bytes(collective, seen.size, len(group_ranks[axis])) / rate
    link = board.pcie_bandwidth * NETWORK_EFFICIENCY
    return StepTime(
        matmuls_s=matmuls_s,
        memory_s=memory_s,
        collectives_s=dict(collectives_s),
        host_copies_s=host_moved.get(False, 0.0) / link,
        host_update_s=max(
            host_moved.get(True, 0.0) / link, host_work / (board.host_memory_bandwidth * BANDWIDTH_EFFICIENCY)
        ),
        bubble=bubble,
    )


def wire_bytes(collective: str, size: float, ranks: int) -> float:
    """Bytes that each rank sends, by the best known algorithms. size: of the whole tensors."""
    if collective in ("send", "receive"):
        return size
    once = size * (ranks - 1) / ranks
    return 2 * once if collective == "all-reduce" else once


def _rate(ranks: Sequence[int], board: AcceleratorSpec) -> float:
    """Bytes per second that each rank of a group has. Those of one machine share its network among fewer, larger streams:
    what leaves the machine leaves it once."""
    machines = Counter(rank // board.gpus_per_node for rank in ranks)
    if len(machines) == 1:
        return board.intra_node_bandwidth
    return min(board.intra_node_bandwidth, board.inter_node_bandwidth * min(machines.values()))


def bubble(pp: int, stages_per_rank: int, microbatches: int, zero_bubble: bool) -> float:
    """Share of a step that a pipeline's rank has nothing to do (Narayanan et al. 2021, arXiv:2104.04473)."""
    if pp == 1 or zero_bubble:
        return 0.0
    idle = (pp - 1) / (stages_per_rank * microbatches)
    return idle / (1 + idle)
