"""Start the ranks of this machine: torchrun, after the configuration was checked, and with the trainer's own exit code.

Called by run_llama_train.sh, which says what NGPU, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT mean. All arguments
are the trainer's.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from trainer.config.command_line import config_from_command_line, die, one_line_errors, run_to_end
from trainer.system.process import cores


def whole_number(name: str, default: int, low: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isascii() or not text.isdigit() or int(text) < low:
        die(f"{name}={text}: expected an integer of at least {low}")
    return int(text)


@dataclass(frozen=True)
class Place:
    """Where this launcher stands, by the environment."""

    ranks: int
    fewest: int
    """Machines that the run may go on with; below `nodes` where they may come and go."""
    nodes: int
    node: int
    address: str
    port: int
    restarts: int

    @classmethod
    def of_environment(cls) -> "Place":
        ranks = whole_number("NGPU", 1, 1)
        fewest, nodes = _machines()
        node = whole_number("NODE_RANK", 0, 0)
        port = whole_number("MASTER_PORT", 29500, 1)
        if port > 65535:
            die(f"MASTER_PORT={port}: must be at most 65535")
        if node >= nodes:
            die(f"NODE_RANK={node}: must be below NNODES={nodes}")
        restarts = whole_number("MAX_RESTARTS", 0, 0)
        if nodes > 1 and "MASTER_ADDR" not in os.environ:
            die(f"NNODES={nodes}: needs MASTER_ADDR, the name of the first machine")
        return cls(ranks, fewest, nodes, node, os.environ.get("MASTER_ADDR", "localhost"), port, restarts)

    def arguments(self, timeout_s: float) -> list[str]:
        """For torchrun. timeout_s: how long the machines wait for each other."""
        nodes = str(self.nodes) if self.fewest == self.nodes else f"{self.fewest}:{self.nodes}"
        size = ["--nnodes", nodes, "--nproc-per-node", str(self.ranks), "--max-restarts", str(self.restarts)]
        size += ["--signals-to-handle", "SIGHUP,SIGQUIT"]  # the others are ours
        if self.nodes == 1 and "MASTER_PORT" not in os.environ:
            return [*size, "--standalone"]  # at any free port
        if self.fewest < self.nodes:
            # Otherwise the ranks meet in the first launchers' store, whose attempts a machine that comes back does not know.
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.address}:{self.port}", "--rdzv-id", "run"]
            return [*size, *meeting, "--rdzv-conf", f"join_timeout={round(timeout_s)},last_call_timeout=5"]
        meeting = ["--node-rank", str(self.node), "--master-addr", self.address, "--master-port", str(self.port)]
        return [*size, *meeting, "--rdzv-conf", f"timeout={round(timeout_s)}"]


def _machines() -> tuple[int, int]:
    """NNODES: a number, or the fewest and the most as 2:4."""
    text = os.environ.get("NNODES", "1")
    fewest, colon, most = text.partition(":")
    parts = [fewest, most] if colon else [text]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts) or int(parts[0]) > int(parts[-1]):
        die(f"NNODES={text}: expected an integer of at least 1, or the fewest and the most as 2:4")
    return int(parts[0]), int(parts[-1])


def main() -> NoReturn:
    config = config_from_command_line(sys.argv[1:])
    place = Place.of_environment()
    # torch's own log of a failed connection is pages of C++ frames; it reads this when it is imported.
    inherited = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = inherited or "FATAL"
    # Not at the top: a wrong setting is told without waiting for torch.
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from trainer.run.resolve import resolve
    from trainer.runtime import device

    os.environ["TORCH_CPP_LOG_LEVEL"] = inherited or "ERROR"  # of the ranks, for the same reason
    with one_line_errors(config):
        resolve(config, place.ranks * place.nodes)
        device.require_enough(config.run.device, place.ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // place.ranks)))  # else torchrun warns and sets 1
    # The ranks have said what is wrong; the agent's own report of it is noise.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    arguments = place.arguments(config.distributed.init_timeout_s)
    stop = Stop(SignalException)
    try:
        torchrun.main([*arguments, str(ROOT / "train.py"), *sys.argv[1:]])
    except ChildFailedError as error:
        sys.exit(stop.exit_code() if stop.signal else exit_code(error))
    except (DistNetworkError, DistStoreError) as error:
        where = f" at {place.address}:{place.port}" if "--standalone" not in arguments else ""
        die(f"the launchers of this run did not come together{where}: {str(error).splitlines()[0]}")
    except SignalException as error:
        sys.exit(128 + error.sigval)
    sys.exit(0)


class Stop:
    """SIGTERM and SIGINT are passed on to the ranks, which save and end; torchrun would end them without waiting. A second
    one ends this launcher too."""

    def __init__(self, end_at_once: Callable[[str, signal.Signals], Exception]):
        """end_at_once: what torchrun takes for an order to end."""
        self.end_at_once = end_at_once
        self.signal: signal.Signals | None = None
        self.since = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: object) -> None:
        again = self.signal is not None and time.monotonic() - self.since > 1
        if self.signal is None:
            self.signal, self.since = signal.Signals(number), time.monotonic()
        ranks = children()
        for rank in ranks:
            os.kill(rank, number)
        if again or not ranks:
            raise self.end_at_once(f"signal {number}", signal.Signals(number))

    def exit_code(self) -> int:
        """Of ranks that did not come to their end in peace after the signal."""
        print(f"ended by {self.signal.name} before the state could be saved", file=sys.stderr)
        return 128 + self.signal


def children() -> list[int]:
    """The processes that this one has started and that still run."""
    try:
        tasks = Path("/proc/self/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    except OSError:  # no Linux
        found = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]


def exit_code(error) -> int:
    """Of the rank that failed first, as a shell gives it. A signal is told: no rank could do that."""
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        return failure.exitcode
    name = signal.Signals(-failure.exitcode).name
    print(f"rank {rank} was ended by {name}; the other ranks of this machine were stopped", file=sys.stderr)
    return 128 - failure.exitcode


if __name__ == "__main__":
    run_to_end(main, "interrupted before the run began")  # when there are ranks, Ctrl-C is theirs
