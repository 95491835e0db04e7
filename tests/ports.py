"""Ports for tests that have to name one before anybody listens there, though other tests run beside them."""

import contextlib
import random
import socket
from collections.abc import Iterator

# Below those that the system gives by itself, so that no connection that is opened meanwhile can have it.
_PORTS = range(20_000, 32_000)
_chance = random.SystemRandom()  # hypothesis gives all processes of the suite the same numbers


@contextlib.contextmanager
def own_port() -> Iterator[int]:
    """A port of the loopback address that the system gives to nobody else for the length of a block.

    It is bound and not listened at, so that whoever is told of it can listen there, with SO_REUSEADDR as servers do."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def free_port() -> int:
    """A port of this host that nobody uses; for a test in which somebody may open it again, whose block has no end."""
    while True:
        port = _chance.choice(_PORTS)
        with socket.socket() as sock:
            try:
                sock.bind(("", port))
            except OSError:
                continue
        return port
