"""Bytes over TLS: OpenSSL works in memory, and the socket is read and written as a plain one is.

`ssl.SSLSocket` makes two system calls for each record it reads and one for each it writes, of 16 KB at most. Here a
large message is encrypted many records at a time and written in large pieces, and what the socket has is read in large
pieces before it is decrypted (`docs/decisions/0013-tls-in-memory.md` has the figures).

OpenSSL allows one thread at a time in a connection, its two buffers included: each step is taken under `_step`. What is
written may wait for the peer, and does so outside of it.
"""

import select
import socket
import ssl
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from telegrad.transport.stream import Buffers, SocketStream

_RECORD = 16 * 1024  # bytes in one TLS record
_READ_AT_ONCE, _READ_LARGE = 64 * 1024, 256 * 1024
_WRITE_AT_ONCE = 256 * 1024
_MOST_AT_ONCE = 4 * 2**20  # decrypted before what came is looked at
_HURRY = 0.05


class TlsSocket:
    """A TCP socket with TLS on it, for the handshakes: what comes after them goes through a `TlsStream`."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        self.sock = sock
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side)

    @property
    def family(self) -> int:
        """That of the socket below."""
        return self.sock.family

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self.sock.fileno()

    def do_handshake(self) -> None:
        """Agree on keys. BlockingIOError if the socket does not wait and the peer has yet to answer: call it again."""
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                self._write_out()
                if not self._read_in():
                    raise ConnectionResetError("the peer closed the connection during the handshake of TLS") from None
            except ssl.SSLError:
                self._write_out()  # tells the peer why
                raise
            else:
                self._write_out()
                return

    def recv(self, most: int) -> bytes:
        """Bytes that came, at least one; none at the end of the stream."""
        while True:
            try:
                return self.tls.read(most)
            except ssl.SSLWantReadError:
                if not self._read_in():
                    return b""
            except ssl.SSLZeroReturnError:
                return b""

    def sendall(self, data: bytes) -> None:
        """Write a few bytes."""
        self.tls.write(data)
        self._write_out()

    send = sendall  # what is said in a handshake fits the empty buffer of the socket

    def _read_in(self) -> int:
        data = self.sock.recv(_READ_AT_ONCE)
        return self.incoming.write(data)

    def _write_out(self) -> None:
        if self.outgoing.pending:
            self.sock.sendall(self.outgoing.read())

    def close(self) -> None:
        """End the connection at once."""
        self.sock.close()


class TlsStream(SocketStream):
    """A stream over TLS, once both ends have proved themselves."""

    def __init__(self, over: TlsSocket, kind: str) -> None:
        super().__init__(over.sock, kind)
        self._incoming, self._outgoing = over.incoming, over.outgoing
        self._tls = over.tls
        self._step = threading.Lock()
        # What `SSLObject` is a shell around, by a name that is not public, where it is there: a method that only calls
        # another costs half a microsecond between two system calls, and a small call would pass four.
        self._within: Any = getattr(over.tls, "_sslobj", over.tls)
        self._encrypt, self._encrypted = self._within.write, over.outgoing.read
        self._read_raw = self.receive_into
        self._raw = memoryview(bytearray(_READ_AT_ONCE))
        self.receive_into = self._receiver(self._raw)
        self.pending = over.incoming.pending + over.tls.pending()

    def readable(self, seconds: float) -> bool:
        """Wait until there is something to read, at most `seconds`."""
        return self.pending > 0 or bool(self._poll(seconds * 1000))

    def _receiver(self, raw: memoryview) -> Callable[[memoryview], int]:
        """Reads the common case by itself, with as little as that takes: a small message is one record, which comes
        whole."""
        receive, write, incoming, size = self._socket.recv_into, self._incoming.write, self._incoming, len(raw)
        read: Callable[..., Any] = self._within.read
        acquire, release = self._step.acquire, self._step.release

        def receive_into(view: memoryview) -> int:
            if self.pending or not len(view):
                return self._receive_rest(view, 0)
            try:
                came = receive(raw)
            except BlockingIOError:
                return -1
            if not came:
                return 0
            acquire()
            try:
                write(raw[:came])
                count: int = read(_RECORD, view)
            except ssl.SSLWantReadError:  # a part of a record
                count = -1
            except ssl.SSLZeroReturnError:
                return 0
            finally:
                release()
            if count < 0:
                return -1 if came < size else self._receive_rest(view, 0)
            left = incoming.pending
            if left or count == len(view):
                self.pending = left + self._tls.pending()
                return self._receive_rest(view, count) if left and count < len(view) else count
            return count if came < size else self._receive_rest(view, count)

        return receive_into

    def _receive_rest(self, view: memoryview, count: int) -> int:
        """The same of what is more than one record, or less, after the first `count` bytes."""
        limit = min(len(view), _MOST_AT_ONCE)
        if not limit:
            return 0
        raw = self._raw
        if limit > len(raw) < _READ_LARGE:
            self._raw = raw = memoryview(bytearray(_READ_LARGE))
        incoming = self._incoming
        read: Callable[..., Any] = self._tls.read  # into a buffer it returns a count, of which its type says nothing
        try:
            while True:
                came = 0
                if not self.pending:
                    came = self._read_raw(raw)
                    if came <= 0:
                        return count or came
                try:
                    with self._step:
                        if came:
                            incoming.write(raw[:came])
                        left = 1
                        while left:
                            count += read(_RECORD, view[count : count + _RECORD])
                            left = incoming.pending
                            if count >= limit:
                                self.pending = left + self._tls.pending()
                                return count
                except ssl.SSLWantReadError:  # the rest is a part of a record
                    pass
                self.pending = 0
                if came < len(raw):  # the socket has no more
                    return count or -1
        except ssl.SSLZeroReturnError:
            self.pending = 1 if count else 0
        except ssl.SSLError:
            if not count:
                raise
            self.pending = 1  # what came before an error is good; read again, it comes again
        return count

    def send(self, buffers: Buffers, deadline: float | None, blocked: Callable[[], None]) -> None:
        """Write all of `buffers`; calls `blocked` if that has to wait. TimeoutError at the deadline, after which the
        stream is `broken` if a part had been encrypted: nothing else can follow that."""
        if deadline is not None and deadline - monotonic() < _HURRY:
            self._check_room()
        if self.unsent:
            self._send_unsent(deadline, blocked)
        if len(buffers) == 1 and len(buffers[0]) <= _RECORD:
            with self._step:
                self._encrypt(buffers[0])
                encrypted = self._encrypted()
            try:
                sent = self._socket.send(encrypted)
            except BlockingIOError:
                sent = 0
            if sent != len(encrypted):
                self._send_encrypted(memoryview(encrypted)[sent:], deadline, blocked)
            return
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            at, end = 0, len(view)
            while at < end:
                with self._step:
                    at += self._tls.write(view[at : at + _WRITE_AT_ONCE])
                    encrypted = self._outgoing.read() if self._outgoing.pending >= _WRITE_AT_ONCE else b""
                if encrypted:
                    self._send_encrypted(encrypted, deadline, blocked)
        with self._step:
            encrypted = self._outgoing.read()
        if encrypted:
            self._send_encrypted(encrypted, deadline, blocked)

    def begin(self, data: bytes) -> bool:
        """Write what there is room for, without waiting; the rest is kept, encrypted."""
        if data:
            view, at = memoryview(data), 0
            with self._step:
                while at < len(data):
                    at += self._encrypt(view[at:])
                data = self._encrypted()
        return super().begin(data)

    def _send_encrypted(self, encrypted: Any, deadline: float | None, blocked: Callable[[], None]) -> None:
        try:
            super().send((encrypted,), deadline, blocked)
        except TimeoutError:
            if not self.broken:
                self._break()
            raise

    def _check_room(self) -> None:
        """What has no time to wait must find room before it begins: what is encrypted has to be sent."""
        writable = select.poll()
        writable.register(self._fileno, select.POLLOUT)
        if not writable.poll(0):
            raise TimeoutError("the peer does not read what is sent to it")
