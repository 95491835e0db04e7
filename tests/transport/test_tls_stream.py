"""Bytes over TLS: they arrive as they left, in pieces of any size, both ways at once; changed ones do not arrive."""

import contextlib
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator

import pytest

from telegrad.transport import tls
from telegrad.transport.tls_stream import TlsSocket, TlsStream
from tests.waiting import wait_until

pytest.importorskip("cryptography")


def _nothing() -> None:
    pass


def _connect(one: socket.socket, other: socket.socket, ends: tls.TlsEnds) -> tuple[TlsStream, TlsStream]:
    dialled, accepted = TlsSocket(one, ends.client, server_side=False), ends.wrap_accepted(other)
    thread = threading.Thread(target=accepted.do_handshake)
    thread.start()
    dialled.do_handshake()
    thread.join(60)
    return TlsStream(dialled, "tcp"), TlsStream(accepted, "tcp")


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, other:
        yield one, other


def _receive(stream: TlsStream, total: int, source: random.Random, largest: int) -> bytes:
    got = bytearray()
    until = time.monotonic() + 90
    while len(got) < total:
        assert time.monotonic() < until
        view = memoryview(bytearray(min(source.randint(1, largest), total - len(got))))
        count = stream.receive_into(view)
        if count < 0:
            stream.readable(1.0)
        else:
            assert count, "the stream ended"
            got += view[:count]
    assert not stream.pending and stream.receive_into(memoryview(bytearray(1))) == -1
    return bytes(got)


@pytest.mark.parametrize("largest", [200, 20_000, 5_000_000])
def test_both_ways_at_once(sockets: tuple[socket.socket, socket.socket], ends: tls.TlsEnds, largest: int) -> None:
    streams = _connect(*sockets, ends)
    source = random.Random(largest)
    sent = [
        [source.randbytes(source.randint(0, largest)) for _ in range(max(4, min(300, 2_000_000 // largest)))]
        for _ in streams
    ]
    got = [b"", b""]

    def write(side: int) -> None:
        for start in range(0, len(sent[side]), 3):
            streams[side].send(sent[side][start : start + 3], time.monotonic() + 90, _nothing)

    def read(side: int) -> None:
        total = sum(map(len, sent[1 - side]))
        got[side] = _receive(streams[side], total, random.Random(side), 2 * largest)

    threads = [threading.Thread(target=work, args=(side,)) for work in (write, read) for side in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert got == [b"".join(sent[1]), b"".join(sent[0])]


def test_what_was_changed_on_its_way_is_not_taken(
    sockets: tuple[socket.socket, socket.socket], ends: tls.TlsEnds
) -> None:
    one, other = _connect(*sockets, ends)
    one.send([b"good"], None, _nothing)
    with one._step:
        one._tls.write(b"transfer 10")
        raw = bytearray(one._outgoing.read())
    raw[-20] ^= 1
    sockets[0].sendall(raw)
    view = memoryview(bytearray(100))
    other.readable(60.0)
    assert other.receive_into(view) == 4 and bytes(view[:4]) == b"good"
    other.readable(60.0)
    with pytest.raises(ssl.SSLError):
        other.receive_into(view)


def test_the_end(sockets: tuple[socket.socket, socket.socket], ends: tls.TlsEnds) -> None:
    one, other = _connect(*sockets, ends)
    one.send([b"last"], None, _nothing)
    one.close()
    view = memoryview(bytearray(100))
    other.readable(60.0)
    assert other.receive_into(view) == 4
    other.readable(60.0)
    assert other.receive_into(view) == 0


def test_a_peer_that_takes_nothing_in(sockets: tuple[socket.socket, socket.socket], ends: tls.TlsEnds) -> None:
    one, _ = _connect(*sockets, ends)
    blocked = threading.Event()
    with pytest.raises(TimeoutError):
        one.send([bytes(64 << 20)], time.monotonic() + 0.2, blocked.set)
    assert one.broken and blocked.is_set()


def test_what_finds_no_room_goes_on_where_it_was(
    sockets: tuple[socket.socket, socket.socket], ends: tls.TlsEnds
) -> None:
    one, other = _connect(*sockets, ends)
    source = random.Random(0)
    sent = b""
    while not one.unsent:
        sent += (piece := source.randbytes(100_000))
        one.begin(piece)
    got = threading.Thread(target=lambda: found.append(_receive(other, len(sent) + 4, source, 50_000)))
    found: list[bytes] = []
    got.start()
    one.send([b"last"], time.monotonic() + 60, _nothing)
    got.join(60)
    assert found == [sent + b"last"]


def test_what_has_no_time_is_not_begun(sockets: tuple[socket.socket, socket.socket], ends: tls.TlsEnds) -> None:
    one, _ = _connect(*sockets, ends)

    def finds_no_room() -> bool:
        with contextlib.suppress(BlockingIOError):
            while True:
                sockets[0].send(bytes(1 << 20))  # no TLS, but nobody reads it
        try:
            one.send([b"ping"], time.monotonic(), _nothing)
        except TimeoutError:
            return True
        return False  # the kernel has moved some of it on meanwhile

    wait_until(finds_no_room)
    assert not one.broken
