"""Launcher of a node's ranks. It checks the configuration and runs torchrun. Its exit code comes from the first rank to fail.

run_llama_train.sh calls this file and documents the variables NGPU, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT. All
arguments are forwarded to train.py. With --dry-run, no rank starts: the launcher prints what the run would do.
"""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from trainer.base.system.dependencies import require_dependencies
from trainer.base.system.signals import LAUNCHER_PID, SignalForwarder, SignalListener, end_before_training
from trainer.base.system.spelling import first_line
from trainer.base.system.streams import flush_standard_streams, open_standard_streams, print_error, require_stdout

if __name__ == "__main__":  # before the other imports, during which signals arrive too
    open_standard_streams()
    require_dependencies()
    listener = SignalListener(end_before_training)

import logging
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from trainer.base.config.command_line import config_from_command_line
from trainer.base.config.environment_variables import check_log_rank, environment_int
from trainer.base.config.errors import ConfigError
from trainer.base.config.exits import one_line_errors, run_to_end
from trainer.base.config.hub import COMMIT
from trainer.base.config.separate_tasks import refuse_separate_tasks
from trainer.base.system.children import end_children
from trainer.base.system.process import cores


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
    """0: any free port, on one node."""
    restarts: int

    @classmethod
    def from_environment(cls) -> "TorchrunOptions":
        ranks = environment_int("NGPU", 1, 1, 4096)
        min_nodes, max_nodes = _num_nodes()
        node = environment_int("NODE_RANK", 0, 0)
        any_port = max_nodes == 1 and "MASTER_PORT" not in os.environ
        port = 0 if any_port else environment_int("MASTER_PORT", 29500, 1, 65535)
        if node >= max_nodes:
            raise ConfigError("", f"NODE_RANK={node}: must be below NNODES={max_nodes}")
        check_log_rank(ranks * max_nodes)
        restarts = environment_int("MAX_RESTARTS", 0, 0)
        if max_nodes > 1 and "MASTER_ADDR" not in os.environ:
            raise ConfigError("", f"NNODES={max_nodes}: set MASTER_ADDR to the host name of the first node")
        return cls(ranks, min_nodes, max_nodes, node, os.environ.get("MASTER_ADDR", "localhost"), port, restarts)

    @property
    def elastic(self) -> bool:
        return self.min_nodes < self.max_nodes

    def arguments(self, timeout_s: float) -> list[str]:
        """Return torchrun's arguments. timeout_s: maximum time that the nodes wait for each other."""
        nodes = f"{self.min_nodes}:{self.max_nodes}" if self.elastic else str(self.max_nodes)
        options = ["--nnodes", nodes, "--nproc-per-node", str(self.ranks), "--max-restarts", str(self.restarts)]
        options += ["--signals-to-handle", ""]  # `SignalForwarder` handles all, unless the parent process ignores them
        if self.elastic:
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
        raise ConfigError(
            "", f"NNODES={text}: expected an integer of at least 1, or a minimum and a maximum such as 2:4"
        )
    return int(match[1]), int(match[2] or match[1])


def main(listener: SignalListener) -> NoReturn:
    config = config_from_command_line(sys.argv[1:])
    options = TorchrunOptions.from_environment()
    refuse_separate_tasks(options.max_nodes)
    # torch logs pages of C++ frames for a failed connection; it reads this level when it is imported.
    inherited = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = inherited or "FATAL"
    # Imported here so that errors in settings do not wait for torch.
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    from trainer.run.resolve import resolve_on_this_node
    from trainer.runtime import elastic, rendezvous

    if config.model.revision:  # the ranks use this commit, even if the model changes on the Hub meanwhile
        os.environ[COMMIT] = f"{config.model.pretrained}@{config.model.revision}"
    os.environ["TORCH_CPP_LOG_LEVEL"] = inherited or "ERROR"  # for the ranks, for the same reason
    with config.explained_errors():
        resolve_on_this_node(config, options.ranks, options.max_nodes)
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(max(1, cores() // options.ranks))
    )  # otherwise torchrun warns and sets 1
    # The ranks report their own errors; the agent's report of them is noise. Its module server.api has a level of its own
    # and logs a traceback if, after a complete run, the first node's launcher ends while this one reads from its store.
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    timeout_s = config.distributed.init_timeout_s
    forwarder = SignalForwarder()
    listener.react = forwarder.receive
    try:
        if options.elastic:
            elastic.prepare(options.address, options.port, options.min_nodes, timeout_s)
        elif options.max_nodes > 1:
            address, node, nodes = (options.address, options.port), options.node, options.max_nodes
            _store = rendezvous.wait_for_nodes(*address, node, nodes, timeout_s)  # it lives until the run ends
        else:
            try:
                _store = rendezvous.host_on_loopback(options.port)
            except OSError as error:
                reason = os.strerror(error.errno)
                raise ConfigError("", f"MASTER_PORT={options.port}: this port cannot be used ({reason})") from None
            options = replace(options, address=rendezvous.LOOPBACK, port=_store.port)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        arguments = options.arguments(timeout_s)
        forwarder.watch_for_ranks()
        os.environ[LAUNCHER_PID] = str(os.getpid())
        torchrun.main([*arguments, os.path.join(ROOT, "train.py"), *sys.argv[1:]])
        code = 0
    except ChildFailedError as error:
        code = forwarder.exit_code(error)
    except (DistNetworkError, DistStoreError, RendezvousError) as error:
        late = f"fewer than {options.min_nodes} nodes joined within {timeout_s:g} s"  # torch's error for it has no text
        text = first_line(error) if str(error) else late
        print_error(f"rendezvous of the launchers failed at {options.address}:{options.port}: {text}")
        code = 1
    flush_standard_streams()
    os._exit(code)  # the interpreter's clean-up would fail if the console cannot be written


def run_dry(listener: SignalListener) -> NoReturn:
    """Print what the run would do, in this process alone, and exit."""
    require_stdout()
    config = config_from_command_line([word for word in sys.argv[1:] if word != "--dry-run"])
    has_address = "MASTER_ADDR" in os.environ
    os.environ.setdefault("MASTER_ADDR", "localhost")  # a dry run waits for no other node
    options = TorchrunOptions.from_environment()
    refuse_separate_tasks(options.max_nodes)
    from trainer.run.resolve import resolve_on_this_node
    from trainer.tools.dry_run import dry_run

    listener.react = partial(end_before_training, clean_up=end_children)
    try:
        with one_line_errors(), config.explained_errors():
            resolved = resolve_on_this_node(config, options.ranks, options.max_nodes)
            if options.max_nodes > 1 and not has_address:
                print("nodes         a run on several nodes needs MASTER_ADDR, the host name of the first one")
            code = dry_run(config, resolved, options.ranks)
    except SystemExit as exit:
        code = exit.code
    flush_standard_streams()
    os._exit(code)  # gloo's threads may abort in the interpreter's clean-up


if __name__ == "__main__":
    run_to_end(partial(run_dry if "--dry-run" in sys.argv else main, listener))
