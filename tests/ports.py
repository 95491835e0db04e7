"""A port for one test alone, though other tests run beside it."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def own_port() -> Iterator[int]:
    """A port of the loopback address that the system gives to nobody else for the length of a block.

    It is bound and not listened at, so that whoever is told of it can listen there, with SO_REUSEADDR as servers do."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
