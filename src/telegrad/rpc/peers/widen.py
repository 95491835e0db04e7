"""Several TCP connections for one link: the dialler opens those beside the first when a large message comes by.

Each goes through the handshake of the first, with the ticket of its link and the number of its connection, so nobody
but the other end of the link can put one there. With TLS each end says a secret in that handshake, and what the
connection carries from then on is sealed (`transport/stripes/seal.py`). Calls do not wait for them: what is sent before
all are there goes over the first alone. If they cannot be had it stays so, after a few attempts.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable

import msgspec

from telegrad.errors import AuthenticationError, TelegradError
from telegrad.rpc.runtime import Runtime
from telegrad.rpc.server.session import Session
from telegrad.rpc.threads.cores import connections_for, sealed_connections_for
from telegrad.transport.addresses import TCP
from telegrad.transport.connection import Connection
from telegrad.transport.handshake import Hello
from telegrad.transport.stream import SocketStream
from telegrad.transport.stripes.seal import can_seal, fresh_secret
from telegrad.wire.parts import MOST_STREAMS

log = logging.getLogger("telegrad.rpc")

MOST_WIDE = 256  # accepted connections that may have others beside them
MOST_WIDE_OF_ONE = 4  # of one caller that is not trusted: each may cost 15 descriptors, and as many threads
_ATTEMPTS = 3
_PAUSE_SECONDS = 1.0

DialSide = Callable[[Hello, float], SocketStream]


class Widening:
    """Opens and admits the connections beside others, for one agent."""

    def __init__(self, runtime: Runtime, workers_here: Callable[[], int]) -> None:
        self._runtime = runtime
        self._workers_here = workers_here
        self._lock = threading.Lock()  # of those that accept, while they count

    def most(self, encrypted: bool) -> int:
        """How many TCP connections this worker uses for one link."""
        chosen = self._runtime.options.tcp_connections
        return chosen if chosen is not None else connections_for(self._workers_here(), encrypted)

    def most_sealed(self) -> int:
        """The same for one with TLS where those beside the first are sealed; 0 if this worker cannot do that."""
        if not can_seal():
            return 0
        chosen = self._runtime.options.tcp_connections
        return chosen if chosen is not None else sealed_connections_for(self._workers_here())

    # --- of those that are dialled ---

    def watch(
        self, connection: Connection, hello: Hello, most: int, dial: DialSide, *, sealed: bool, attempt: int = 1
    ) -> None:
        """Widen a connection of this worker when a large message comes by; `dial` makes one beside it."""
        if most > 1:
            widen = functools.partial(self._widen, connection, hello, most, dial, sealed, attempt)
            connection.could_widen(lambda: self._runtime.io_threads.submit(widen))

    def _widen(
        self, connection: Connection, hello: Hello, most: int, dial: DialSide, sealed: bool, attempt: int
    ) -> None:
        """I/O thread: dial them one by one."""
        sides: list[SocketStream] = []
        deadline = time.monotonic() + self._runtime.patience
        try:
            for place in range(1, most):
                if self._runtime.closing or connection.closed:
                    raise ConnectionResetError("the connection has ended")
                secret = fresh_secret() if sealed else b""
                beside = msgspec.structs.replace(hello, side=place, sides=most - 1, shared_memory=False, seal=secret)
                sides.append(dial(beside, deadline))
        except (TelegradError, OSError) as error:
            log.info("one connection to %s is used where %d could be: %s", connection.peer, most, error)
            for side in sides:
                side.close()
            if attempt < _ATTEMPTS and not connection.closed:
                again = functools.partial(self.watch, connection, hello, most, dial, sealed=sealed, attempt=attempt + 1)
                self._runtime.timer.at(time.monotonic() + _PAUSE_SECONDS, again)
            return
        self._attach(connection, sides)
        connection.use_stripes()

    def _attach(self, connection: Connection, sides: list[SocketStream]) -> None:
        stripes = connection.attach(sides, self._runtime.part_threads)
        # Whoever reads may have left while parts were missing: then the I/O threads read on.
        stripes.on_arrival = functools.partial(self._runtime.io_threads.nudge, connection.stream.fileno())

    # --- of those that are accepted ---

    def check(self, hello: Hello, session: Session | None) -> None:
        """Raise unless a connection may be put beside the one of that session."""
        connection = session.connection if session is not None else None
        if connection is None or connection.number != hello.connection or not hello.connection:
            raise AuthenticationError("there is no such connection to put another beside")
        if connection.stream.kind != TCP or not 0 < hello.side <= hello.sides < MOST_STREAMS:
            raise AuthenticationError("no connection can be put there")
        if hello.seal and not can_seal():
            raise AuthenticationError("this worker lacks what opens sealed pieces")

    def admit(self, hello: Hello, session: Session | None, stream: SocketStream, sessions: list[Session]) -> None:
        """Put a connection beside the one of a session, which is one of `sessions`."""
        connection = session.connection if session is not None else None
        if connection is None or connection.number != hello.connection:  # it may be the next one by now
            raise AuthenticationError("the connection has ended that this one was to be beside")
        with self._lock:  # or several would find room for one
            if connection.gathering is None:
                self._check_room(hello.name, sessions)
            gathering = connection.gather(hello.sides)
        sides = gathering.add(hello.side, stream)
        if sides is not None:
            self._attach(connection, sides)

    def _check_room(self, name: str, sessions: list[Session]) -> None:
        wide = [s.member.name for s in sessions if s.connection is not None and s.connection.gathering is not None]
        if len(wide) >= MOST_WIDE:
            raise AuthenticationError(f"{MOST_WIDE} connections have others beside them already")
        if self._runtime.options.exports_only and wide.count(name) >= MOST_WIDE_OF_ONE:
            raise AuthenticationError(f"{MOST_WIDE_OF_ONE} connections of {name!r} have others beside them already")
