"""Sealed pieces: they open in their place, once, as they were sealed, and in no other way."""

import functools
import hmac
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import ProtocolError, SealBroken
from telegrad.rpc.peers.dial import sealed_over
from telegrad.transport import tls
from telegrad.transport.stripes import seal, sealed_stream
from telegrad.transport.stripes.seal import TAG_BYTES, Opener, Sealer, can_seal, fresh_secret
from telegrad.transport.stripes.sealed_stream import SealedStream, pieces
from telegrad.transport.tls_stream import TlsSocket

aead = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")

SECRET = bytes(range(32))


def seal_all(sealer: Sealer, part: list[bytes]) -> list[bytearray]:
    """The pieces of one part, sealed."""
    left, sealed = sum(map(len, part)), []
    for piece in part:
        into = bytearray(len(piece) + TAG_BYTES)
        sealer.seal(memoryview(piece), left, memoryview(into))
        left -= len(piece)
        sealed.append(into)
    return sealed


def open_all(opener: Opener, sealed: list[bytearray]) -> bytes:
    """The part that these pieces are, as one who expects its size opens it."""
    left, opened = sum(map(len, sealed)) - TAG_BYTES * len(sealed), b""
    for piece in sealed:
        into = bytearray(len(piece) - TAG_BYTES)
        opener.open(memoryview(piece), left, memoryview(into))
        left -= len(into)
        opened += into
    return opened


PARTS = st.lists(st.lists(st.binary(min_size=1, max_size=100), min_size=1, max_size=5), min_size=1, max_size=5)


@given(PARTS)
def test_what_is_sealed_opens(parts: list[list[bytes]]) -> None:
    sealer, opener = Sealer(SECRET), Opener(SECRET, "worker 'a'")
    for part in parts:
        sealed = seal_all(sealer, part)
        assert all(
            bytes(piece[:-TAG_BYTES]) != plain for piece, plain in zip(sealed, part, strict=True) if len(plain) > 8
        )
        assert open_all(opener, sealed) == b"".join(part)


def test_the_format_is_what_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formulas of the module's text once more, with nothing of its code."""
    monkeypatch.setattr(seal, "PIECES_PER_KEY", 3)
    part = [bytes([i]) * 50 for i in range(8)]
    expected, secret = [], SECRET
    for number, piece in enumerate(part):
        if number in (3, 6):
            secret = hmac.digest(secret, b"telegrad seal: next", "sha256")
        key = hmac.digest(secret, b"telegrad seal: key", "sha256")
        nonce = bytes(4) + number.to_bytes(8, "little")
        left = struct.pack("<Q", 50 * (8 - number))
        expected.append(aead.AESGCM(key).encrypt(nonce, piece, left))
    assert [bytes(piece) for piece in seal_all(Sealer(SECRET), part)] == expected


def test_no_key_has_a_nonce_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "PIECES_PER_KEY", 4)
    sealer = Sealer(SECRET)
    keys, nonces = zip(*(sealer._next() for _ in range(41)), strict=True)
    assert len(set(nonces)) == 41
    assert [keys.count(key) for key in dict.fromkeys(keys)] == [4] * 10 + [1]


def test_a_key_is_far_from_its_limit() -> None:
    assert seal.PIECE * seal.PIECES_PER_KEY <= 2**36  # 2**32 blocks of AES


# --- what does not open ---


def _flip(sealed: list[bytearray], source: random.Random) -> None:
    piece = source.choice(sealed)
    piece[source.randrange(len(piece))] ^= 1 << source.randrange(8)


def _exchange(sealed: list[bytearray], source: random.Random) -> None:
    one, other = source.sample(range(len(sealed)), 2)
    sealed[one], sealed[other] = sealed[other], sealed[one]


def _repeat(sealed: list[bytearray], source: random.Random) -> None:
    sealed.insert(source.randrange(1, len(sealed)), sealed[0])


def _leave_out(sealed: list[bytearray], source: random.Random) -> None:
    del sealed[source.randrange(len(sealed))]


def _truncate(sealed: list[bytearray], source: random.Random) -> None:
    piece = source.choice(sealed)
    del piece[-source.randint(1, len(piece) - TAG_BYTES - 1) :]


def _from_another_connection(sealed: list[bytearray], source: random.Random) -> None:
    sealed[:] = seal_all(Sealer(fresh_secret()), [bytes(40)] * len(sealed))


@pytest.mark.parametrize("change", [_flip, _exchange, _repeat, _leave_out, _truncate, _from_another_connection])
@given(st.randoms(use_true_random=False), st.integers(2, 5))
def test_what_was_changed_does_not_open(
    change: Callable[[list[bytearray], random.Random], None], source: random.Random, count: int
) -> None:
    sealer, opener = Sealer(SECRET), Opener(SECRET, "worker 'a'")
    sealed = seal_all(sealer, [source.randbytes(40) for _ in range(count)])
    change(sealed, source)
    with pytest.raises(SealBroken, match="worker 'a'"):
        open_all(opener, sealed)
    with pytest.raises(SealBroken):  # and nothing opens after that, though it be good
        open_all(opener, seal_all(sealer, [b"good"]))


def test_each_bit_counts() -> None:
    (whole,) = seal_all(Sealer(SECRET), [b"a few bytes"])
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SealBroken):
            open_all(Opener(SECRET, "worker 'a'"), [changed])


def test_a_piece_belongs_to_a_part_of_its_size() -> None:
    """One who would have the receiver take the end of a part for the middle of another."""
    (whole,) = seal_all(Sealer(SECRET), [bytes(10)])
    with pytest.raises(SealBroken):
        Opener(SECRET, "worker 'a'").open(memoryview(whole), 11, memoryview(bytearray(10)))


@pytest.mark.parametrize("secret", [b"", bytes(31), bytes(33)])
def test_a_secret_has_one_size(secret: bytes) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Sealer(secret)


@pytest.mark.parametrize(("version", "able"), [("42.0.8", False), ("49.0.0", False), ("50.0.0", True), ("51.1", True)])
def test_a_package_that_would_keep_the_gil_is_not_used(
    version: str, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cryptography.__version__", version)
    assert can_seal.__wrapped__() is able


# --- pieces of buffers ---


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(1, 120))
def test_pieces_are_of_one_size_but_the_last(sizes: list[int], most: int) -> None:
    buffers = [random.Random(i).randbytes(size) for i, size in enumerate(sizes)]
    whole = b"".join(buffers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealed_stream, "PIECE", most)
        got = [bytes(piece) for piece in pieces(iter(buffers), len(whole))]
    assert got == [whole[at : at + most] for at in range(0, len(whole), most)]


# --- over a socket ---


@pytest.fixture
def sockets(ends: tls.TlsEnds) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """After the handshake of TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, other:
        dialled, accepted = TlsSocket(one, ends.client, server_side=False), ends.wrap_accepted(other)
        thread = threading.Thread(target=accepted.do_handshake)
        thread.start()
        dialled.do_handshake()
        thread.join(100)
        yield dialled, accepted


@pytest.fixture
def streams(sockets: tuple[TlsSocket, TlsSocket]) -> tuple[SealedStream, SealedStream]:
    one, other = fresh_secret(), fresh_secret()
    return sealed_over(sockets[0], one, other, "b"), sealed_over(sockets[1], other, one, "a")


def _nothing() -> None:
    pass


def read(stream: SealedStream, total: int) -> bytes:
    """One part of so many bytes."""
    view, at, until = memoryview(bytearray(total)), 0, time.monotonic() + 90
    while at < total:
        assert time.monotonic() < until
        if stream.readable(0.1):
            at += max(0, stream.receive_into(view[at:]))
    return bytes(view)


def test_parts_both_ways(streams: tuple[SealedStream, SealedStream]) -> None:
    source = random.Random(3)
    parts = [[source.randbytes(size) for size in sizes] for sizes in ([10], [seal.PIECE], [3, 2 * seal.PIECE, 70_001])]
    for sender, receiver in (streams, streams[::-1]):
        send = [functools.partial(sender.send, part, time.monotonic() + 90, _nothing) for part in parts]
        thread = threading.Thread(target=lambda send=send: [act() for act in send])
        thread.start()
        for part in parts:
            assert read(receiver, sum(map(len, part))) == b"".join(part)
        thread.join(100)


def test_a_stream_that_ends_in_a_part_names_the_peer(streams: tuple[SealedStream, SealedStream]) -> None:
    streams[0].send([bytes(1000)], None, _nothing)
    streams[0].abort()
    with pytest.raises(ConnectionResetError, match="worker 'a'"):
        read(streams[1], 1001)


def test_what_is_reflected_does_not_open(streams: tuple[SealedStream, SealedStream]) -> None:
    streams[0].send([bytes(1000)], None, _nothing)
    assert streams[1].readable(60.0)
    raw = streams[1]._socket.recv(5000)
    streams[1]._socket.send(raw)
    with pytest.raises(SealBroken, match="worker 'b'"):
        read(streams[0], 1000)


def test_two_directions_have_two_secrets(sockets: tuple[TlsSocket, TlsSocket]) -> None:
    """A peer that repeats what it was told: under one key, what each end sends would open at that end."""
    with pytest.raises(ProtocolError, match="worker 'a' says the secret that it was told"):
        sealed_over(sockets[0], SECRET, SECRET, "a")


def test_nothing_is_sealed_on_a_connection_that_broke(streams: tuple[SealedStream, SealedStream]) -> None:
    streams[0].abort()
    drawn = repr(streams[0]._sealer._numbers)
    with pytest.raises(BrokenPipeError, match="worker 'b'"):
        streams[0].send([bytes(1000)], None, _nothing)
    assert repr(streams[0]._sealer._numbers) == drawn


def test_a_peer_that_takes_nothing_in(streams: tuple[SealedStream, SealedStream]) -> None:
    with pytest.raises(TimeoutError):
        streams[0].send([bytes(64 << 20)], time.monotonic() + 0.2, _nothing)
    assert streams[0].broken


def test_more_over_tls_than_the_handshake_is_refused(sockets: tuple[TlsSocket, TlsSocket]) -> None:
    one, other = sockets
    one.sendall(b"x" * 10)
    assert other.recv(1) == b"x"
    with pytest.raises(ProtocolError, match="worker 'a' has said more"):
        sealed_over(other, SECRET, bytes(32), "a")


def test_a_secret_is_not_taken_in_clear() -> None:
    one, other = socket.socketpair()
    with one, other, pytest.raises(ProtocolError, match="not encrypted"):
        sealed_over(one, SECRET, SECRET, "a")


@pytest.mark.parametrize("wrong", [b"", bytes(16)])
def test_a_secret_of_the_wrong_size_is_refused(sockets: tuple[TlsSocket, TlsSocket], wrong: bytes) -> None:
    with pytest.raises(ProtocolError, match="32 bytes"):
        sealed_over(sockets[0], SECRET, wrong, "a")
