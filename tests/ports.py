"""Free ports of this machine."""

import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice


def _free() -> Iterator[str]:
    for port in random.SystemRandom().sample(range(10_000, 32_768), 1000):
        with suppress(OSError), socket.create_server(("localhost", port)):
            yield str(port)


def free_ports(count: int) -> list[str]:
    """Return different free ports, as text. They are below those that Linux gives to connections and to listeners without a port
    of their own, of which another process might get one before it is used."""
    return list(islice(_free(), count))


def free_port() -> str:
    return free_ports(1)[0]
