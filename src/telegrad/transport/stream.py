"""A stream carries bytes between two workers over one non-blocking socket, and descriptors beside it where it can.

Unix sockets, TCP and the pairs of `memory.py` are all sockets to the code above; they differ in how they are made, and
in whether they have a lane for passing the descriptors of shared memory.
"""

import array
import contextlib
import errno
import fcntl
import os
import select
import socket
import stat
import struct
import termios
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from telegrad.errors import ProtocolError

Buffers = Sequence[Any]  # bytes-like objects
_LANE = struct.Struct("<QQ")  # block number, size
_TCP_INFO = struct.Struct("<56xI")  # of the kernel's record, up to the milliseconds since the last acknowledgement
_COUNT = struct.Struct("@i")
_CREDENTIALS = struct.Struct("@3i")  # process, user, group
_IOV_MAX = 512
_SOCKET_BUFFER = 4 * 2**20


class Stream(Protocol):
    """What the layers above need of a stream."""

    kind: str
    lane: "Lane | None"
    broken: bool  # a write was given up halfway: nothing can follow it, and the peer sees the end
    pending: int  # bytes that were read from the socket and not given out, which polling does not show
    held: threading.Event | None  # while it is held (`hold_until`): set once that for which it is has come
    unsent: bytes  # the end of what `begin` was given and found no room
    last_written: float  # when the peer last made room for more, after it had made a writer wait
    peer_pid: int  # the process at the other end, where the kernel tells; else 0

    def fileno(self) -> int:
        """The descriptor to wait on."""

    def receive_into(self, view: memoryview) -> int:
        """Bytes read; 0 at the end of the stream, -1 if none are there yet."""

    def send(self, buffers: Buffers, deadline: float | None, blocked: Callable[[], None]) -> None:
        """Write all of `buffers`; calls `blocked` once if that has to wait."""

    def begin(self, data: bytes) -> bool:
        """Write what there is room for, without waiting. The rest is kept, and goes before anything else that is sent.
        Whether there is none."""

    def readable(self, seconds: float) -> bool:
        """Wait until there is something to read, at most `seconds`."""

    def peer_host_answers(self, seconds: float) -> bool:
        """Whether the peer's kernel confirmed something within `seconds`, whatever its process does."""

    @property
    def delivered(self) -> bool:
        """Whether all that was written has reached the peer's host, so that closing this end loses none of it."""

    def hold_until(self, come: threading.Event, ready: Callable[[float], bool]) -> None:
        """Let `readable` be `ready` until `go_on`: what the socket has is not to be read before something has come."""

    def go_on(self) -> None:
        """What the socket has may be read again."""

    def abort(self) -> None:
        """Nothing more can be sent or read: whoever waits at either end learns so."""

    def close(self) -> None:
        """End the stream at once."""


class SocketStream:
    """A stream over one socket."""

    pending = 0  # the kernel keeps what was not read
    held: threading.Event | None = None
    unsent = b""

    def __init__(self, sock: socket.socket, kind: str, lane: "Lane | None" = None) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            # The buffers of TCP are the kernel's to size: it measures the way to the peer, which a fixed size ends.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        self.kind = kind
        self.lane = lane
        self.broken = False
        self.last_written = 0.0
        self.peer_pid = _peer_pid(sock)
        self._socket = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self.receive_into = _receiver(sock)
        self._poll = self._readable.poll
        self._fileno = sock.fileno()
        self._least = 1  # bytes that make it readable

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._fileno

    def readable(self, seconds: float) -> bool:
        """Wait until there is something to read, at most `seconds`."""
        return bool(self._poll(seconds * 1000))

    def send(self, buffers: Buffers, deadline: float | None, blocked: Callable[[], None]) -> None:
        """Write all of `buffers`; calls `blocked` once if that has to wait. TimeoutError at the deadline, after which
        the stream is `broken` if a part had been written."""
        if self.unsent:
            self._send_unsent(deadline, blocked)
        sent = 0
        try:
            if len(buffers) == 1:
                sent = self._socket.send(buffers[0])
                if sent == len(buffers[0]):
                    return
            else:
                sent = self._socket.sendmsg(buffers[:_IOV_MAX])
        except BlockingIOError:
            pass
        remaining = [memoryview(b).cast("B") for b in buffers]
        self._drop(remaining, sent)
        if remaining:
            self._send_slowly(remaining, deadline, blocked, begun=sent > 0)

    def _send_slowly(
        self, remaining: list[memoryview], deadline: float | None, blocked: Callable[[], None], begun: bool
    ) -> None:
        announced = False
        while remaining:
            try:
                self._drop(remaining, self._socket.sendmsg(remaining[:_IOV_MAX]))
                begun = True
                self.last_written = time.monotonic()
            except BlockingIOError:
                if not announced:
                    announced = True
                    blocked()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    if begun:
                        self._break()
                    raise TimeoutError("the peer does not read what is sent to it") from None
                writable = select.poll()
                writable.register(self._socket, select.POLLOUT)
                writable.poll(None if left is None else left * 1000 + 1)

    def begin(self, data: bytes) -> bool:
        """Write what there is room for, without waiting. The rest is kept, and goes before anything else that is sent.
        Whether there is none."""
        if self.unsent:
            return self._go_on(data)
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent == len(data):
            return True
        self.unsent = data[sent:]
        return False

    def _go_on(self, data: bytes) -> bool:
        waited, self.unsent = self.unsent, b""
        size = len(waited) + len(data)
        done = self.begin(waited + data)
        if len(self.unsent) < size:
            self.last_written = time.monotonic()
        return done

    def _send_unsent(self, deadline: float | None, blocked: Callable[[], None]) -> None:
        self._send_slowly([memoryview(self.unsent)], deadline, blocked, begun=False)
        self.unsent = b""

    def wait_for(self, nbytes: int) -> None:
        """Let it be readable only when that much is there, as far as the kernel has room for it, or the end."""
        if nbytes != self._least:
            with contextlib.suppress(OSError):  # a kernel that does not know that: it is readable more often
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._least = nbytes

    def keep_alive(self) -> None:
        """For one that may be idle for long: the kernel sees to it that no router forgets it, or finds that one has."""
        with contextlib.suppress(OSError, AttributeError):  # not TCP, or another system
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
                self._socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def hold_until(self, come: threading.Event, ready: Callable[[float], bool]) -> None:
        """Let `readable` be `ready` until `go_on`: what the socket has is not to be read before something has come."""
        self.held = come
        self.readable = ready  # type: ignore[method-assign,assignment] # so that it costs nothing where it is not used

    def go_on(self) -> None:
        """What the socket has may be read again."""
        self.held = None
        self.__dict__.pop("readable", None)

    def abort(self) -> None:
        """Nothing more can be sent or read: whoever waits at either end learns so."""
        self._break()

    def _break(self) -> None:
        """A part of a message was written and the rest will not be: nothing can follow it."""
        self.broken = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _drop(remaining: list[memoryview], sent: int) -> None:
        done = 0
        for view in remaining:
            if sent < len(view):
                break
            sent -= len(view)
            done += 1
        del remaining[:done]
        if sent:
            remaining[0] = remaining[0][sent:]

    def peer_host_answers(self, seconds: float) -> bool:
        """Whether the peer's kernel confirmed something within `seconds`, whatever its process does."""
        if self._socket.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except (AttributeError, OSError):  # not Linux, or closed
            return False
        (milliseconds_since_ack,) = _TCP_INFO.unpack(info)
        return bool(milliseconds_since_ack < seconds * 1000)

    @property
    def delivered(self) -> bool:
        """Whether all that was written has reached the peer's host, so that closing this end loses none of it."""
        if self._socket.family not in (socket.AF_INET, socket.AF_INET6):
            return True  # it is in the peer's queue already
        # A TCP socket that is closed with something unread resets the connection, and what is on its way is dropped.
        raw = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(_COUNT.size))
        return bool(_COUNT.unpack(raw)[0] == 0)

    def close(self) -> None:
        """End the stream at once. Both directions are shut first, so that threads waiting on it wake up."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self.lane is not None:
            self.lane.close()


def _peer_pid(sock: socket.socket) -> int:
    if sock.family != socket.AF_UNIX:
        return 0
    try:
        pid: int = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    except (AttributeError, OSError):  # not Linux
        return 0
    return pid


def is_running(pid: int) -> bool:
    """Whether a process of this host runs; of 0, which stands for one that is not known, nothing is assumed but the
    worst."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def _receiver(sock: socket.socket) -> Callable[[memoryview], int]:
    receive = sock.recv_into

    def receive_into(view: memoryview) -> int:
        try:
            return receive(view)
        except BlockingIOError:
            return -1

    return receive_into


class Lane:
    """A Unix socket beside a stream that carries the descriptors of shared-memory blocks, in the order of first use."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.settimeout(5.0)

    def announce(self, number: int, size: int, fd: int) -> None:
        """Pass one block to the peer. Sent before the first frame that uses the block."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
        self._socket.sendmsg([_LANE.pack(number, size)], [rights])

    def next(self) -> tuple[int, int, int]:
        """Number, size and descriptor of the next block the peer announced."""
        try:
            data, fds = _receive_descriptors(self._socket, _LANE.size)
        except TimeoutError as error:
            raise ProtocolError("the peer used a block of shared memory that it has not announced") from error
        if len(data) != _LANE.size or len(fds) != 1:
            _close_all(fds)
            raise ProtocolError("the peer announced a block of shared memory without its descriptor")
        number, size = _LANE.unpack(data)
        return number, size, fds[0]

    def close(self) -> None:
        """End the lane at once."""
        self._socket.close()


def make_lane_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a lane; message boundaries are kept, so a descriptor stays with its block."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def pass_lane(sock: socket.socket, lane: socket.socket) -> None:
    """Hand one end of a lane to the peer over the connection itself."""
    sock.sendmsg([b"L"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [lane.fileno()]))])


def receive_lane(sock: socket.socket) -> socket.socket:
    """Take the end that the peer passed."""
    data, fds = _receive_descriptors(sock, 1)
    try:
        if data != b"L" or len(fds) != 1 or not stat.S_ISSOCK(os.fstat(fds[0]).st_mode):
            raise ProtocolError("the peer did not pass the lane it had promised")
        lane = socket.socket(fileno=fds[0])
    except BaseException:
        _close_all(fds)
        raise
    if lane.family != socket.AF_UNIX or lane.type != socket.SOCK_SEQPACKET:
        lane.close()
        raise ProtocolError("the peer passed a socket that cannot be a lane")
    return lane


def _receive_descriptors(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """The next message and all descriptors that came with it: whoever does not want them closes them."""
    data, ancillary, _, _ = sock.recvmsg(size, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += array.array("i", raw[: len(raw) // 4 * 4])
    return data, fds


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


class Receives(Protocol):
    """A socket, plain or with TLS on it."""

    def recv(self, most: int, /) -> bytes:
        """Bytes that came; none at the end of the stream."""


def receive_exactly(sock: Receives, count: int) -> bytes:
    """`count` bytes from a socket with a timeout, or ConnectionError."""
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection during the handshake")
        data += piece
    return bytes(data)
