"""The process group of a run: initialization, shutdown, and collectives outside the step."""

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

# Preparing a large corpus may take this long. If the working rank dies, the launcher ends the ranks that wait.
_WAIT_FOR_WORK = timedelta(days=7)


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_process_group(config: DistributedConfig, device: torch.device) -> None:
    """Join the process group that torchrun's environment variables describe. Without them, create a process group of one rank."""
    timeout = timedelta(seconds=config.timeout_s)
    store = _create_store(timedelta(seconds=config.init_timeout_s))
    _wait_for_all_ranks(store, config.init_timeout_s)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")  # enables the flight recorder that the watchdog reads
    dist.init_process_group(
        devices.communication_backend(device),
        store=store,
        rank=int(os.environ.get("RANK", "0")),
        world_size=world_size(),
        timeout=timeout,
        device_id=device if device.type != "cpu" else None,
    )


def _create_store(timeout: timedelta) -> dist.Store:
    if world_size() == 1:
        return dist.HashStore()
    # torchrun's agent hosts the store. Without torchrun, rank 0 does.
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
    # The agent's store outlives a restart: without a prefix, a rank may read addresses of the failed attempt.
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _wait_for_all_ranks(store: dist.Store, timeout_s: float) -> None:
    """Return when every rank has joined. Raise DistStoreError with the missing ranks after timeout_s."""
    ranks = range(world_size())
    store.set(f"joined/{os.environ.get('RANK', '0')}", "")
    if os.environ.get("RANK", "0") == "0":
        try:
            store.wait([f"joined/{rank}" for rank in ranks], timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            missing = [str(rank) for rank in ranks if not store.check([f"joined/{rank}"])]
            shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            store.set("all_joined", f"of {len(ranks)} ranks, {shown} did not join within {timeout_s:g} s")
        else:
            store.set("all_joined", "")
    # Wait for twice the time, because rank 0 may have started to wait later.
    store.wait(["all_joined"], timedelta(seconds=2 * timeout_s))
    if message := store.get("all_joined").decode():
        raise dist.DistStoreError(message)


def shutdown() -> None:
    """Return when all ranks have called this, so that no rank exits while another needs it."""
    store = dist.distributed_c10d._get_default_store()
    ranks = dist.get_world_size()
    if store.add("finished", 1) == ranks:
        store.set("all_finished", "1")
    store.wait(["all_finished"], _WAIT_FOR_WORK)
    # Rank 0 may host the store, so it exits last.
    exited = store.add("exited", 1)
    while dist.get_rank() == 0 and exited < ranks:
        time.sleep(0.01)
        exited = store.add("exited", 0)


def print_once_per_node(line: str) -> None:
    """Print a line on stderr, on the first calling rank of each node, because several ranks may find the same error."""
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set("failed", "")  # so that ranks that lose the connection to this one stay silent
        count = store.add(f"reported/{node_id()}", 1)
    except (dist.DistNetworkError, dist.DistStoreError):
        return  # the rank that hosted the store has reported the error and ended
    if count == 1:
        print(line, file=sys.stderr, flush=True)


def report_failure(error: BaseException) -> None:
    """Print the traceback on the rank that failed. Ranks that only lost the connection to the failed rank stay silent, unless
    the failed rank ended before it could report."""
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
            print_once_per_node(f"rank {rank} lost the connection to another rank: {str(error).splitlines()[0]}")
    except (dist.DistNetworkError, dist.DistStoreError):
        if not is_peer_loss(error):
            print(text, file=sys.stderr, flush=True)


def is_peer_loss(error: BaseException) -> bool:
    """Return whether a collective raised this error because another rank ended."""
    patterns = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")
    return isinstance(error, RuntimeError) and any(pattern in str(error) for pattern in patterns)


def broadcast(value: Any, source: int) -> Any:
    """Return the value of rank `source` on all ranks."""
    values = [value]
    dist.broadcast_object_list(values, src=source, device=torch.device("cpu"))
    return values[0]


def all_gather_objects(value: T) -> list[T]:
    """Return the value of each rank, in order of rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def run_on_rank_0(work: Callable[[], T]) -> T:
    """Run work on rank 0 and return its result on all ranks. A ConfigError is raised on all ranks; any other error ends rank 0,
    and therefore the job."""
    result, config_error = None, None
    if dist.get_rank() == 0:
        try:
            result = work()
        except ConfigError as error:
            config_error = (error.key, error.message)
    result, config_error = broadcast((result, config_error), source=0)
    if config_error is not None:
        raise ConfigError(*config_error)
    return result


def require_agreement(values: Mapping[str, Any]) -> None:
    """Raise ConfigError on all ranks, with the differences, if the values are not the same on all ranks."""
    digests = all_gather_objects(hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest())
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    first, second = broadcast(values, source=0), broadcast(values, source=other)
    differences = [
        f"{key} is {first[key]} on rank 0, {value} on rank {other}"
        for key, value in second.items()
        if first[key] != value
    ]
    raise ConfigError("", f"ranks were launched with different settings: {'; '.join(differences)}")


def once_per_node(work: Callable[[], str]) -> str:
    """Run work on rank 0, then on the first rank of every other node. Return the result of this node on all its ranks.

    The work should create files that later calls find. On a shared file system it is then done once, otherwise once per node.
    """
    store = dist.distributed_c10d._get_default_store()
    call = store.add(f"once_per_node/rank_{dist.get_rank()}", 1)
    rank_0_key, node_key = f"once_per_node/{call}", f"once_per_node/{call}/{node_id()}"
    if local_rank() > 0:
        store.wait([node_key], _WAIT_FOR_WORK)
        return store.get(node_key).decode()
    if dist.get_rank() > 0:
        store.wait([rank_0_key], _WAIT_FOR_WORK)
    result = work()
    if dist.get_rank() == 0:
        store.set(rank_0_key, "done")
    store.set(node_key, result)
    return result


def clone_store() -> dist.Store:
    """Return a separate connection to the ranks' store, for use in a thread. Requests on a shared connection block each other."""
    return dist.PrefixStore("side", dist.distributed_c10d._get_default_store().clone())


def flight_recorder_dumps() -> list[str]:
    """Return the JSON dumps of torch's flight recorders, one per backend. They contain the collectives of this rank."""
    recorders = (getattr(torch._C._distributed_c10d, name, None) for name in _RECORDERS)
    return [recorder() for recorder in recorders if recorder is not None]


def sum_over(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a tensor over the ranks of a group, as a new tensor."""
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total
