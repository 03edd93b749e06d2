"""The rendezvous of elastic runs. Only the launcher imports this module, because torch's part of it takes long to import."""

from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

from trainer.runtime.rendezvous import announced, connect


def prepare(address: str, port: int, min_nodes: int, timeout_s: float) -> None:
    """Wait until the first node answers, which torchrun would do for a minute only. Let torchrun's rendezvous, also those after a
    node is lost, announce that it waits for other nodes."""
    if not _matches_machine_hostname(address):  # otherwise, this launcher may be the one that hosts the store
        connect(address, port, "the first node", timeout_s)
    rendezvous = DynamicRendezvousHandler.next_rendezvous

    def next_rendezvous(handler: DynamicRendezvousHandler) -> Any:
        def awaited() -> str:
            joined = len(handler._state_holder.state.participants)
            return f"at least {min_nodes} nodes to join at {address}:{port}; {joined} have joined"

        with announced(awaited, timeout_s):
            return rendezvous(handler)

    DynamicRendezvousHandler.next_rendezvous = next_rendezvous
