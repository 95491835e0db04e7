"""Large messages over several streams: what goes where, what arrives, and what follows when a stream breaks or lies."""

import concurrent.futures
import functools
import itertools
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import AuthenticationError, ProtocolError, SealBroken
from telegrad.rpc.peers.dial import sealed_over
from telegrad.transport.connection import Connection
from telegrad.transport.stream import SocketStream
from telegrad.transport.stripes import stripes
from telegrad.transport.stripes.gathering import Gathering
from telegrad.transport.stripes.seal import can_seal, fresh_secret
from telegrad.transport.stripes.sealed_stream import SealedStream
from telegrad.transport.stripes.threads import PartThreads
from telegrad.transport.tls import TlsEnds, ends_by_fingerprint
from telegrad.transport.tls_stream import TlsSocket
from telegrad.wire.block_notices import StripesReady
from telegrad.wire.frame_reader import READ_SIZE
from telegrad.wire.frames import HEADER, LENGTHS, MAGIC, STRIPED, VERSION, Frame, FrameKind, encode_prefix
from telegrad.wire.messages import Ping, PythonReply
from telegrad.wire.parts import LEAST_FIRST, LEAST_PART, MOST_STREAMS, STRIPE_FROM, cut, divide
from telegrad.wire.tensor.tensors import describe, rebuild
from tests.waiting import wait_until

LARGE = 3 * 2**20 + 4  # bytes


# --- what goes where ---


@given(
    st.lists(st.integers(0, 50_000), min_size=1, max_size=6),
    st.integers(2, MOST_STREAMS),
    st.sampled_from([None, 1000]),
    st.sampled_from([4096, 20 * 4096, LEAST_PART]),
)
def test_the_parts_are_all_of_it_in_order(sizes: list[int], streams: int, first: int | None, least: int) -> None:
    sizes = [1000, *sizes]
    buffers = [random.Random(i).randbytes(size) for i, size in enumerate(sizes)]
    total = sum(sizes)
    with mock.patch("telegrad.wire.parts.LEAST_PART", least):
        bounds = divide(total, streams, first)
    parts = [b"".join(part) for part in cut(buffers, bounds)]
    assert len(parts) == streams and b"".join(parts) == b"".join(buffers)
    lengths = [len(part) for part in parts]
    assert lengths == [end - begin for begin, end in itertools.pairwise(bounds)]
    if first is not None:
        assert lengths.pop(0) == first
    assert lengths == sorted(lengths, reverse=True)  # of one size, and what is left
    assert len({length for length in lengths if length}) <= 2
    assert all(length >= least for length in lengths[:-1] if length and length != min(filter(None, lengths)))


def test_a_small_message_leaves_streams_out() -> None:
    assert divide(STRIPE_FROM, 8) == [0, 2**19, 2**20, 3 * 2**19, *[2**21] * 5]


def test_the_first_part_is_more_than_a_reader_takes_in_at_once() -> None:
    assert divide(STRIPE_FROM, MOST_STREAMS)[1] > READ_SIZE
    assert divide(STRIPE_FROM, 2, LEAST_FIRST)[1] == LEAST_FIRST > READ_SIZE


# --- what arrives ---


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        a = socket.create_connection(listener.getsockname())
        b, _ = listener.accept()
    return a, b


def sealed_pair() -> list[SocketStream]:
    """As two workers make it that have said their secrets."""
    ends = _tls_ends()
    (one, other), (a, b) = tcp_pair(), (fresh_secret(), fresh_secret())
    dialled, accepted = TlsSocket(one, ends.client, server_side=False), ends.wrap_accepted(other)
    with in_thread(accepted.do_handshake):
        dialled.do_handshake()
    return [sealed_over(dialled, a, b, "b"), sealed_over(accepted, b, a, "a")]


@functools.cache
def _tls_ends() -> TlsEnds:
    ends = ends_by_fingerprint()
    if ends is None or not can_seal():
        pytest.skip("needs the extra `tls`")
    return ends


class Pair:
    """Two ends of a connection with several streams, in this process."""

    def __init__(self, streams: int, sealed: bool = False) -> None:
        self.threads = PartThreads("test")
        made: list[list[SocketStream]] = [[SocketStream(s, "tcp") for s in tcp_pair()]]
        made += [sealed_pair() if sealed else [SocketStream(s, "tcp") for s in tcp_pair()] for _ in range(streams - 1)]
        self.sides = [[ends[i] for ends in made[1:]] for i in (0, 1)]
        self.ends = [Connection(made[0][i], max_frame=2**32) for i in (0, 1)]
        self.arrived = threading.Event()
        for end, sides in zip(self.ends, self.sides, strict=True):
            end.attach(sides, self.threads).on_arrival = self.arrived.set
        self.ends[0].use_stripes()
        wait_until(lambda: self.ends[1].receive() == [] and self.ends[1]._striped)  # its own business

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self.threads.close()


def receive(connection: Connection, seconds: float = 60.0, count: int = 1) -> list[Frame] | None:
    frames: list[Frame] = []
    deadline = time.monotonic() + seconds
    while len(frames) < count and time.monotonic() < deadline:
        if connection.stream.readable(0.05):
            got = connection.receive()
            if got is None:
                return None
            frames += got
    return frames


def send_tensors(connection: Connection, *tensors: torch.Tensor, deadline: float | None = None) -> None:
    specs, segments = describe(list(tensors))
    connection.send(FrameKind.REPLY, 1, 0, PythonReply(), b"payload", specs, segments, deadline=deadline)


def tensors_of(frame: Frame) -> list[torch.Tensor]:
    assert bytes(frame.payload) == b"payload"
    return rebuild(frame.tensors, frame.buffers)


@contextmanager
def in_thread(act: Callable[[], Any]) -> Iterator[list[Any]]:
    """`act` in a thread; the list has its result or its error when the block has ended."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(act())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield outcome
    finally:
        thread.join(100)
        assert not thread.is_alive()


@pytest.fixture(params=[(2, False), (3, False), (8, False), (2, True), (5, True)], ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with closing(Pair(*request.param)) as made:
        yield made


def test_tensors_both_ways_with_small_messages_between(pair: Pair) -> None:
    for sender, receiver in (pair.ends, pair.ends[::-1]):
        sent = [torch.randn(LARGE // 4), torch.arange(7.0), torch.randn(3, 333_333)]

        def send(sender: Connection = sender, sent: list[torch.Tensor] = sent) -> None:
            send_tensors(sender, *sent)
            sender.send(FrameKind.NOTICE, 0, 0, Ping())
            send_tensors(sender, *reversed(sent))

        with in_thread(send) as outcome:
            frames = receive(receiver, count=3)
        assert outcome == [None] and frames is not None
        first, ping, second = frames
        assert type(ping.message) is Ping
        assert all(map(torch.equal, tensors_of(first), sent))
        assert all(map(torch.equal, tensors_of(second), reversed(sent)))


def test_both_ends_send_at_once_and_neither_reads_before_it_has_sent(pair: Pair) -> None:
    """Parts are read while others are written: two large messages that cross do not wait for each other."""
    x, y = torch.randn(8 * 2**20), torch.randn(8 * 2**20)
    a, b = pair.ends
    got: dict[int, Any] = {}

    def read(end: Connection) -> None:
        got[id(end)] = receive(end)

    with (
        in_thread(functools.partial(send_tensors, a, x)) as first,
        in_thread(functools.partial(send_tensors, b, y)) as second,
        in_thread(functools.partial(read, a)),
        in_thread(functools.partial(read, b)),
    ):
        pass
    assert first == second == [None]
    assert torch.equal(tensors_of(got[id(b)][0])[0], x)
    assert torch.equal(tensors_of(got[id(a)][0])[0], y)


def test_a_part_that_comes_late_holds_the_message_back_and_nothing_spins(pair: Pair) -> None:
    """What follows on the first stream is not read, no thread has to stay, and whoever left is called."""
    a, b = pair.ends
    late = pair.sides[0][0]
    go = threading.Event()
    send = late.send

    def send_late(*args: Any) -> None:
        go.wait(100)
        send(*args)

    late.send = send_late  # type: ignore[method-assign]
    x = torch.randn(LARGE // 4)

    def both() -> None:
        send_tensors(a, x)
        a.send(FrameKind.NOTICE, 0, 0, Ping())

    with in_thread(both) as outcome:
        wait_until(lambda: b.receive() == [] and b._reader.waiting)
        began = time.monotonic()
        assert not b.stream.readable(0.3)
        assert time.monotonic() - began > 0.25
        assert b.receive() == []
        assert not pair.arrived.is_set()
        go.set()
        assert pair.arrived.wait(60)
        frames = receive(b, count=2)
    assert outcome == [None] and frames is not None
    assert torch.equal(tensors_of(frames[0])[0], x)


# --- what breaks ---


@pytest.mark.parametrize("end", [0, 1], ids=["by the sender", "by the receiver"])
@pytest.mark.parametrize("stream", [0, 1, -1])
@pytest.mark.parametrize("seed", range(3))
def test_a_stream_that_is_cut_ends_the_connection_on_both_sides(end: int, stream: int, seed: int) -> None:
    with closing(Pair(3)) as pair:
        a, b = pair.ends
        x = torch.randn(16 * 2**20)
        victim = a.stream if stream == 0 and end == 0 else b.stream if stream == 0 else pair.sides[end][stream]
        assert isinstance(victim, SocketStream)
        timer = threading.Timer(random.Random(seed).uniform(0, 0.02), victim.abort)
        result: list[Any] = []

        def read() -> None:
            try:
                result.append(receive(b))
            except (OSError, ValueError) as error:
                result.append(error)

        def send() -> None:
            for _ in range(50):
                send_tensors(a, x, deadline=time.monotonic() + 60)

        with in_thread(send) as outcome, in_thread(lambda: [read() for _ in range(50) if not is_end(result)]):
            timer.start()
        timer.join()
        assert isinstance(outcome[0], OSError), outcome
        assert not isinstance(outcome[0], TimeoutError)
        for frames in result:
            if not is_end([frames]):
                assert torch.equal(tensors_of(frames[0])[0], x)  # whole, or not at all
        assert is_end(result)


def is_end(results: list[Any]) -> bool:
    return bool(results) and not isinstance(results[-1], list)


def test_a_peer_that_reads_nothing_is_given_up_at_the_deadline() -> None:
    with closing(Pair(3)) as pair:
        a, _ = pair.ends
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            send_tensors(a, torch.zeros(64 * 2**20), deadline=time.monotonic() + 0.3)
        assert time.monotonic() - began < 40
        assert a.stream.broken  # nothing can follow half a message


def test_progress_on_a_side_stream_is_a_sign_of_life() -> None:
    with closing(Pair(2)) as pair:
        a, b = pair.ends
        before, blocked = time.monotonic(), threading.Event()
        a.on_blocked = blocked.set
        x = torch.randn(16 * 2**20)
        with in_thread(functools.partial(send_tensors, a, x)):
            assert blocked.wait(60)  # else it may be read as fast as it is written, and nobody notes when
            assert receive(b)
        assert a.last_progress >= before
        assert b.last_progress >= before
        assert a.peer_host_answers(60.0)
        wait_until(lambda: a.delivered)


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_a_part_that_trickles_in_is_seen_to_come(sealed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread waits until there is much to read; of a slow peer it reads what there is."""
    with closing(Pair(2, sealed)) as pair:
        memory = bytearray(2 * LARGE)
        begin, end = divide(len(memory), 2, LEAST_FIRST if sealed else None)[1:]
        side, data = pair.sides[0][0]._socket, random.Random(5).randbytes(end - begin)
        written: list[Any] = []
        monkeypatch.setattr(SocketStream, "send", lambda _self, buffers, *_: written.extend(map(bytes, buffers)))
        pair.sides[0][0].send([data], None, lambda: None)
        monkeypatch.undo()
        come = b"".join(written)
        reader = pair.ends[1].stripes
        assert reader is not None
        arrival = reader.arriving(memoryview(memory))
        for start in range(0, len(come), 2**18):
            before = reader.last_read
            side.setblocking(True)
            side.sendall(come[start : start + 2**18])
            if not sealed:  # a sealed piece is read whole, a plain part as it comes
                wait_until(lambda before=before: reader.last_read > before)
        wait_until(arrival._done.is_set)
        assert arrival._error is None and memory[begin:] == data


def test_closing_ends_the_streams_and_those_who_wait_at_them() -> None:
    pair = Pair(3)
    a, b = pair.ends
    prefix = encode_prefix(FrameKind.REPLY, 1, 0, PythonReply(), data_bytes=LARGE, form=STRIPED)
    a.stream.send([prefix + bytes(divide(LARGE, 3)[1])], None, lambda: None)
    wait_until(lambda: b.receive() == [] and b._reader.waiting)
    pair.close()
    for side in (*pair.sides[0], *pair.sides[1]):
        wait_until(lambda side=side: side._socket.fileno() < 0)
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("test-part")])


def test_the_threads_end_while_one_is_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, ran = PartThreads("test"), threading.Event()
    start = threading.Thread.start
    with ThreadPoolExecutor(1) as other:
        closed: list[Future[None]] = []

        def start_late(thread: threading.Thread) -> None:
            if thread.name == "test-part":
                closed.append(other.submit(threads.close))
                concurrent.futures.wait(closed, 0.1)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_late)
        threads.run(ran.set)
        closed[0].result(60)
    assert ran.wait(60)


# --- a peer that lies ---


@pytest.mark.parametrize(
    ("form", "data", "text"),
    [
        (STRIPED, STRIPE_FROM - 1, "several connections"),
        (STRIPED, 2**33, "over the limit"),
        (9 + STRIPED, LARGE, "unknown form"),
    ],
    ids=["too small", "too large", "unknown"],
)
def test_a_header_that_is_not_right_for_several_streams_is_refused(form: int, data: int, text: str) -> None:
    with closing(Pair(2)) as pair:
        a, b = pair.ends
        a.stream.send([HEADER.pack(MAGIC, VERSION, form, 10) + LENGTHS.pack(0, data)], None, lambda: None)
        with pytest.raises(ProtocolError, match=text):
            receive(b)


def test_a_frame_over_several_streams_is_refused_where_there_is_one() -> None:
    a, b = (Connection(SocketStream(s, "tcp"), max_frame=2**32) for s in tcp_pair())
    with closing(a), closing(b):
        a.stream.send([encode_prefix(FrameKind.REPLY, 1, 0, PythonReply(), data_bytes=LARGE, form=STRIPED)], None, int)
        with pytest.raises(ProtocolError, match="several connections"):
            receive(b)


@pytest.mark.parametrize("count", [1, 3, 2**40])
def test_a_peer_cannot_announce_streams_that_are_not_there(count: int) -> None:
    with closing(Pair(2)) as pair:
        a, b = pair.ends
        a.stream.send([encode_prefix(FrameKind.NOTICE, 0, 0, StripesReady(count))], None, lambda: None)
        with pytest.raises(ProtocolError, match="connections beside each other"):
            receive(b)


def test_bytes_that_nobody_announced_are_not_taken_for_the_next_message() -> None:
    """A side stream with too much: the rest becomes the beginning of the next part, whose message then has the wrong
    bytes, or lacks the last ones; a peer that has proved itself can send wrong bytes anyhow. Nothing else is harmed."""
    with closing(Pair(2)) as pair:
        a, b = pair.ends
        pair.sides[0][0].send([bytes(100)], None, lambda: None)
        x = torch.ones(LARGE // 4)
        with in_thread(functools.partial(send_tensors, a, x)):
            frames = receive(b)
        assert frames is not None
        (y,) = tensors_of(frames[0])
        half = divide(LARGE, 2)[1] // 4
        assert torch.equal(y[:half], x[:half]) and y.shape == x.shape


@pytest.mark.parametrize("way", ["flipped", "exchanged", "from another stream"])
def test_sealed_pieces_that_were_changed_on_their_way_end_the_connection(
    way: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stripes, "_warned", deque([-60.0] * 3, maxlen=3))  # whatever earlier tests were warned of
    with closing(Pair(3, sealed=True)) as pair:
        a, b = pair.ends
        side, other = pair.sides[0]
        assert isinstance(side, SealedStream) and isinstance(other, SealedStream)
        if way == "flipped":
            seal = side._sealer.seal

            def flip(piece: memoryview, left: int, into: memoryview) -> None:
                seal(piece, left, into)
                into[17] ^= 4

            side._sealer.seal = flip  # type: ignore[method-assign]
        elif way == "exchanged":
            next(side._sealer._numbers)
        else:
            side._sealer, other._sealer = other._sealer, side._sealer
        with in_thread(functools.partial(send_tensors, a, torch.ones(LARGE // 4), deadline=time.monotonic() + 60)):
            try:
                assert receive(b) is None  # it has ended
            except ConnectionError as error:  # whichever is seen first: what broke, or a reset by who still writes
                assert not isinstance(error, SealBroken) or "worker 'a'" in str(error)  # noqa: PT017
        wait_until(lambda: b.stream.broken and pair.sides[1][0].broken)
        assert "worker 'a' is not the one that was sealed" in caplog.text


def test_a_side_stream_that_ends_early_ends_the_connection() -> None:
    with closing(Pair(2)) as pair:
        a, b = pair.ends
        prefix = encode_prefix(FrameKind.REPLY, 1, 0, PythonReply(), data_bytes=LARGE, form=STRIPED)
        a.stream.send([prefix + bytes(divide(LARGE, 2)[1])], None, lambda: None)
        pair.sides[0][0].send([bytes(1000)], None, lambda: None)
        pair.sides[0][0].abort()
        assert not _receives(b)


def _receives(connection: Connection) -> bool:
    try:
        return receive(connection) is not None
    except OSError:
        return False


# --- those that are accepted ---


def test_gathering_gives_them_in_order_and_replaces_what_was_given_up() -> None:
    pairs = [tcp_pair() for _ in range(3)]
    one, again, two = (SocketStream(p[0], "tcp") for p in pairs)
    gathering = Gathering(2)
    assert gathering.add(1, one) is None
    assert gathering.add(1, again) is None
    assert one._socket.fileno() < 0
    assert gathering.add(2, two) == [again, two]
    with pytest.raises(AuthenticationError):
        gathering.add(1, one)
    gathering.close()
    assert two._socket.fileno() >= 0  # the connection's now
    for sock in (again, two, *(p[1] for p in pairs)):
        sock.close()


def test_a_peer_cannot_fill_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripes, "_warned", deque([-60.0] * 3, maxlen=3))
    for number in range(10):
        stripes._warn(SealBroken(f"piece {number}"))
    assert [record.message for record in caplog.records] == ["piece 0", "piece 1", "piece 2"]
