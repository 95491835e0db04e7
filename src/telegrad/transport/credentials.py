"""Who is at the other end of a Unix socket: the kernel knows, and nobody can lie to it."""

import os
import socket
import struct
from typing import NamedTuple

_UCRED = struct.Struct("=iII")


class Credentials(NamedTuple):
    """The process at the other end when it connected, or when it began to listen."""

    pid: int
    uid: int

    @property
    def is_trusted_user(self) -> bool:
        """Whether it runs as this user, or as root, who can do everything anyway."""
        return self.uid in (os.getuid(), 0)


def credentials_of(sock: socket.socket) -> Credentials | None:
    """Who is at the other end; None if it is no Unix socket, or the system cannot tell."""
    if sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return None
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Credentials(pid, uid)
