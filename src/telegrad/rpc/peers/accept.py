"""Accepting: connections that other workers dial, each of which has to prove itself first.

No thread is given to a stranger: each half-open connection is a small state machine fed by the I/O threads, there is
room for so many of them, and each has a deadline. The other side is `dial.py`.

Threads: each listener is armed for one event at a time, so one thread accepts at it; several listeners, the threads
that go on with a half-open connection and the timer all use `_half_open`. Each step there is one operation on a dict,
atomic under the GIL: whoever pops an entry owns its end. Of one entry, `turn` lets a single thread read at a time.
"""

import contextlib
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from telegrad.errors import AuthenticationError, ProtocolError, TelegradError
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.peers.dial import HANDSHAKE_SECONDS, lane_over, sealed_over, stream_over
from telegrad.rpc.threads.io_threads import IoThreads
from telegrad.rpc.threads.timer import Timer
from telegrad.rpc.trust.rate import LimitedLog, TokenBucket
from telegrad.transport.addresses import TCP, UNIX, Listeners
from telegrad.transport.connection import Connection
from telegrad.transport.credentials import Credentials, credentials_of
from telegrad.transport.handshake import Hello, ListenerHandshake, Welcome
from telegrad.transport.memory import MemoryListener
from telegrad.transport.stream import SocketStream, receive_lane
from telegrad.transport.tls import TlsEnds, check_name
from telegrad.transport.tls_stream import TlsSocket

log = logging.getLogger("telegrad.rpc")

MAX_HALF_OPEN = 256
_PAUSE_SECONDS = 0.1
# What strangers may cost: so many connections a second are accepted, after a burst that lets a large job begin. Others
# wait in the listener's queue, from which each is taken in its turn.
_ACCEPT_RATE, _ACCEPT_BURST = 400.0, 1024.0
_ACCEPT_PAUSE = 0.01
# Of a burst so many seconds at a time, and then three times as long a pause: a thread that goes on and on keeps the
# interpreter from those that serve calls for 5 ms at a time, and with TLS each connection costs a signature. Seconds of
# the thread itself: on a busy machine it may have to wait between two connections, and workers of the job wait for it.
_ACCEPT_SLICE, _PAUSE_FACTOR = 0.001, 3.0


class Caller(NamedTuple):
    """What is known of a caller beside what it says: the kernel's word, and its certificate's."""

    process: Credentials | None
    certificate: TlsSocket | None  # the connection it was shown on, where certificates name workers


class _HalfOpen:
    """A connection that has yet to prove itself."""

    __slots__ = ("encrypting", "handshake", "process", "since", "sock", "turn")

    def __init__(
        self, sock: socket.socket | TlsSocket, handshake: ListenerHandshake, process: Credentials | None
    ) -> None:
        self.sock = sock
        self.handshake = handshake
        self.process = process
        self.encrypting = isinstance(sock, TlsSocket)  # TLS is still to be agreed on
        self.since = time.monotonic()
        self.turn = threading.Lock()  # of the thread that reads it


class Acceptor:
    """Accepts connections. `admit(hello, caller)` says whether one that proved itself is welcome, and as what; then it
    is given to `admitted`, or to `not_admitted` if it could not be told so. One that belongs beside another goes to
    `beside` before it is told so: its peer may use it at once."""

    def __init__(
        self,
        listeners: Listeners,
        secret: bytes,
        options: RpcBackendOptions,
        io_threads: IoThreads,
        timer: Timer,
        admit: Callable[[Hello, Caller], Welcome],
        admitted: Callable[[Hello, Welcome, Connection], None],
        not_admitted: Callable[[Hello], None],
        beside: Callable[[Hello, SocketStream], None],
        tls: TlsEnds | None = None,
    ) -> None:
        self._listeners = listeners
        self._secret = secret
        self._options = options
        self._io_threads = io_threads
        self._timer = timer
        self._admit = admit
        self._admitted = admitted
        self._not_admitted = not_admitted
        self._beside = beside
        self._tls = tls
        self._half_open: dict[int, _HalfOpen] = {}
        self._budget = TokenBucket(_ACCEPT_RATE, _ACCEPT_BURST)
        self._warnings = LimitedLog(log)
        self._sweeping = False
        self._closed = False

    def start(self) -> None:
        """Begin to accept."""
        for listener in self._listeners.sockets:
            self._io_threads.register(listener.fileno(), functools.partial(self._accept, listener), armed=True)

    def _accept(self, listener: socket.socket | MemoryListener) -> None:
        rearm = functools.partial(self._rearm, listener)
        began = time.thread_time()
        try:
            while True:
                if not self._budget.take():
                    self._timer.at(time.monotonic() + _ACCEPT_PAUSE, rearm)
                    return
                try:
                    sock, _ = listener.accept()
                except (BlockingIOError, ConnectionError):
                    rearm()
                    return
                self._begin(sock)
                spent = time.thread_time() - began
                if spent > _ACCEPT_SLICE:
                    self._timer.at(time.monotonic() + _PAUSE_FACTOR * spent, rearm)
                    return
        except OSError as error:
            if listener.fileno() >= 0:
                self._warnings.warning("cannot accept a connection: %s", error)
                # Most likely out of descriptors. The caller still waits, so at once would be again and again.
                self._timer.at(time.monotonic() + _PAUSE_SECONDS, rearm)

    def _rearm(self, listener: socket.socket | MemoryListener) -> None:
        if listener.fileno() >= 0:
            self._io_threads.arm(listener.fileno())

    def _begin(self, accepted: socket.socket) -> None:
        process = credentials_of(accepted)
        if process is not None and not process.is_trusted_user:
            accepted.close()
            self._warnings.warning("refused a process of another user (uid %d, process %d)", process.uid, process.pid)
            return
        if len(self._half_open) >= MAX_HALF_OPEN:
            self._make_room()
        accepted.setblocking(False)
        sock: socket.socket | TlsSocket = accepted
        binding = b""
        if self._tls is not None and accepted.family in (socket.AF_INET, socket.AF_INET6):
            sock = self._tls.wrap_accepted(accepted)
            binding = self._tls.fingerprint
        fd = sock.fileno()
        self._io_threads.register(fd, lambda: self._proceed(fd), armed=False)
        # Last: from now on another thread may make room by dropping this one.
        self._half_open[fd] = _HalfOpen(sock, ListenerHandshake(self._secret, binding), process)
        if self._closed:  # by another thread, which may not have seen this one
            self._close_half_open()
        elif not self._sweeping:
            self._sweeping = True
            self._timer.at(time.monotonic() + HANDSHAKE_SECONDS, self._sweep)
        self._proceed(fd)  # whoever dials speaks first, and has spoken by now

    def _make_room(self) -> None:
        """Drop one who has said nothing yet, or else the oldest: those of ours speak at once."""
        waiting = list(self._half_open.items())
        fd = next((fd for fd, entry in waiting if entry.handshake.silent), waiting[0][0] if waiting else None)
        if fd is not None:
            self._drop(fd, "too many connections are waiting to prove themselves")

    def _sweep(self) -> None:
        """The timer: drop those who took too long."""
        now = time.monotonic()
        for fd, entry in list(self._half_open.items()):  # the oldest first
            if entry.since + HANDSHAKE_SECONDS > now:
                self._timer.at(entry.since + HANDSHAKE_SECONDS, self._sweep)
                return
            if self._half_open.get(fd) is entry:
                self._drop(fd, f"no proof within {HANDSHAKE_SECONDS:g} s")
        self._sweeping = False

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
            self._io_threads.arm(fd)

    def _advance(self, fd: int, entry: "_HalfOpen") -> bool:
        """Read what there is; True if more has to come."""
        sock, handshake = entry.sock, entry.handshake
        try:
            if entry.encrypting and isinstance(sock, TlsSocket):
                sock.do_handshake()
                entry.encrypting = False
            while handshake.hello is None:
                data = sock.recv(handshake.needs)
                if not data:
                    self._drop(fd, "it closed the connection before it proved itself")
                    return False
                answer = handshake.feed(data)
                if answer:
                    sock.send(answer)  # fixed small size: fits the empty send buffer
            if self._half_open.get(fd) is entry:  # else another thread finished it
                self._finish(fd, entry, handshake.hello)
        except BlockingIOError:
            return True
        except (TelegradError, OSError, ValueError) as error:
            if isinstance(error, AuthenticationError) and handshake.hello is not None:
                with contextlib.suppress(OSError, ValueError):
                    sock.send(handshake.refusal(error))
            self._drop(fd, str(error))
        return False

    def _finish(self, fd: int, entry: "_HalfOpen", hello: Hello) -> None:
        sock = entry.sock
        encrypted = sock if isinstance(sock, TlsSocket) else None
        if encrypted is not None and self._tls is not None and self._tls.named:
            check_name(encrypted, hello.name)
        lane_socket = None
        if hello.shared_memory:
            if isinstance(sock, TlsSocket):
                raise ProtocolError("it promises a lane for descriptors, which TLS has none of")
            try:
                lane_socket = receive_lane(sock)
            except BlockingIOError:  # it is on its way
                sock.settimeout(1.0)
                lane_socket = receive_lane(sock)
        try:
            welcome = self._admit(hello, Caller(entry.process, encrypted))
            if hello.side:
                self._finish_beside(fd, entry, hello, welcome)
                return
            try:
                self._let_in(fd, entry, hello, welcome, lane_socket)
            except BaseException:
                self._not_admitted(hello)
                raise
        except BaseException:
            if lane_socket is not None:
                lane_socket.close()
            raise

    def _let_in(
        self, fd: int, entry: "_HalfOpen", hello: Hello, welcome: Welcome, lane_socket: socket.socket | None
    ) -> None:
        """Tell one that it is welcome, and have it served."""
        sock = entry.sock
        sock.send(entry.handshake.welcome(welcome))
        if self._half_open.get(fd) is not entry or self._half_open.pop(fd, None) is None:
            raise ConnectionAbortedError("it was dropped while it was let in")
        self._io_threads.forget(fd)
        kind = UNIX if sock.family == socket.AF_UNIX else TCP
        stream = stream_over(sock, kind, lane_over(lane_socket, welcome.shared_memory))
        connection = Connection(stream, max_frame=self._options.max_message_bytes)
        connection.peer, connection.peer_takes = f"worker {hello.name!r}", hello.takes_bytes
        connection.number = hello.connection
        self._admitted(hello, welcome, connection)

    def _finish_beside(self, fd: int, entry: "_HalfOpen", hello: Hello, welcome: Welcome) -> None:
        """One that belongs beside another: from then on that one may use it, and end it."""
        if self._half_open.pop(fd, None) is None:
            return
        self._io_threads.forget(fd)
        sock = entry.sock
        try:
            if hello.seal:
                self._beside(hello, sealed_over(sock, welcome.seal, hello.seal, hello.name))
            else:
                self._beside(hello, stream_over(sock, TCP, None))
            sock.send(entry.handshake.welcome(welcome))
        except (TelegradError, OSError) as error:
            if isinstance(error, TelegradError):
                with contextlib.suppress(OSError):
                    sock.send(entry.handshake.refusal(error))
            sock.close()
            self._warnings.warning("refused a connection: %s", error)

    def _drop(self, fd: int, why: str) -> None:
        entry = self._half_open.pop(fd, None)
        if entry is None:
            return
        self._warnings.warning("refused a connection: %s", why)
        self._io_threads.forget(fd)
        entry.sock.close()

    def close(self) -> None:
        """Stop accepting."""
        self._closed = True
        for listener in self._listeners.sockets:
            self._io_threads.forget(listener.fileno())
        self._listeners.close()
        self._close_half_open()

    def _close_half_open(self) -> None:
        for fd in list(self._half_open):
            entry = self._half_open.pop(fd, None)
            if entry is not None:
                self._io_threads.forget(fd)
                entry.sock.close()
