"""The rendezvous of elastic runs. Only the launcher imports this module, because torch's part of it takes long to import."""

import threading
import time
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

from trainer.runtime.rendezvous import SILENCE_S, clock_time, connect
from trainer.system.console import announce


def prepare(address: str, port: int, min_nodes: int, timeout_s: float) -> None:
    """Wait until the first node answers, which torchrun would do for a minute only. Let torchrun's rendezvous, also those after a
    node is lost, announce that it waits for other nodes."""
    if not _matches_machine_hostname(address):  # otherwise, this launcher may be the one that hosts the store
        connect(address, port, "the first node", timeout_s)
    rendezvous = DynamicRendezvousHandler.next_rendezvous

    def next_rendezvous(handler: DynamicRendezvousHandler) -> Any:
        deadline = time.monotonic() + timeout_s

        def report() -> None:
            joined = len(handler._state_holder.state.participants)
            wanted = f"at least {min_nodes} nodes to join at {address}:{port}; {joined} have joined"
            announce(f"waiting until {clock_time(deadline)} for {wanted}")

        timer = threading.Timer(SILENCE_S, report)
        timer.daemon = True
        timer.start()
        try:
            return rendezvous(handler)
        finally:
            timer.cancel()

    DynamicRendezvousHandler.next_rendezvous = next_rendezvous
