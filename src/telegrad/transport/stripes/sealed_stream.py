"""A side stream whose parts are sealed (`seal.py`): encrypted a piece at a time, by the thread that writes or reads it.

What is read goes to a buffer and from there, decrypted, straight into the memory of the tensor. One thread at a time
writes and one reads, as at any side stream; a buffer belongs to the piece that is on its way.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from telegrad.cuda import host
from telegrad.errors import ProtocolError
from telegrad.transport.stream import Buffers, SocketStream
from telegrad.transport.stripes.seal import PIECE, TAG_BYTES, Opener, Sealer
from telegrad.transport.tls_stream import TlsSocket

_MOST_KEPT = 16
_kept: list[memoryview] = []  # buffers that are not in use; `append` and `pop` are one step each


class SealedStream(SocketStream):
    """One that was opened for large tensors alone, once both ends have said their secrets over TLS.

    `secret` is what this end said, `peers_secret` what the other one did."""

    def __init__(self, over: TlsSocket, kind: str, secret: bytes, peers_secret: bytes, peer: str) -> None:
        if over.incoming.pending or over.tls.pending() or over.outgoing.pending:
            raise ProtocolError(f"{peer} has said more over TLS than belongs to the handshake of a sealed connection")
        super().__init__(over.sock, kind)
        self._sealer = Sealer(secret)
        self._opener = Opener(peers_secret, peer)
        self._peer = peer
        self._read_raw = self.receive_into
        self.receive_into = self._receive_into
        self._coming: memoryview | None = None  # the buffer of a piece that has begun to come
        self._came = 0  # bytes of it

    def send(self, buffers: Buffers, deadline: float | None, blocked: Callable[[], None]) -> None:
        """Write a part, all of it. TimeoutError at the deadline, after which nothing can follow."""
        if self.broken:
            raise BrokenPipeError(f"the connection to {self._peer} has ended in the middle of a message")
        left = sum(map(len, buffers))
        sealed = _take_buffer()
        try:
            for piece in pieces(_in_host_memory(buffers), left):
                size = len(piece) + TAG_BYTES
                self._sealer.seal(piece, left, sealed[:size])
                left -= len(piece)
                super().send((sealed[:size],), deadline, blocked)
        except BaseException:
            self._break()
            raise
        finally:
            _give_back(sealed)

    def wait_for(self, nbytes: int) -> None:
        """The same for what it takes as a sealed piece, less what has come of that."""
        super().wait_for(max(1, min(nbytes, PIECE) + TAG_BYTES - self._came))

    def _receive_into(self, view: memoryview) -> int:
        """`view` is for what is left of a part: bytes that have come and opened, at the beginning of it."""
        if not len(view):
            return 0
        length = min(len(view), PIECE)
        size = length + TAG_BYTES
        coming = self._coming
        if coming is None:
            coming = self._coming = _take_buffer()
        count = self._read_raw(coming[self._came : size])
        if count == 0:
            raise ConnectionResetError(f"{self._peer} ended, or somebody cut, a connection in the middle of a message")
        if count < 0:
            return -1
        self._came += count
        if self._came < size:
            return -1
        self._opener.open(coming[:size], len(view), view[:length])
        self._coming, self._came = None, 0
        _give_back(coming)
        return length


def _in_host_memory(buffers: Buffers) -> Iterator[Any]:
    for buffer in buffers:
        if type(buffer) is host.DeviceBytes:
            yield from buffer.chunks()  # each is valid until the next
        else:
            yield buffer


def pieces(buffers: Iterable[Any], total: int) -> Iterator[memoryview]:
    """`buffers`, of `total` bytes, as pieces: all of one size but the last. Each is valid until the next.

    Where a piece lies within one buffer it is a part of that; else it is put together."""
    together: memoryview | None = None
    have = 0
    size = min(PIECE, total)
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        while len(view):
            if not have and len(view) >= size:
                piece, view = view[:size], view[size:]
            else:
                if together is None:
                    together = memoryview(bytearray(size))
                fits = min(size - have, len(view))
                together[have : have + fits] = view[:fits]
                view, have = view[fits:], have + fits
                if have < size:
                    continue
                piece, have = together[:size], 0
            yield piece
            total -= size
            size = min(PIECE, total)


def _take_buffer() -> memoryview:
    try:
        return _kept.pop()
    except IndexError:
        return memoryview(bytearray(PIECE + TAG_BYTES))


def _give_back(buffer: memoryview) -> None:
    if len(_kept) < _MOST_KEPT:
        _kept.append(buffer)
