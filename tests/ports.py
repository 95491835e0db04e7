"""Ports for tests that have to name one before anybody listens there."""

import random
import socket

# Below those that the system gives by itself, so that no connection that is opened meanwhile can have it.
_PORTS = range(20_000, 32_000)
_chance = random.SystemRandom()  # hypothesis gives all processes of the suite the same numbers


def free_port() -> int:
    """A port of this host that nobody uses."""
    while True:
        port = _chance.choice(_PORTS)
        with socket.socket() as sock:
            try:
                sock.bind(("", port))
            except OSError:
                continue
        return port
