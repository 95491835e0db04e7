"""The answers to what this worker asked of others: those that no caller waits for are read by one I/O thread.

Who asks many workers is answered by all of them at once. A thread for each would take the interpreter from the others,
and from the one that is still asking, with every system call, which costs more than all the answers. So the descriptors
of the links are a set of their own. To the I/O threads it is one descriptor, and so one of them at a time comes for it:
it waits until the thread that asks has paused, reads link after link, and only then does what the answers lead to, when
another may read. A link in the middle of a large answer gets a thread of its own until that is there.
"""

import contextlib
import logging
import select
import time
from typing import Any, Protocol

from telegrad.rpc.threads.io_threads import END_ONLY, ONCE, IoThreads

log = logging.getLogger("telegrad.rpc")

_PACE = 200e-6  # seconds between two requests of one who asks many, at most
_PAUSE = 50e-6
_MOST_PAUSES = 20
_MOST_EVENTS = 64
_MOST_ROUNDS = 4  # of so many, before what they brought is completed
_GONE = (ValueError, OSError)  # closed meanwhile: whoever closed it has dealt with its end


class Reader(Protocol):
    """The reading end of a link."""

    def readable(self) -> None:
        """Read what has come, and complete it."""

    def gather(self) -> list[Any]:
        """Read what has come, without waiting; what is to be completed."""

    def complete(self, gathered: list[Any], alone: bool) -> None:
        """Complete it. What may run a user's code is for other threads, unless nothing else waits behind it: `alone`"""


class ReplyEvents:
    """The descriptors of one agent's links."""

    def __init__(self, io_threads: IoThreads) -> None:
        self._io_threads = io_threads
        self._epoll = select.epoll()
        self._fd = self._epoll.fileno()
        self._readers: dict[int, Reader] = {}
        self._asked = 0  # since answers were last taken
        self._last_asked = 0.0

    def start(self) -> None:
        """Let the I/O threads come for what arrives."""
        self._io_threads.register(self._fd, self._take, armed=True)

    def register(self, fd: int, reader: Reader) -> None:
        """Read what comes on `fd` when it is armed, and its end in any case."""
        self._readers[fd] = reader
        self._io_threads.stand_by(fd, reader.readable)  # from the start: parts of an answer come over other descriptors
        self._epoll.register(fd, END_ONLY)

    def arm(self, fd: int, alone: bool = False) -> None:
        """Wait for the next event of `fd`; `alone` if a thread is to come for this descriptor and no other."""
        with contextlib.suppress(*_GONE):
            if alone:
                self._epoll.modify(fd, select.EPOLLONESHOT)
                self._io_threads.arm(fd)
            else:
                self._epoll.modify(fd, ONCE)

    def disarm(self, fd: int) -> None:
        """A thread is reading `fd` itself, or nothing is expected: see to the end of the stream only."""
        with contextlib.suppress(*_GONE):
            self._epoll.modify(fd, END_ONLY)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`; to be called before it is closed."""
        self._readers.pop(fd, None)
        self._io_threads.forget(fd)
        with contextlib.suppress(*_GONE):
            self._epoll.unregister(fd)

    def asked(self, now: float) -> None:
        """Something was asked whose answer comes to the I/O threads."""
        self._asked += 1
        self._last_asked = now

    def others_may_read(self) -> None:
        """What this thread does now may take long, and it may be the one that reads: let another come for the rest."""
        self._io_threads.arm(self._fd)

    def _take(self) -> None:
        """I/O thread: answers have come."""
        self._let_ask()
        gathered: list[tuple[Reader, list[Any]]] = []
        try:
            for _ in range(_MOST_ROUNDS):
                events = self._epoll.poll(0, _MOST_EVENTS)
                if not events:
                    break
                for fd, _ in events:
                    reader = self._readers.get(fd)
                    if reader is not None and (found := self._gather(reader)):
                        gathered.append((reader, found))
        except _GONE:
            pass  # the agent has ended; but somebody may wait for what came before
        finally:
            self._io_threads.arm(self._fd)
        alone = len(gathered) == 1
        for reader, found in gathered:
            self._complete(reader, found, alone)

    def _let_ask(self) -> None:
        """If more was asked than what is answered first, a thread may be asking one worker after the other: let it."""
        pauses = 0
        while self._asked > 1 and pauses < _MOST_PAUSES and time.monotonic() - self._last_asked < _PACE:
            time.sleep(_PAUSE)
            pauses += 1
        self._asked = 0

    def _gather(self, reader: Reader) -> list[Any]:
        try:
            return reader.gather()
        except Exception:
            log.exception("an answer could not be read; the other links go on")
            return []

    def _complete(self, reader: Reader, found: list[Any], alone: bool) -> None:
        try:
            reader.complete(found, alone)
        except Exception:
            log.exception("what an answer leads to failed; the other links go on")

    def close(self) -> None:
        """The I/O threads have ended."""
        self._readers.clear()
        self._epoll.close()
