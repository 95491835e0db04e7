"""A port for a test that has to name one before it is listened at."""

import itertools
import os
import socket
from pathlib import Path

_FIRST = 10_000
_numbers = itertools.count(os.getpid() * 37)  # processes that run tests beside each other begin at different ones


def free_port(host: str = "127.0.0.1") -> int:
    """One that nobody listens at. The system chooses those of `bind(0)` and of outgoing connections from a range above
    it, so none of the many programs beside this one is given it in the moment until it is used."""
    above = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100 if above > _FIRST + 1000 else 0):
        port = _FIRST + next(_numbers) % (above - _FIRST)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        chosen: int = probe.getsockname()[1]
        return chosen
