"""The process group of a run: start, end, and what ranks do together outside the step."""

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import ConfigError, DistributedConfig
from trainer.runtime import device as devices
from trainer.system.process import local_rank, node_id

T = TypeVar("T")

_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")

# Preparing a large corpus may take this long; if the rank that works dies, the launcher ends those that wait.
_WAIT_FOR_WORK = timedelta(days=7)


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_process_group(config: DistributedConfig, device: torch.device) -> None:
    """Join the process group that the environment describes (as torchrun sets it); without one, a group of this process."""
    timeout = timedelta(seconds=config.timeout_s)
    store = _store(timedelta(seconds=config.init_timeout_s))
    _await_all(store, config.init_timeout_s)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")  # a flight recorder, for the watchdog
    dist.init_process_group(
        devices.communication_backend(device),
        store=store,
        rank=int(os.environ.get("RANK", "0")),
        world_size=world_size(),
        timeout=timeout,
        device_id=device if device.type != "cpu" else None,
    )


def _store(timeout: timedelta) -> dist.Store:
    if world_size() == 1:
        return dist.HashStore()
    # torchrun's agents hold the store; started by hand, rank 0 does.
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size(),
        is_master=not by_agent and os.environ["RANK"] == "0",
        timeout=timeout,
        wait_for_workers=False,
    )
    if not by_agent:
        return store
    # It outlives a restart of the ranks: without a prefix a rank may find the dead attempt's addresses.
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _await_all(store: dist.Store, timeout_s: float) -> None:
    """Returns when every rank has come here. Raises DistStoreError, with the ranks that have not."""
    ranks = range(world_size())
    store.set(f"came/{os.environ.get('RANK', '0')}", "")
    if os.environ.get("RANK", "0") == "0":
        try:
            store.wait([f"came/{rank}" for rank in ranks], timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            missing = [str(rank) for rank in ranks if not store.check([f"came/{rank}"])]
            some = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            store.set("all_came", f"of {len(ranks)} ranks, {some} did not come within {timeout_s:g} s")
        else:
            store.set("all_came", "")
    # Rank 0 may have begun to wait later.
    store.wait(["all_came"], timedelta(seconds=2 * timeout_s))
    if problem := store.get("all_came").decode():
        raise dist.DistStoreError(problem)


def shutdown() -> None:
    """Returns when all ranks have come here, so that none ends while another still needs it."""
    store = dist.distributed_c10d._get_default_store()
    ranks = dist.get_world_size()
    if store.add("finished", 1) == ranks:
        store.set("all_finished", "1")
    store.wait(["all_finished"], _WAIT_FOR_WORK)
    # Rank 0 may hold the store: it leaves when nobody needs an answer any more.
    left = store.add("left", 1)
    while dist.get_rank() == 0 and left < ranks:
        time.sleep(0.01)
        left = store.add("left", 0)


def print_once_per_node(line: str) -> None:
    """Print a line on stderr, on the first rank of each machine that has one to tell: several may find the same error."""
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set("failed", "")  # ranks that lose contact for it need not tell
        told = store.add(f"told/{node_id()}", 1)
    except (dist.DistNetworkError, dist.DistStoreError):
        return  # whoever held the store has told it, and ended
    if told == 1:
        print(line, file=sys.stderr, flush=True)


def report_failure(error: BaseException) -> None:
    """A traceback, from the rank where the failure is; the others, which lose contact with it, are silent, unless it had no
    time to say so."""
    rank = os.environ.get("RANK", "0")
    text = f"[rank {rank}] " + "".join(traceback.format_exception(error))
    if not dist.is_initialized():
        print(text, file=sys.stderr, flush=True)
        return
    try:
        store = dist.distributed_c10d._get_default_store()
        if not is_peer_loss(error):
            store.set("failed", "")
            print(text, file=sys.stderr, flush=True)
        elif not store.check(["failed"]):
            print_once_per_node(f"rank {rank} lost contact with another rank: {str(error).splitlines()[0]}")
    except (dist.DistNetworkError, dist.DistStoreError):
        if not is_peer_loss(error):
            print(text, file=sys.stderr, flush=True)


def is_peer_loss(error: BaseException) -> bool:
    """What a collective raises on the others when a rank ends."""
    told = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in told)


def broadcast(value: Any, source: int) -> Any:
    """The value that rank `source` has, on all ranks."""
    values = [value]
    dist.broadcast_object_list(values, src=source, device=torch.device("cpu"))
    return values[0]


def all_gather_objects(value: T) -> list[T]:
    """Every rank's value, on all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def run_on_rank_0(work: Callable[[], T]) -> T:
    """The result of work that rank 0 does, on all ranks. A ConfigError in it is raised on all of them; any other error ends
    rank 0, and so the job."""
    result, refusal = None, None
    if dist.get_rank() == 0:
        try:
            result = work()
        except ConfigError as error:
            refusal = (error.key, error.message)
    result, refusal = broadcast((result, refusal), source=0)
    if refusal is not None:
        raise ConfigError(*refusal)
    return result


def require_agreement(values: Mapping[str, Any]) -> None:
    """Raises ConfigError on all ranks, with the differences, where the ranks do not have the same values."""
    mine = json.dumps(values, sort_keys=True)
    digests = all_gather_objects(hashlib.sha256(mine.encode()).hexdigest())
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    first, second = broadcast(values, source=0), broadcast(values, source=other)
    differences = [
        f"{key} is {first[key]} on rank 0, {value} on rank {other}"
        for key, value in second.items()
        if first[key] != value
    ]
    raise ConfigError("", f"the ranks were not started alike: {'; '.join(differences)}")


def once_per_node(work: Callable[[], str]) -> str:
    """The result of work, done by rank 0 first and then by the first rank of every other machine.

    For work that leaves files which the next ones find: done once on a shared file system, once per machine otherwise.
    """
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"once_per_node/rank_{dist.get_rank()}", 1)
    by_rank_0, here = f"once_per_node/{number}", f"once_per_node/{number}/{node_id()}"
    if local_rank() > 0:
        store.wait([here], _WAIT_FOR_WORK)
        return store.get(here).decode()
    if dist.get_rank() > 0:
        store.wait([by_rank_0], _WAIT_FOR_WORK)
    result = work()
    if dist.get_rank() == 0:
        store.set(by_rank_0, "done")
    store.set(here, result)
    return result


def clone_store() -> dist.Store:
    """A connection of its own to the ranks' store, for a thread: on the common one, one waits for the other."""
    return dist.PrefixStore("side", dist.distributed_c10d._get_default_store().clone())


def flight_recorder_dumps() -> list[str]:
    """What torch's flight recorders, one for each backend, know of the collectives of this rank, as JSON."""
    recorders = (getattr(torch._C._distributed_c10d, name, None) for name in _RECORDERS)
    return [recorder() for recorder in recorders if recorder is not None]


def sum_over(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of every rank's tensor; the tensor itself is not changed."""
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total
