"""The process group of a run: start, end, and what ranks do together outside the step."""

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import device as devices
from trainer.config import ConfigError, DistributedConfig
from trainer.system import local_rank

T = TypeVar("T")

# Preparing a large corpus may take this long; if the rank that works dies, the launcher ends those that wait.
_WAIT_FOR_WORK = timedelta(days=7)


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def start(config: DistributedConfig, device: torch.device) -> None:
    """Join the process group that the environment describes (as torchrun sets it); without one, a group of this process."""
    timeout = timedelta(seconds=config.timeout_s)
    dist.init_process_group(
        devices.communication_backend(device),
        store=_store(timedelta(seconds=config.init_timeout_s)),
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
    )
    # The agents' store outlives a restart of the ranks: without a prefix a rank may find the dead attempt's addresses.
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def finish() -> None:
    """Returns when all ranks have come here, so that none ends while another still needs it."""
    store = dist.distributed_c10d._get_default_store()
    ranks = dist.get_world_size()
    if store.add("finished", 1) == ranks:
        store.set("all_finished", "1")
    store.wait(["all_finished"])
    # Rank 0 may hold the store: it leaves when nobody needs an answer any more.
    left = store.add("left", 1)
    while dist.get_rank() == 0 and left < ranks:
        time.sleep(0.01)
        left = store.add("left", 0)


def tell_once(line: str) -> None:
    """Print a line on stderr, on the first rank of each machine that has one to tell: several may find the same error."""
    try:
        told = dist.distributed_c10d._get_default_store().add(f"told/{_machine()}", 1)
    except (dist.DistNetworkError, dist.DistStoreError):
        return  # whoever held the store has told it, and ended
    if told == 1:
        print(line, file=sys.stderr, flush=True)


def _machine() -> str:
    """torchrun numbers the machines; started by hand, they have their names."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def _broadcast(value: Any, source: int) -> Any:
    """The value that rank `source` has, on all ranks."""
    values = [value]
    dist.broadcast_object_list(values, src=source, device=torch.device("cpu"))
    return values[0]


def from_rank_0(work: Callable[[], T]) -> T:
    """The result of work that rank 0 does, on all ranks. A ConfigError in it is raised on all of them; any other error ends
    rank 0, and so the job."""
    result, refusal = None, None
    if dist.get_rank() == 0:
        try:
            result = work()
        except ConfigError as error:
            refusal = (error.key, error.rule)
    result, refusal = _broadcast((result, refusal), source=0)
    if refusal is not None:
        raise ConfigError(*refusal)
    return result


def require_agreement(values: Mapping[str, Any]) -> None:
    """Raises ConfigError on all ranks, with the differences, where the ranks do not have the same values."""
    mine = json.dumps(values, sort_keys=True)
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(mine.encode()).hexdigest())
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    first, second = _broadcast(values, source=0), _broadcast(values, source=other)
    differences = [
        f"{key} is {first[key]} on rank 0, {value} on rank {other}"
        for key, value in second.items()
        if first[key] != value
    ]
    raise ConfigError("", f"the ranks were not started alike: {'; '.join(differences)}")


def once_per_machine(work: Callable[[], str]) -> str:
    """The result of work, done by rank 0 first and then by the first rank of every other machine.

    For work that leaves files which the next ones find: done once on a shared file system, once per machine otherwise.
    """
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"once_per_machine/rank_{dist.get_rank()}", 1)
    by_rank_0, here = f"once_per_machine/{number}", f"once_per_machine/{number}/{_machine()}"
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


def sum_over(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of every rank's tensor; the tensor itself is not changed."""
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total
