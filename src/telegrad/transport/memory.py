"""Connections between agents of one process: a listener is an entry in a table, and a connection a pair of sockets.

No address, no port and no file: what tests of whole agents need. Above the dialling nothing differs from Unix sockets,
descriptors of shared memory included.
"""

import contextlib
import os
import secrets
import socket
from collections import deque


class MemoryListener:
    """Stands for a listening socket: it can be waited on, accepts without waiting, and is closed."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(16)
        self._waiting: deque[socket.socket] = deque()  # dialled, not yet accepted
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        _listeners[self.name] = self

    def fileno(self) -> int:
        """The descriptor to wait on; -1 when closed."""
        return self._wakeup

    def accept(self) -> tuple[socket.socket, str]:
        """The next connection and who dialled it; BlockingIOError if there is none."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)  # before looking: one that comes right after the look is told again
        try:
            sock = self._waiting.popleft()
        except IndexError:
            raise BlockingIOError from None
        if self._waiting:  # whoever accepts may pause here, and waits for an event then
            os.eventfd_write(self._wakeup, 1)
        return sock, ""

    def dial(self) -> socket.socket:
        """The dialler's end of a new connection."""
        ours, theirs = socket.socketpair()
        self._waiting.append(theirs)
        os.eventfd_write(self._wakeup, 1)
        return ours

    def close(self) -> None:
        """Accept nothing more. Those that were not accepted see the end of the stream."""
        if _listeners.pop(self.name, None) is None:
            return
        wakeup, self._wakeup = self._wakeup, -1
        os.close(wakeup)
        for sock in self._waiting:
            sock.close()


_listeners: dict[str, MemoryListener] = {}


def dial_memory(name: str) -> socket.socket:
    """A connection to the listener of that name; ConnectionRefusedError if there is none in this process."""
    listener = _listeners.get(name)
    if listener is None:
        raise ConnectionRefusedError(f"no agent of this process listens at {name}")
    return listener.dial()
