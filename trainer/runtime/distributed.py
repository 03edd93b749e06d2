"""The process group of a run: initialization, shutdown, and collectives outside the training step."""

import logging
import os
import resource
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.base.config import ConfigError, DistributedConfig
from trainer.base.system import console
from trainer.base.system.children import require_main_guard
from trainer.base.system.process import local_rank, node_id
from trainer.base.system.spelling import first_line
from trainer.base.system.streams import print_error
from trainer.runtime import device as devices
from trainer.runtime.collectives import lift_torch_limit, limit_collectives
from trainer.runtime.rendezvous import check_network_devices, connect, wait_for_all

T = TypeVar("T")

_STORE_LOST = (dist.DistNetworkError, dist.DistStoreError)

_REPORT_S = 1.0
"""Seconds that a rank waits before it reports that it has lost others."""

# Preparing a large corpus may take this long. If the working rank dies, the launcher ends the ranks that wait.
_WAIT_FOR_WORK = timedelta(days=7)


_QUIET_LOGGERS = (
    # A machine without a GPU may have a compiler for GPUs, which torch 2.14 and later reports on every rank that compiles.
    "torch.utils.cpp_extension",
    # Advice to flatten the mesh for gathers over two axes. A step has none; parity gathers the gradients that it compares.
    "torch.distributed.tensor._redistribute",
)
"""Loggers whose warnings need no action of a user."""


def quiet_torch() -> None:
    """Show only errors of loggers that would warn on every rank."""
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_process_group(config: DistributedConfig, device: torch.device) -> None:
    """Join the process group that torchrun's environment variables describe. Without them, create a process group of one rank. A
    group that the program has created is used. Raises ConfigError if it differs from the one that a run needs."""
    require_main_guard()
    quiet_torch()
    if dist.is_initialized():
        _require_usable_group(devices.communication_backend(device))
        return
    _allow_more_connections()
    check_network_devices(needs_loopback=world_size() == devices.local_world_size())
    store = _create_store(config.init_timeout_s)
    rank = int(os.environ.get("RANK", "0"))
    announces = rank == 0 and world_size() > 1
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if announces else None
    wait_for_all(store, "ranks", rank, world_size(), config.init_timeout_s, where)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")  # enables the flight recorder that the watchdog reads
    dist.init_process_group(
        devices.communication_backend(device),
        store=store,
        rank=rank,
        world_size=world_size(),
        timeout=timedelta(seconds=config.timeout_s),
        device_id=device if device.type != "cpu" else None,
    )
    if world_size() > 1:
        lift_torch_limit(dist.group.WORLD)
        limit_collectives(config.timeout_s)


def _require_usable_group(backends: str) -> None:
    """Raise ConfigError if the process group that exists lacks one of the backends that the device needs, or has other
    ranks than the environment variables say, which name them in messages and choose their devices."""
    existing = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    needed = dict(pair.split(":") for pair in backends.split(",")) if ":" in backends else {"cpu": backends}
    if any(existing.get(device) != backend for device, backend in needed.items()):
        message = f"this process has a process group with {dist.get_backend_config()}, but a run on this device needs {backends}"
        raise ConfigError(
            "", f"{message}; create it with this backend, or leave it to init_process_group of the trainer"
        )
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if (ranks, rank) != (world_size(), int(os.environ.get("RANK", "0"))):
        message = f"this process is rank {rank} of {ranks} of its process group, but WORLD_SIZE and RANK do not say so"
        raise ConfigError("", f"{message}; start the program with torchrun, which sets them")


def _allow_more_connections() -> None:
    """Raise the limit of open files to its maximum. In each process group, gloo opens a connection to every other rank."""
    _, largest = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS has a lower limit than it returns
        resource.setrlimit(resource.RLIMIT_NOFILE, (largest, largest))


def _create_store(timeout_s: float) -> dist.Store:
    if world_size() == 1:
        return dist.HashStore()
    # torchrun's agent hosts the store. Without torchrun, rank 0 does.
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = connect(address, port, "rank 0", timeout_s, is_master=not by_agent and os.environ["RANK"] == "0")
    if not by_agent:
        return store
    # The agent's store outlives a restart: without a prefix, a rank may read addresses of the failed attempt.
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def shutdown() -> None:
    """Wait until all ranks have called this function, so that no rank exits while another rank needs it."""
    store = _store()
    ranks = dist.get_world_size()
    if store.add("finished", 1) == ranks:
        store.set("all_finished", "1")
    store.wait(["all_finished"], _WAIT_FOR_WORK)
    store.add("exited", 1)
    while dist.get_rank() == 0 and store.add("exited", 0) < ranks:  # rank 0 may host the store, so it exits last
        time.sleep(0.01)


def print_once_per_node(line: str) -> None:
    """Print a line on stderr once per node, even if several ranks of the node call this function with the same error."""
    console.record_in_file(line)
    if not dist.is_initialized():  # each rank of a node finds the same error
        if local_rank() == 0:
            print_error(line)
        return
    with suppress(*_STORE_LOST):  # the rank that hosted the store has reported the error and ended
        _store().set("failed", "")  # so that ranks that lose the connection to this one stay silent
        if _store().add(f"reported/{node_id()}", 1) == 1:
            print_error(line)


def report_failure(error: BaseException) -> None:
    """Print the traceback on the rank that failed. Ranks that only lost the connection to the failed rank stay silent, unless
    the failed rank ended before it could report its error. These wait, because the launcher usually ends them before they have
    to report a loss that it knows."""
    rank = os.environ.get("RANK", "0")
    if isinstance(error, _STORE_LOST):
        time.sleep(_REPORT_S if local_rank() == 0 else 5 * _REPORT_S)
        print_error(f"this rank lost the connection to other ranks: {first_line(error)}")
        return
    if dist.is_initialized() and is_peer_loss(error):
        time.sleep(_REPORT_S)
        with suppress(*_STORE_LOST):
            if not _store().check(["failed"]):
                print_once_per_node(f"rank {rank} lost the connection to another rank: {first_line(error)}")
        return
    with suppress(*_STORE_LOST):
        if dist.is_initialized():
            _store().set("failed", "")
    text = f"[rank {rank}] " + "".join(traceback.format_exception(error))
    console.record_in_file(text)
    print_error(text)


def is_peer_loss(error: BaseException) -> bool:
    """Return whether the error shows that another rank ended during a collective."""
    # Other errors of NCCL, such as a lack of memory, are this rank's own.
    nccl = ("ncclRemoteError", "NCCL communicator was aborted")
    patterns = ("gloo", "Connection closed by peer", "Connection reset by peer", *nccl)
    return isinstance(error, RuntimeError) and any(pattern in str(error) for pattern in patterns)


def all_gather_objects(value: T) -> list[T]:
    """Return the values of all ranks, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def run_on_rank_0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on all ranks. A ConfigError is raised on all ranks; other errors end the job."""
    results: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            results = [work()]
        except ConfigError as error:
            results = [error]
    dist.broadcast_object_list(results, device=torch.device("cpu"))
    if isinstance(results[0], ConfigError):
        raise results[0]
    return results[0]


def first_problem(problem: str) -> str:
    """Return, on all ranks, the problem of the first rank that has one, or "". problem: this rank's problem, or ""."""
    return next(filter(None, all_gather_objects(problem)), "")


def require_agreement(values: Mapping[str, Any]) -> None:
    """Raise ConfigError on all ranks if the values differ between ranks. The message lists the differences."""
    first = run_on_rank_0(lambda: values)
    differences = [
        f"{key} is {first[key]} on rank 0, {value} on rank {dist.get_rank()}"
        for key, value in values.items()
        if first[key] != value
    ]
    if found := first_problem("; ".join(differences)):
        raise ConfigError("", f"ranks were launched with different settings: {found}")


def once_per_node(work: Callable[[], str]) -> str:
    """Run `work` on rank 0, then on the first rank of every other node. Return the result of this rank's node.

    `work` should create files, or reuse them if they exist. On a shared file system, only rank 0 then creates them.
    """
    store = _store()
    call = store.add(f"once_per_node/rank_{dist.get_rank()}", 1)
    rank_0_key, node_key = f"once_per_node/{call}", f"once_per_node/{call}/{node_id()}"
    if local_rank() == 0:
        if dist.get_rank() > 0:
            store.wait([rank_0_key], _WAIT_FOR_WORK)
        store.set(node_key, work())
        if dist.get_rank() == 0:
            store.set(rank_0_key, "done")
    store.wait([node_key], _WAIT_FOR_WORK)
    return store.get(node_key).decode()


def clone_store() -> dist.Store:
    """Return a separate connection to the ranks' store, for use in a thread. Requests on a shared connection block each other."""
    return dist.PrefixStore("side", _store().clone())


def sum_over(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a tensor over the ranks of a group. The tensor does not change; it is the result if the group has only
    one rank."""
    if group.size() == 1:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total
