"""Returns memory that nobody has used for a while, on both ends of each connection."""

import time

from telegrad.cuda import upload
from telegrad.rpc.peers.peers import Peers
from telegrad.rpc.runtime import Runtime
from telegrad.transport.connection import heap
from telegrad.transport.device.leftovers import collect

# How long blocks of memory are kept for the next tensor. New ones cost 100 ms for 100 MB: little in so long a time.
KEEP_IDLE_SECONDS = 10.0


class IdleMemory:
    """Looks every few seconds, in an I/O thread."""

    def __init__(self, runtime: Runtime, peers: Peers) -> None:
        self._runtime = runtime
        self._peers = peers

    def start(self) -> None:
        """Look from now on."""
        io_threads = self._runtime.io_threads
        self._runtime.timer.at(time.monotonic() + KEEP_IDLE_SECONDS, lambda: io_threads.submit(self._look))

    def _look(self) -> None:
        if not self._runtime.closing:
            try:
                self.tidy(time.monotonic() - KEEP_IDLE_SECONDS)
            finally:
                self.start()

    def tidy(self, before: float) -> None:
        """Return the memory of blocks that have been idle since `before` on the monotonic clock."""
        upload.collect()
        heap.trim(before)
        collect()
        for link in self._peers.links():
            link.tidy(before)
        for session in self._peers.sessions():
            session.tidy(before)
