"""Where this worker can be found, and whether another one that left a record is still running: without asking it."""

import contextlib
import os
import socket

from telegrad.rpc.workers import Member
from telegrad.transport.addresses import TCP, host_identity, is_loopback

LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 1.0


def process_state(member: Member) -> bool | None:
    """Whether the process of a worker runs, by the process table; None if it is on another host."""
    if member.host != host_identity():
        return None
    if not os.path.isdir("/proc/self"):
        return _answers_signal(member.pid)
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{member.pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] not in "TtZX"
    return False


def _answers_signal(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def seems_alive(member: Member) -> bool:
    """Whether a worker seems to run: its process is there, or somebody listens where it said it would."""
    runs = process_state(member)
    if runs is not None:
        return runs
    for address in member.addresses:
        if address.kind == TCP and not is_loopback(address.host):
            with contextlib.suppress(OSError):
                socket.create_connection((address.host, int(address.where)), _CONNECT_SECONDS).close()
                return True
    return False


def address_towards(host: str, port: int) -> str:
    """The address of this machine on the network that leads to `host`. Sends nothing."""
    family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as sock:
        sock.connect(where)
        return str(sock.getsockname()[0])
