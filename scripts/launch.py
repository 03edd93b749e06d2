"""Start the ranks of this machine: torchrun, after the configuration was checked, and with the trainer's own exit code.

Called by run_llama_train.sh, which says what NGPU, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT mean. All arguments
are the trainer's.
"""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from trainer.load_config import config_from_command_line, exit_with, one_line_errors
from trainer.system import cores


def whole_number(name: str, default: int, low: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isascii() or not text.isdigit() or int(text) < low:
        exit_with(f"{name}={text}: expected a whole number of at least {low}")
    return int(text)


def main() -> NoReturn:
    config = config_from_command_line(sys.argv[1:])
    ranks = whole_number("NGPU", 1, 1)
    nodes = whole_number("NNODES", 1, 1)
    node = whole_number("NODE_RANK", 0, 0)
    port = whole_number("MASTER_PORT", 29500, 1)
    if port > 65535:
        exit_with(f"MASTER_PORT={port}: must be at most 65535")
    if node >= nodes:
        exit_with(f"NODE_RANK={node}: must be below NNODES={nodes}")
    if nodes > 1 and "MASTER_ADDR" not in os.environ:
        exit_with(f"NNODES={nodes}: needs MASTER_ADDR, the name of the first machine")

    # After the configuration: a wrong setting is told without waiting for torch.
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from trainer.setup import set_up

    with one_line_errors(config):
        set_up(config, ranks * nodes)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))  # else torchrun warns and sets 1
    # The ranks have said what is wrong; the agent's own report of it is noise.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    where = ["--nnodes", str(nodes), "--nproc-per-node", str(ranks)]
    if nodes > 1 or "MASTER_PORT" in os.environ:
        address = os.environ.get("MASTER_ADDR", "localhost")
        where += ["--node-rank", str(node), "--master-addr", address, "--master-port", str(port)]
        where += ["--rdzv-conf", f"timeout={max(1, round(config.distributed.init_timeout_s))}"]
    else:
        where += ["--standalone"]
    try:
        torchrun.main([*where, str(ROOT / "train.py"), *sys.argv[1:]])
    except ChildFailedError as error:
        sys.exit(exit_code(error))
    except (DistNetworkError, DistStoreError) as error:
        reason = str(error).splitlines()[0]
        exit_with(f"the machines of this run did not come together at MASTER_ADDR and MASTER_PORT {port}: {reason}")
    except SignalException as error:
        sys.exit(128 + error.sigval)
    sys.exit(0)


def exit_code(error) -> int:
    """Of the rank that failed first, as a shell gives it. A signal is told: no rank could do that."""
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        return failure.exitcode
    name = signal.Signals(-failure.exitcode).name
    print(f"rank {rank} was ended by {name}; the other ranks of this machine were stopped", file=sys.stderr)
    return 128 - failure.exitcode


if __name__ == "__main__":
    main()
