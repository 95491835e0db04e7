"""How a connection comes about: dialled by one worker, accepted by the other, after both proved themselves.

The dialler does its part in the calling thread, with a deadline. The listener never gives a thread to a stranger: each
half-open connection is a small state machine fed by the I/O threads, there is room for so many of them, and each has a
deadline.
"""

import contextlib
import functools
import hashlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from telegrad.errors import AuthenticationError, ProtocolError, TelegradError, WorkerDied
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.threads.io_threads import IoThreads
from telegrad.rpc.threads.timer import Timer
from telegrad.rpc.workers import Member
from telegrad.transport.addresses import UNIX, Address, Listeners, connect, reachable
from telegrad.transport.connection import Connection
from telegrad.transport.handshake import DiallerHandshake, Hello, ListenerHandshake, Welcome
from telegrad.transport.memory import MemoryListener
from telegrad.transport.stream import Lane, SocketStream, make_lane_pair, pass_lane, receive_exactly, receive_lane

log = logging.getLogger("telegrad.rpc")

HANDSHAKE_SECONDS = 10.0
MAX_HALF_OPEN = 256
_PAUSE_SECONDS = 0.1


def main_fingerprint() -> str:
    """What two processes share exactly if their `__main__` is the same program, so its functions can go by name."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if path is None:
        return f"interactive {os.getpid()}"
    try:
        with open(path, "rb") as source:
            return hashlib.sha256(source.read()).hexdigest()
    except OSError:
        return f"unreadable {path}"


def dial(
    member: Member,
    hello: Hello,
    secret: bytes,
    options: RpcBackendOptions,
    deadline: float,
    on_blocked: Callable[[], None],
) -> tuple[Connection, Welcome]:
    """A connection to `member`, over the best way there is. ConnectionError if nobody answers at its addresses."""
    addresses = reachable(member.addresses, options.transports)
    if not addresses:
        raise WorkerDied(
            f"worker {member.name!r} cannot be reached: it listens at {list(member.addresses)}, and this worker may "
            f"use {options.transports}; allow the same transports on both.",
            worker=member.name,
            incarnation=member.incarnation,
        )
    problem: Exception | None = None
    for address in addresses:
        try:
            return _dial_address(address, hello, secret, options, deadline, on_blocked)
        except (OSError, ProtocolError) as error:
            problem = error
    assert problem is not None
    try:
        raise problem
    finally:
        del problem  # this frame would hold the error that holds it


def _dial_address(
    address: Address,
    hello: Hello,
    secret: bytes,
    options: RpcBackendOptions,
    deadline: float,
    on_blocked: Callable[[], None],
) -> tuple[Connection, Welcome]:
    left = max(0.1, min(deadline - time.monotonic(), HANDSHAKE_SECONDS))
    sock = connect(address, left)
    ours: socket.socket | None = None
    try:
        handshake = DiallerHandshake(secret)
        sock.sendall(handshake.opening)
        answer = receive_exactly(sock, handshake.opening_answer_bytes)
        shares = sock.family == socket.AF_UNIX and hello.shared_memory
        sock.sendall(handshake.answer(answer, _with_shared_memory(hello, shares)))
        if shares:
            ours, theirs = make_lane_pair()
            with theirs:
                pass_lane(sock, theirs)
        code, length = handshake.verdict_length(receive_exactly(sock, handshake.verdict_header_bytes))
        welcome = handshake.verdict(code, receive_exactly(sock, length))
    except BaseException:
        if ours is not None:
            ours.close()
        sock.close()
        raise
    stream = SocketStream(sock, address.kind, _lane(ours, welcome.shared_memory))
    connection = Connection(stream, max_frame=options.max_message_bytes, on_blocked=on_blocked)
    connection.peer, connection.peer_takes = f"worker {welcome.name!r}", welcome.takes_bytes
    return connection, welcome


def _lane(sock: socket.socket | None, agreed: bool) -> Lane | None:
    if sock is not None and not agreed:
        sock.close()
    return Lane(sock) if sock is not None and agreed else None


def _with_shared_memory(hello: Hello, shared_memory: bool) -> Hello:
    if hello.shared_memory == shared_memory:
        return hello
    fields = {f: getattr(hello, f) for f in hello.__struct_fields__}
    return Hello(**{**fields, "shared_memory": shared_memory})


class _HalfOpen:
    """A connection that has yet to prove itself."""

    __slots__ = ("handshake", "sock", "turn")

    def __init__(self, sock: socket.socket, handshake: ListenerHandshake) -> None:
        self.sock = sock
        self.handshake = handshake
        self.turn = threading.Lock()  # of the thread that reads it


class Acceptor:
    """Accepts connections. `admit(hello)` says whether a caller that proved itself is welcome, and as what."""

    def __init__(
        self,
        listeners: Listeners,
        secret: bytes,
        options: RpcBackendOptions,
        io_threads: IoThreads,
        timer: Timer,
        admit: Callable[[Hello], Welcome],
        admitted: Callable[[Hello, Welcome, Connection], None],
    ) -> None:
        self._listeners = listeners
        self._secret = secret
        self._options = options
        self._crew = io_threads
        self._timer = timer
        self._admit = admit
        self._admitted = admitted
        self._half_open: dict[int, _HalfOpen] = {}

    def start(self) -> None:
        """Begin to accept."""
        for listener in self._listeners.sockets:
            self._crew.watch(listener.fileno(), functools.partial(self._accept, listener), armed=True)

    def _accept(self, listener: socket.socket | MemoryListener) -> None:
        rearm = functools.partial(self._rearm, listener)
        try:
            while True:
                try:
                    sock, _ = listener.accept()
                except (BlockingIOError, ConnectionError):
                    rearm()
                    return
                if len(self._half_open) >= MAX_HALF_OPEN:
                    oldest = next(iter(self._half_open), None)
                    if oldest is not None:
                        self._drop(oldest, "too many connections are waiting to prove themselves")
                self._begin(sock)
        except OSError as error:
            if listener.fileno() >= 0:
                log.warning("cannot accept a connection: %s", error)
                # Most likely out of descriptors. The caller still waits, so at once would be again and again.
                self._timer.at(time.monotonic() + _PAUSE_SECONDS, rearm)

    def _rearm(self, listener: socket.socket | MemoryListener) -> None:
        if listener.fileno() >= 0:
            self._crew.arm(listener.fileno())

    def _begin(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        fd = sock.fileno()
        entry = _HalfOpen(sock, ListenerHandshake(self._secret))
        self._half_open[fd] = entry
        self._crew.watch(fd, lambda: self._proceed(fd), armed=True)

        def too_late() -> None:
            if self._half_open.get(fd) is entry:
                self._drop(fd, f"no proof within {HANDSHAKE_SECONDS:g} s")

        self._timer.at(time.monotonic() + HANDSHAKE_SECONDS, too_late)

    def _proceed(self, fd: int) -> None:
        entry = self._half_open.get(fd)
        # Descriptor numbers are used again, so an event may be meant for one that was closed: one thread at a time.
        if entry is None or not entry.turn.acquire(blocking=False):
            return
        try:
            waits = self._advance(fd, entry)
        finally:
            entry.turn.release()
        if waits:  # armed after the turn is given back, so that the event finds it free
            self._crew.arm(fd)

    def _advance(self, fd: int, entry: "_HalfOpen") -> bool:
        """Read what there is; True if more has to come."""
        sock, handshake = entry.sock, entry.handshake
        try:
            while handshake.hello is None:
                try:
                    data = sock.recv(handshake.needs)
                except BlockingIOError:
                    return True
                if not data:
                    self._drop(fd, "it closed the connection before it proved itself")
                    return False
                answer = handshake.feed(data)
                if answer:
                    sock.send(answer)  # fixed small size: fits the empty send buffer
            if self._half_open.get(fd) is entry:  # else another thread finished it
                self._finish(fd, sock, handshake.hello)
        except (TelegradError, OSError) as error:
            if isinstance(error, AuthenticationError):
                with contextlib.suppress(OSError):
                    sock.send(ListenerHandshake.refusal(error))
            self._drop(fd, str(error))
        return False

    def _finish(self, fd: int, sock: socket.socket, hello: Hello) -> None:
        lane_socket = None
        if hello.shared_memory:
            try:
                lane_socket = receive_lane(sock)
            except BlockingIOError:  # it is on its way
                sock.settimeout(1.0)
                lane_socket = receive_lane(sock)
        try:
            welcome = self._admit(hello)
            sock.send(ListenerHandshake.welcome(welcome))
        except BaseException:
            if lane_socket is not None:
                lane_socket.close()
            raise
        self._half_open.pop(fd, None)
        self._crew.forget(fd)
        kind = UNIX if sock.family == socket.AF_UNIX else "tcp"
        stream = SocketStream(sock, kind, _lane(lane_socket, welcome.shared_memory))
        connection = Connection(stream, max_frame=self._options.max_message_bytes)
        connection.peer, connection.peer_takes = f"worker {hello.name!r}", hello.takes_bytes
        self._admitted(hello, welcome, connection)

    def _drop(self, fd: int, why: str) -> None:
        entry = self._half_open.pop(fd, None)
        if entry is None:
            return
        log.warning("refused a connection: %s", why)
        self._crew.forget(fd)
        entry.sock.close()

    def close(self) -> None:
        """Stop accepting."""
        for listener in self._listeners.sockets:
            self._crew.forget(listener.fileno())
        self._listeners.close()
        for fd in list(self._half_open):
            entry = self._half_open.pop(fd, None)
            if entry is not None:
                self._crew.forget(fd)
                entry.sock.close()
