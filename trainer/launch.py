"""Launcher of a node's ranks. It checks the configuration and runs torchrun. Its exit code comes from the first rank to fail.

run_llama_train.sh calls this file and documents the variables NGPU, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT. All
arguments are forwarded to train.py.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from trainer.config.command_line import config_from_command_line, die, environment_int, one_line_errors, run_to_end
from trainer.system.process import cores


@dataclass(frozen=True)
class TorchrunOptions:
    """Options of torchrun, from environment variables."""

    ranks: int
    """Number of ranks per node."""
    min_nodes: int
    """Minimum number of nodes that the run needs to continue. In an elastic run it is below `max_nodes`."""
    max_nodes: int
    node: int
    address: str
    port: int
    restarts: int

    @classmethod
    def from_environment(cls) -> "TorchrunOptions":
        ranks = environment_int("NGPU", 1, 1, 4096)
        min_nodes, max_nodes = _num_nodes()
        node = environment_int("NODE_RANK", 0, 0)
        port = environment_int("MASTER_PORT", 29500, 1, 65535)
        if node >= max_nodes:
            die(f"NODE_RANK={node}: must be below NNODES={max_nodes}")
        restarts = environment_int("MAX_RESTARTS", 0, 0)
        if max_nodes > 1 and "MASTER_ADDR" not in os.environ:
            die(f"NNODES={max_nodes}: set MASTER_ADDR to the host name of the first node")
        return cls(ranks, min_nodes, max_nodes, node, os.environ.get("MASTER_ADDR", "localhost"), port, restarts)

    def arguments(self, timeout_s: float) -> list[str]:
        """Return torchrun's arguments. timeout_s: maximum time that the nodes wait for each other."""
        elastic = self.min_nodes < self.max_nodes
        nodes = f"{self.min_nodes}:{self.max_nodes}" if elastic else str(self.max_nodes)
        options = ["--nnodes", nodes, "--nproc-per-node", str(self.ranks), "--max-restarts", str(self.restarts)]
        options += ["--signals-to-handle", "SIGHUP,SIGQUIT"]  # `SignalForwarder` handles the others
        if self.max_nodes == 1 and "MASTER_PORT" not in os.environ:
            return [*options, "--standalone"]  # uses any free port
        if elastic:
            # Otherwise ranks use the store of the first launcher, and a node that rejoins does not know its restart count.
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            endpoint = f"{self.address}:{self.port}"
            options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "run"]
            return [*options, "--rdzv-conf", f"join_timeout={round(timeout_s)},last_call_timeout=5"]
        options += ["--node-rank", str(self.node), "--master-addr", self.address, "--master-port", str(self.port)]
        return [*options, "--rdzv-conf", f"timeout={round(timeout_s)}"]


def _num_nodes() -> tuple[int, int]:
    """Return the minimum and the maximum number of nodes. NNODES is one number, or the minimum and the maximum, such as 2:4."""
    text = os.environ.get("NNODES", "1")
    match = re.fullmatch("([0-9]{1,6})(?::([0-9]{1,6}))?", text)
    if match is None or not 0 < int(match[1]) <= int(match[2] or match[1]):
        die(f"NNODES={text}: expected an integer of at least 1, or a minimum and a maximum such as 2:4")
    return int(match[1]), int(match[2] or match[1])


def main() -> NoReturn:
    config = config_from_command_line(sys.argv[1:])
    options = TorchrunOptions.from_environment()
    # torch logs pages of C++ frames for a failed connection; it reads this level when it is imported.
    inherited = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = inherited or "FATAL"
    # Imported here so that errors in settings do not wait for torch.
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from trainer.run.resolve import resolve
    from trainer.runtime import device

    os.environ["TORCH_CPP_LOG_LEVEL"] = inherited or "ERROR"  # for the ranks, for the same reason
    with one_line_errors(config):
        resolve(config, options.ranks * options.max_nodes)
        device.require_enough_gpus(config.run.device, options.ranks)
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(max(1, cores() // options.ranks))
    )  # otherwise torchrun warns and sets 1
    # The ranks report their own errors; the agent's report of them is noise. Its module server.api has a level of its own
    # and logs a traceback if, after a complete run, the first node's launcher ends while this one reads from its store.
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    arguments = options.arguments(config.distributed.init_timeout_s)
    forwarder = SignalForwarder(SignalException)
    try:
        torchrun.main([*arguments, str(ROOT / "train.py"), *sys.argv[1:]])
    except ChildFailedError as error:
        sys.exit(forwarder.exit_code() if forwarder.signal else exit_code(error))
    except (DistNetworkError, DistStoreError) as error:
        where = f" at {options.address}:{options.port}" if "--standalone" not in arguments else ""
        die(f"rendezvous of the launchers failed{where}: {str(error).splitlines()[0]}")
    except SignalException as error:
        sys.exit(128 + error.sigval)
    sys.exit(0)


class SignalForwarder:
    """Signal handler that forwards SIGTERM and SIGINT to the ranks, which then save and exit. Without this handler,
    torchrun would kill the ranks before they have saved. A second signal also stops the launcher."""

    def __init__(self, stop_now: Callable[[str, signal.Signals], Exception]):
        """stop_now: exception class. torchrun stops the ranks when such an exception is raised."""
        self.stop_now = stop_now
        self.signal: signal.Signals | None = None
        self.since = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._forward)

    def _forward(self, number: int, frame: object) -> None:
        repeated = self.signal is not None and time.monotonic() - self.since > 1
        if self.signal is None:
            self.signal, self.since = signal.Signals(number), time.monotonic()
        ranks = children()
        for rank in ranks:
            with suppress(ProcessLookupError):  # the rank has just ended
                os.kill(rank, number)
        if repeated or not ranks:
            raise self.stop_now(f"signal {number}", signal.Signals(number))

    def exit_code(self) -> int:
        """Report that the state was not saved, and return the launcher's exit code. Used if ranks failed after the signal."""
        print(f"the run was stopped by {self.signal.name} before its state could be saved", file=sys.stderr)
        return 128 + self.signal


def children() -> list[int]:
    """Return the ids of running child processes."""
    try:
        tasks = Path("/proc/self/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    except OSError:  # not Linux
        found = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]


def exit_code(error) -> int:
    """Return the exit code of the first rank that failed, or 128 + the signal number if a signal killed this rank. In that case
    also print the signal, because the rank could not report it."""
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        return failure.exitcode
    name = signal.Signals(-failure.exitcode).name
    print(f"rank {rank} was killed by {name}; the other ranks of this node were stopped", file=sys.stderr)
    return 128 - failure.exitcode


if __name__ == "__main__":
    run_to_end(main, "interrupted before the run started")  # once ranks run, they handle Ctrl-C
