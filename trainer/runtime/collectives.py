"""The time limit of collectives, and the collectives that a rank waits in. Both read the flight recorder of torch."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.base.system.clock import RunningClock
from trainer.base.system.streams import print_error

_UNLIMITED = timedelta(days=365)


def _recorders() -> list[Callable[[bool, bool], bytes]]:
    """Return the functions that dump the flight recorders of the backends, which differ between builds of torch. Their arguments:
    whether to include collectives, and only unfinished ones."""
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    return [getattr(torch._C._distributed_c10d, name) for name in names if hasattr(torch._C._distributed_c10d, name)]


def waiting_collectives() -> list[str]:
    """Return a line for each process group whose latest collective has not completed."""
    return [line for dump in _recorders() for line in parse_collectives(dump(True, False))]


def parse_collectives(dump: str | bytes) -> list[str]:
    """Return the lines of `waiting_collectives`. dump: flight recorder's JSON dump."""
    try:
        trace = json.loads(dump)
        names = {(str(e["pg_id"]), e["collective_seq_id"]): e["profiling_name"] for e in trace["entries"]}
        return [
            f"waiting in {names.get((group, number), 'a collective')}, collective {number} of process group {group}"
            for group, number in _unfinished(trace)
        ]
    except (ValueError, KeyError, TypeError):
        return []


def _unfinished(trace: dict) -> Iterator[tuple[str, int]]:
    """Yield the id of each process group whose latest collective has not completed, and the number of this collective."""
    for group, state in trace["pg_status"].items():
        started = int(state["last_enqueued_collective"])
        if started > int(state["last_completed_collective"]):
            yield group, started


def lift_torch_limit(group: dist.ProcessGroup) -> None:
    """Leave the time limit of a group's collectives to `limit_collectives`. torch's limit counts time in which the ranks were
    suspended."""
    if _recorders():
        # torch 2.15 has a public function and warns about the private one, the only one of older versions.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(_UNLIMITED, group)


def limit_collectives(timeout_s: float) -> None:
    """Start a thread that ends this process if a collective takes longer than timeout_s, not counting time in which this process
    was suspended. The limit applies to groups that were passed to `lift_torch_limit`."""
    threading.Thread(target=_watch, args=(timeout_s,), daemon=True).start()


def _watch(timeout_s: float) -> None:
    beat_s = min(5.0, timeout_s / 4)
    clock = RunningClock(beat_s)
    since: dict[tuple[int, str, int], float] = {}
    recorders = _recorders()
    while True:
        time.sleep(beat_s)
        now = clock.now()
        waiting = {
            (i, *found) for i, dump in enumerate(recorders) for found in _unfinished(json.loads(dump(False, True)))
        }
        since = {found: since.get(found, now) for found in waiting}
        for (i, group, number), start in since.items():
            if now - start > timeout_s and (name := _limited(json.loads(recorders[i](True, True)), group, number)):
                text = f"{name}, collective {number} of process group {group}, has waited for {now - start:.0f} s"
                print_error(f"[rank {dist.get_rank()}] {text}; [distributed] timeout_s = {timeout_s:g}")
                os._exit(1)


def _limited(trace: dict, group: str, number: int) -> str:
    """Return the name of a collective if its group was passed to `lift_torch_limit`, otherwise ""."""
    limit_ms = _UNLIMITED // timedelta(milliseconds=1)
    for entry in trace.get("entries", ()):
        if (str(entry["pg_id"]), entry["collective_seq_id"], entry["timeout_ms"]) == (group, number, limit_ms):
            return entry["profiling_name"]
    return ""
