"""Launcher of a node's ranks: checks the configuration, runs torchrun, and returns the exit code of the rank that failed first.

run_llama_train.sh calls it and documents NGPU, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT. All arguments go to train.py.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from trainer.config.command_line import config_from_command_line, die, one_line_errors, run_to_end
from trainer.system.process import cores


def _env_int(name: str, default: int, minimum: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isascii() or not text.isdigit() or int(text) < minimum:
        die(f"{name}={text}: expected an integer of at least {minimum}")
    return int(text)


def _num_nodes() -> tuple[int, int]:
    """Parse NNODES: an integer, or the minimum and the maximum as 2:4, between which an elastic run continues."""
    text = os.environ.get("NNODES", "1")
    match = re.fullmatch("([0-9]+)(?::([0-9]+))?", text)
    if match is None or not 0 < int(match[1]) <= int(match[2] or match[1]):
        die(f"NNODES={text}: expected an integer of at least 1, or the minimum and the maximum as 2:4")
    return int(match[1]), int(match[2] or match[1])


def torchrun_options(ranks: int, min_nodes: int, max_nodes: int, timeout_s: float) -> tuple[list[str], str]:
    """Return torchrun's options and the host:port of the rendezvous, which is "" if torchrun chooses it.
    ranks: number of ranks per node; timeout_s: maximum time that the nodes wait for each other."""
    node = _env_int("NODE_RANK", 0, 0)
    port = _env_int("MASTER_PORT", 29500, 1)
    if port > 65535:
        die(f"MASTER_PORT={port}: must be at most 65535")
    if node >= max_nodes:
        die(f"NODE_RANK={node}: must be below NNODES={max_nodes}")
    restarts = _env_int("MAX_RESTARTS", 0, 0)
    if max_nodes > 1 and "MASTER_ADDR" not in os.environ:
        die(f"NNODES={max_nodes}: needs MASTER_ADDR, the host name of the first node")
    options = [f"--nnodes={min_nodes}:{max_nodes}", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    options.append("--signals-to-handle=SIGHUP,SIGQUIT")  # `SignalForwarder` handles the others
    if max_nodes == 1 and "MASTER_PORT" not in os.environ:
        return [*options, "--standalone"], ""  # uses any free port
    endpoint = f"{os.environ.get('MASTER_ADDR', 'localhost')}:{port}"
    options.append(f"--rdzv-endpoint={endpoint}")
    if min_nodes == max_nodes:
        return [*options, f"--node-rank={node}", f"--rdzv-conf=timeout={round(timeout_s)}"], endpoint
    # Otherwise ranks use the store of the first launcher, and a node that rejoins does not know its restart count.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    waits = f"join_timeout={round(timeout_s)},last_call_timeout=5"
    return [*options, "--rdzv-backend=c10d", "--rdzv-id=run", f"--rdzv-conf={waits}"], endpoint


def main() -> None:
    config = config_from_command_line(sys.argv[1:])
    num_ranks = _env_int("NGPU", 1, 1)
    min_nodes, max_nodes = _num_nodes()
    options, endpoint = torchrun_options(num_ranks, min_nodes, max_nodes, config.distributed.init_timeout_s)
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
        resolve(config, num_ranks * max_nodes)
        device.require_enough_gpus(config.run.device, num_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // num_ranks)))  # otherwise torchrun warns and sets 1
    # The ranks report their own errors; the agent's report of them is noise.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    forwarder = SignalForwarder()
    try:
        torchrun.main([*options, str(ROOT / "train.py"), *sys.argv[1:]])
    except ChildFailedError as error:
        sys.exit(exit_code(error, forwarder.signal))
    except (DistNetworkError, DistStoreError) as error:
        where = f" at {endpoint}" if endpoint else ""
        die(f"rendezvous of the launchers failed{where}: {str(error).splitlines()[0]}")
    except SignalException as error:
        sys.exit(128 + error.sigval)


class SignalForwarder:
    """Forwards SIGTERM and SIGINT to the ranks, which save and exit; torchrun would kill them without waiting. A second signal
    also stops the launcher."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.since = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._forward)

    def _forward(self, number: int, frame: object) -> None:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        repeated = self.signal is not None and time.monotonic() - self.since > 1
        if self.signal is None:
            self.signal, self.since = signal.Signals(number), time.monotonic()
        ranks = children()
        for rank in ranks:
            os.kill(rank, number)
        if repeated or not ranks:
            raise SignalException(f"signal {number}", signal.Signals(number))  # makes torchrun stop the ranks


def children() -> list[int]:
    """Return the ids of running child processes."""
    try:
        tasks = Path("/proc/self/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    except OSError:  # not Linux
        found = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]


def exit_code(error, stopped_by: signal.Signals | None) -> int:
    """Return the exit code of the rank that failed first, as a shell reports it. Print a signal, which the rank could not.
    stopped_by: signal that this launcher had forwarded to the ranks before."""
    if stopped_by is not None:
        print(f"stopped by {stopped_by.name} before the state could be saved", file=sys.stderr)
        return 128 + stopped_by
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        return failure.exitcode
    name = signal.Signals(-failure.exitcode).name
    print(f"rank {rank} was killed by {name}; the other ranks of this node were stopped", file=sys.stderr)
    return 128 - failure.exitcode


if __name__ == "__main__":
    run_to_end(main, "interrupted before the run started")  # once ranks run, they handle Ctrl-C
