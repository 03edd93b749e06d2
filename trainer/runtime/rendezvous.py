"""Waiting for the other nodes or ranks of a run. A process that waits for long says so once."""

import fcntl
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta

import torch.distributed as dist

from trainer.base.config import ConfigError
from trainer.base.system.clock import RunningClock
from trainer.base.system.console import announce
from trainer.base.system.spelling import did_you_mean

LOOPBACK = "127.0.0.1"
_GET_FLAGS = 0x8913
"""Linux's request SIOCGIFFLAGS for the flags of a network device, of which the lowest bit is set while it is up."""
SILENCE_S = 5.0
"""Seconds after which a process says for whom it waits."""


def check_network_devices(needs_loopback: bool) -> None:
    """Raise ConfigError if a network device that the ranks would use does not exist, or is down.

    needs_loopback: whether all ranks are on this node, so that they reach each other through its loopback device.
    """
    variable = "GLOO_SOCKET_IFNAME"
    existing = [name for _, name in socket.if_nameindex()]
    chosen = [name for name in os.environ.get(variable, "").split(",") if name]
    loopback = [name for name in ("lo", "lo0") if name in existing][:1] if needs_loopback else []
    for name in dict.fromkeys([*loopback, *chosen]):
        origin = f"{variable}={','.join(chosen)}: " if name in chosen else ""
        if name not in existing:
            hint = did_you_mean(name, existing)
            raise ConfigError("", f"{origin}this node has no network device {name}, but {', '.join(existing)}{hint}")
        if not _is_up(name):
            message = f"{origin}the network device {name} of this node is down"
            raise ConfigError("", f"{message}; an administrator can start it with: ip link set {name} up")


def _is_up(device: str) -> bool:
    """Return whether a network device is up, as far as the system tells."""
    if sys.platform != "linux":
        return True
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16s16x", device.encode()[:15])
        try:
            return bool(struct.unpack_from("H", fcntl.ioctl(any_socket, _GET_FLAGS, request), 16)[0] & 1)
        except OSError:
            return True


def connect(address: str, port: int, first: str, timeout_s: float, **options: bool) -> dist.TCPStore:
    """Return the store of a run, which its first member hosts. Raises DistNetworkError if it is not reached within timeout_s.

    Args:
        address: host name of the first member.
        port: its port.
        first: name of the first member, for messages.
        timeout_s: also the timeout of the store's later requests.
        options: `is_master` if this process is the first member, and other options of TCPStore.
    """
    if not options.get("is_master"):
        _await_answer(address, port, first, timeout_s)
    return dist.TCPStore(address, port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, **options)


@contextmanager
def announced(awaited: Callable[[], str], timeout_s: float) -> Iterator[None]:
    """Context manager for a wait that prints one line if the wait takes longer than SILENCE_S.

    Args:
        awaited: Returns for what this process waits, or "" if the wait is over. Another thread calls it, because some waits of
            torch cannot be interrupted.
        timeout_s: Maximum time of the wait.
    """
    until = time.strftime("%H:%M:%S", time.localtime(time.time() + timeout_s))

    def announce_wait() -> None:
        with suppress(dist.DistError):  # the waiting thread reports that the store has been lost
            if members := awaited():
                announce(f"waiting until {until} for {members}")

    timer = threading.Timer(SILENCE_S, announce_wait)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _await_answer(address: str, port: int, first: str, timeout_s: float) -> None:
    """Wait until a process listens at an address. TCPStore would log each attempt."""
    clock = _clock(timeout_s)
    with announced(lambda: f"{first} to answer at {address}:{port}", timeout_s):
        while clock.now() < timeout_s:
            with suppress(OSError):
                socket.create_connection((address, port), timeout=1).close()
                return
            time.sleep(0.1)
    raise dist.DistNetworkError(f"{first} did not answer at {address}:{port} within {timeout_s:g} s")


def _clock(timeout_s: float) -> RunningClock:
    """Return the clock of a wait: time in which this process was suspended is no waiting time."""
    return RunningClock(min(5.0, timeout_s / 4))  # 5 s: a name server or a store under load may answer that late


def wait_for_all(store: dist.Store, members: str, index: int, count: int, timeout_s: float, where: str | None) -> None:
    """Wait until every member of a run has called this function. After timeout_s, raise a DistStoreError that lists the missing
    ones.

    Args:
        store: store of the run.
        members: plural noun, such as "ranks".
        index: index of this member.
        count: number of members.
        timeout_s: maximum time that the first member waits for the others.
        where: address for the message of a member that waits for long; None: this member waits silently.
    """
    keys = [f"joined/{i}" for i in range(count)]
    store.set(keys[index], "")
    longest_s = timeout_s if index == 0 else 2 * timeout_s  # the first member may have started to wait later

    def awaited() -> str:
        missing = _missing(store, keys)
        return missing and f"these of the {count} {members} to join at {where}: {missing}"

    with announced(awaited, longest_s) if where is not None else nullcontext():
        if index == 0:
            late = f"these of the {count} {members} did not join within {timeout_s:g} s"
            store.set("all_joined", "" if _have_joined(store, keys, timeout_s) else f"{late}: {_missing(store, keys)}")
        elif where is not None:
            _have_joined(store, keys, longest_s)  # otherwise torch would log that the following wait ran out of time
        store.wait(["all_joined"], timedelta(seconds=2 * timeout_s))
    if message := store.get("all_joined").decode():
        raise dist.DistStoreError(message)


def _have_joined(store: dist.Store, keys: list[str], timeout_s: float) -> bool:
    """Return whether the keys exist before timeout_s. It asks repeatedly: torch logs a wait whose time runs out."""
    clock = _clock(timeout_s)
    while not store.check(keys):
        waited_s = clock.now()
        if waited_s > timeout_s or store.check(["all_joined"]):
            return False
        time.sleep(1 if waited_s > SILENCE_S else 0.05)
    return True


def _missing(store: dist.Store, keys: list[str]) -> str:
    indices = [str(i) for i, key in enumerate(keys) if not store.check([key])]
    return ", ".join(indices[:8]) + (", ..." if len(indices) > 8 else "")


def wait_for_nodes(address: str, port: int, node: int, nodes: int, timeout_s: float) -> dist.Store:
    """Wait until the launchers of all nodes have called this function. Return the connection to the store at this address, which
    the first node hosts. torchrun uses the same store."""
    store = connect(address, port, "the first node", timeout_s, is_master=node == 0, multi_tenant=True)
    wait_for_all(dist.PrefixStore("launchers", store), "nodes", node, nodes, timeout_s, f"{address}:{port}")
    return store


def host_on_loopback(port: int) -> dist.TCPStore:
    """Return a store that only processes of this machine can reach. torchrun uses the same store.

    port: 0 means any free port. Raises OSError if the port cannot be used, and ConfigError if the loopback device cannot.
    """
    check_network_devices(needs_loopback=True)
    listener = socket.create_server((LOOPBACK, port))
    # By default, TCPStore would listen on all interfaces.
    options = {"multi_tenant": True, "master_listen_fd": listener.fileno()}
    port = listener.getsockname()[1]
    listener.detach()
    return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, **options)
