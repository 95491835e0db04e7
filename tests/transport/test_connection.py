"""Connections over pairs of sockets: messages both ways, shared blocks, and peers that send nonsense."""

import array
import fcntl
import gc
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import ProtocolError
from telegrad.transport.blocks.lending import Lender
from telegrad.transport.connection import Connection
from telegrad.transport.stream import Lane, SocketStream, make_lane_pair
from telegrad.transport.tensor_memory import _say_once
from telegrad.wire.block_notices import ReleaseBlocks, RetireBlocks
from telegrad.wire.frames import (
    HEADER,
    INLINE,
    LENGTHS,
    MAGIC,
    VERSION,
    Frame,
    FrameKind,
    SegmentSpec,
    encode_prefix,
    returned,
)
from telegrad.wire.messages import Ack, Ping, PythonReply
from telegrad.wire.tensor.returning import mark_spare, storages_of
from telegrad.wire.tensor.tensors import describe, rebuild

LIMIT = 2**32


def make_pair(shared: bool = True) -> tuple[Connection, Connection]:
    """Two ends of a connection in this process."""
    a, b = socket.socketpair()
    lanes = [Lane(s) for s in make_lane_pair()] if shared else [None, None]
    return (
        Connection(SocketStream(a, "unix", lanes[0]), max_frame=LIMIT),
        Connection(SocketStream(b, "unix", lanes[1]), max_frame=LIMIT),
    )


@pytest.fixture(params=[True, False], ids=["shared", "socket"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Connection, Connection]]:
    a, b = make_pair(request.param)
    with closing(a), closing(b):
        yield a, b


def receive(connection: Connection, count: int) -> list[Frame]:
    """Exactly `count` frames."""
    frames: list[Frame] = []
    deadline = time.monotonic() + 60
    while len(frames) < count:
        assert time.monotonic() < deadline
        connection.stream.readable(1.0)
        got = connection.receive()
        assert got is not None, "the stream ended"
        frames += got
    assert len(frames) == count
    return frames


def send_tensor(connection: Connection, x: torch.Tensor, request_id: int = 1) -> None:
    specs, segments = describe([x])
    connection.send(FrameKind.REPLY, request_id, 0, PythonReply(), b"payload", specs, segments)


def take_tensor(connection: Connection) -> torch.Tensor:
    (frame,) = receive(connection, 1)
    assert bytes(frame.payload) == b"payload"
    (tensor,) = rebuild(frame.tensors, frame.buffers)
    return tensor


@pytest.mark.parametrize("size", [0, 1, 1000, 8191, 8192, 20_000])
def test_tensors_both_ways(pair: tuple[Connection, Connection], size: int) -> None:
    for sender, receiver in (pair, pair[::-1]):
        x = torch.arange(float(size))
        send_tensor(sender, x)
        y = take_tensor(receiver)
        assert torch.equal(x, y)
        y.fill_(-1)  # the receiver's own
        assert not size or x[0] == 0


def test_the_lack_of_shared_memory_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "memfd_create", none_left)
    _say_once.cache_clear()
    for _ in range(3):
        a, b = make_pair()
        with closing(a), closing(b):
            for sender, receiver in ((a, b), (b, a)):
                send_tensor(sender, torch.ones(20_000))
                assert torch.equal(take_tensor(receiver), torch.ones(20_000))
    assert caplog.text.count("no shared memory") == 1


def test_held_frames_leave_with_the_next(pair: tuple[Connection, Connection]) -> None:
    a, b = pair
    for i in range(5):
        a.send(FrameKind.REPLY, i, 0, PythonReply(), hold=True)
    assert not b.stream.readable(0)
    a.send(FrameKind.REPLY, 5, 0, PythonReply())
    assert [f.request_id for f in receive(b, 6)] == list(range(6))
    a.send(FrameKind.REPLY, 6, 0, PythonReply(), hold=True)
    a.flush()
    assert receive(b, 1)[0].request_id == 6


def test_the_end_of_a_stream(pair: tuple[Connection, Connection]) -> None:
    a, b = pair
    a.close()
    assert b.stream.readable(60.0)
    assert b.receive() is None
    with pytest.raises(OSError):  # noqa: PT011 - which one depends on the platform
        a.send(FrameKind.NOTICE, 0, 0, Ping())


def test_a_peer_that_does_not_read_meets_the_deadline(pair: tuple[Connection, Connection]) -> None:
    a, _ = pair
    blocked: list[bool] = []
    a.on_blocked = lambda: blocked.append(True)
    with pytest.raises(TimeoutError):
        a.send(FrameKind.NOTICE, 0, 0, Ping(), bytes(100_000_000), deadline=time.monotonic() + 0.05)
    assert blocked
    with pytest.raises(OSError):  # noqa: PT011 - part of a message is out: nothing may follow it
        a.send(FrameKind.NOTICE, 0, 0, Ping())


def fill(connection: Connection) -> int:
    """Send until the peer has no room for more; the number of the last message, of which a part has left."""
    number = 0
    while not connection.stream.unsent:
        number += 1
        connection.send(FrameKind.NOTICE, number, 0, Ping(), bytes(30_000), hold=True)
        connection.flush()
    return number


def test_what_a_full_peer_took_half_of_goes_on_where_it_was(pair: tuple[Connection, Connection]) -> None:
    a, b = pair
    asked: list[float] = []
    a.flush_within = asked.append
    last = fill(a)
    assert len(asked) == 1
    for number in range(last + 1, last + 6):
        a.send(FrameKind.NOTICE, number, 0, Ping(), hold=True)
        a.flush()
        a.mention(Ping(), number)
    assert len(asked) == 11 and not a.delivered
    came: list[Frame] = []
    while asked:  # as the timer does
        asked.clear()
        came += b.receive() or []
        a.flush()
    came += receive(b, last + 10 - len(came))
    assert [f.request_id for f in came if f.request_id] == list(range(1, last + 6))
    assert [f.ack for f in came[-10:]] == [x for n in range(last + 1, last + 6) for x in (0, n)]
    assert a.delivered and a.last_progress > 0


def test_what_is_sent_waits_for_the_rest_of_what_a_full_peer_took(pair: tuple[Connection, Connection]) -> None:
    a, b = pair
    last = fill(a)
    with pytest.raises(TimeoutError):
        a.send(FrameKind.NOTICE, last + 1, 0, Ping(), deadline=time.monotonic())
    assert not a.stream.broken
    writer = threading.Thread(target=a.send, args=(FrameKind.NOTICE, last + 2, 0, Ping(), bytes(200_000)))
    writer.start()
    assert [f.request_id for f in receive(b, last + 1)] == [*range(1, last + 1), last + 2]
    writer.join(60)


def test_a_thread_that_writes_goes_on_with_what_others_have_left(pair: tuple[Connection, Connection]) -> None:
    """No thread but the one with the large message has to wait until the peer reads, and nobody looks again."""
    a, b = pair
    blocked = threading.Event()
    a.on_blocked = blocked.set
    writer = threading.Thread(target=a.send, args=(FrameKind.NOTICE, 1, 0, Ping(), bytes(30_000_000)))
    writer.start()
    assert blocked.wait(60)
    a.send(FrameKind.NOTICE, 2, 0, Ping(), hold=True)
    a.flush()
    a.send(FrameKind.NOTICE, 3, 0, Ping())
    assert len(a.outbox) == 2
    with pytest.raises(TimeoutError):
        a.send(FrameKind.NOTICE, 4, 0, Ping(), bytes(200_000), deadline=time.monotonic() + 0.01)
    assert [f.request_id for f in receive(b, 3)] == [1, 2, 3]
    writer.join(60)


def test_nothing_is_left_behind_by_many_threads(pair: tuple[Connection, Connection]) -> None:
    """Each sends, or holds back and flushes, beside the others: what nobody writes would be missing at the end."""
    a, b = pair

    def send(begin: int) -> None:
        for number in range(begin, begin + 300):
            a.send(FrameKind.NOTICE, number, 0, Ping(), bytes(number % 50 * 3000), hold=number % 3 > 0)
            if number % 3 == 1:
                a.flush()
        a.flush()

    full = threading.Event()
    a.flush_within = lambda seconds: full.set()
    threads = [threading.Thread(target=send, args=(1000 * n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    came: list[int] = []
    deadline = time.monotonic() + 60
    while len(came) < 1200:
        assert time.monotonic() < deadline
        b.stream.readable(0.05)
        came += [f.request_id for f in b.receive() or ()]
        if full.is_set():  # as the timer does
            full.clear()
            a.flush()
    for thread in threads:
        thread.join(60)
    for n in range(1, 5):
        assert [number for number in came if number // 1000 == n] == list(range(1000 * n, 1000 * n + 300))


# --- shared blocks ---


def test_blocks_go_back_when_the_storage_is_freed_and_are_used_again() -> None:
    a, b = make_pair()
    with closing(a), closing(b):
        lender, borrower = a.memory.lender, b.memory.borrower
        assert lender is not None
        x = torch.ones(100_000)
        addresses = set()
        for _ in range(20):
            send_tensor(a, x)
            y = take_tensor(b)
            view = y[10:20]
            del y
            assert borrower.in_use == 1  # a view keeps the storage
            addresses.add(view.data_ptr())
            del view
            assert borrower.in_use == 0
            b.send(FrameKind.NOTICE, 0, 0, Ping())  # what was released goes along
            receive(a, 1)
            assert lender.lent_bytes == 0
        assert len(addresses) == 1
        assert borrower.mapped == 1


def test_blocks_in_use_are_not_written_to() -> None:
    a, b = make_pair()
    with closing(a), closing(b):
        kept = []
        for i in range(10):
            send_tensor(a, torch.full((50_000,), float(i)))
            kept.append(take_tensor(b))
        assert [t[0].item() for t in kept] == list(range(10))
        assert len({t.data_ptr() for t in kept}) == 10


def test_tensors_outlive_their_connection() -> None:
    a, b = make_pair()
    send_tensor(a, torch.ones(100_000))
    y = take_tensor(b)
    a.close()
    b.close()
    assert y.sum() == 100_000
    y.zero_()


def test_without_shared_memory_it_says_so_once_and_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_pair()
    with closing(a), closing(b):

        def refuse(*_: object) -> int:
            raise OSError("not permitted")

        monkeypatch.setattr(os, "memfd_create", refuse)
        _say_once.cache_clear()
        for _ in range(3):
            send_tensor(a, torch.ones(100_000))
            assert take_tensor(b).sum() == 100_000
        assert caplog.text.count("no shared memory") == 1
        assert "Traceback" not in caplog.text


def test_descriptors_do_not_add_up() -> None:
    gc.collect()  # what earlier tests left
    before = len(os.listdir("/proc/self/fd"))
    a, b = make_pair()
    kept = []
    for _ in range(100):
        send_tensor(a, torch.ones(20_000))
        kept.append(take_tensor(b))
    assert len(os.listdir("/proc/self/fd")) < before + 10
    a.close()
    b.close()
    del kept
    assert len(os.listdir("/proc/self/fd")) <= before


# --- memory that goes back ---


def send_back(connection: Connection, tensors: list[torch.Tensor], *, hold: bool = False) -> None:
    """As a worker replies with what came with the request; the list must be all that holds it."""
    specs, segments = describe(tensors)
    segments = mark_spare(tensors, segments, storages_of(tensors))
    connection.send(FrameKind.REPLY, 1, 0, PythonReply(), b"payload", specs, segments, hold=hold)


def take_tensors(connection: Connection, count: int = 1) -> list[torch.Tensor]:
    (frame,) = receive(connection, 1)
    tensors = rebuild(frame.tensors, frame.buffers)
    assert len(tensors) == count
    return tensors


def lender_of(connection: Connection) -> Lender:
    assert connection.memory.lender is not None
    return connection.memory.lender


def test_what_is_sent_back_lies_in_the_memory_it_was_lent_in() -> None:
    a, b = make_pair()
    with closing(a), closing(b):
        send_tensor(a, torch.arange(100_000.0))
        theirs = take_tensors(b)
        theirs[0].add_(1)
        send_back(b, theirs)
        ours = take_tensor(a)
        assert torch.equal(ours, torch.arange(1.0, 100_001.0))
        assert lender_of(b).lent_bytes == 0
        assert len(lender_of(a)._regained) == 1
        theirs.clear()
        b.send(FrameKind.NOTICE, 0, 0, Ping())
        receive(a, 1)
        send_tensor(a, torch.zeros(100_000))
        assert ours[0] == 1  # the next message has other memory
        del ours
        take_tensors(b)
        b.send(FrameKind.NOTICE, 0, 0, Ping())
        receive(a, 1)
        assert lender_of(a).lent_bytes == 0


def test_some_go_back_and_others_are_copied() -> None:
    a, b = make_pair()
    with closing(a), closing(b):
        specs, segments = describe([torch.full((20_000 + i,), float(i)) for i in range(4)])
        a.send(FrameKind.REQUEST, 1, 0, PythonReply(), b"", specs, segments)
        theirs = take_tensors(b, 4)
        kept = theirs[2]
        send_back(b, [theirs.pop(), theirs.pop(), torch.full((20_000,), 7.0), theirs.pop()])
        ours = take_tensors(a, 4)
        assert [t.unique().tolist() for t in ours] == [[3.0], [2.0], [7.0], [1.0]]
        kept.fill_(-1)
        assert ours[1].unique().tolist() == [2.0]
        assert len(lender_of(a)._regained) == 1


def test_what_goes_back_is_named_before_it_is_released() -> None:
    """A reply that waits for others is written after others; the word that its block is free must not overtake it."""
    a, b = make_pair()
    with closing(a), closing(b):
        send_tensor(a, torch.ones(100_000))
        theirs = take_tensors(b)
        send_back(b, theirs, hold=True)
        theirs.clear()
        b.flush()
        ours = take_tensor(a)
        assert ours.sum() == 100_000
        assert lender_of(a).lent_bytes > 0
        del ours
        assert lender_of(a).lent_bytes == 0


def test_a_small_part_of_a_block_goes_back_as_a_copy() -> None:
    """A caller that keeps many small results must not keep all that it sent to get them."""
    a, b = make_pair()
    with closing(a), closing(b):
        specs, segments = describe([torch.ones(1_000_000), torch.full((20_000,), 2.0)])
        a.send(FrameKind.REQUEST, 1, 0, PythonReply(), b"", specs, segments)
        theirs = take_tensors(b, 2)
        send_back(b, [theirs.pop()])
        ours = take_tensor(a)
        assert torch.equal(ours, torch.full((20_000,), 2.0))
        theirs.clear()
        b.send(FrameKind.NOTICE, 0, 0, Ping())
        receive(a, 1)
        assert lender_of(a).lent_bytes == 0


def test_memory_goes_back_only_over_the_connection_it_came_over() -> None:
    """After a cut the reply is sent again over the next one, whose blocks have the same numbers."""
    a, b = make_pair()
    send_tensor(a, torch.full((100_000,), 3.0))
    theirs = take_tensors(b)
    a.close()
    b.close()
    a, b = make_pair()
    with closing(a), closing(b):
        send_tensor(a, torch.ones(100_000))
        others = take_tensors(b)
        send_back(b, theirs)
        assert torch.equal(take_tensor(a), torch.full((100_000,), 3.0))
        assert others[0].sum() == 100_000


BAD_RETURNS = {
    "of a block that never was": SegmentSpec(10, returned(99), 0),
    "of block 0": SegmentSpec(10, returned(0), 0),
    "of the last number there is": SegmentSpec(10, -(2**63), 0),
    "beyond its end": SegmentSpec(10, returned(1), 2**40),
    "across its end": SegmentSpec(2**40, returned(1), 0),
    "before its begin": SegmentSpec(10, returned(1), -1),
    "of a negative length": SegmentSpec(-1, returned(1), 0),
    "of an overflowing length": SegmentSpec(2**63 - 1, returned(1), 2**63 - 1),
}


@pytest.mark.parametrize("what", BAD_RETURNS)
def test_a_bad_return_is_a_protocol_error_and_harms_nobody(what: str) -> None:
    """What the peer has of us stays valid, and so does what we have of it."""
    a, b = make_pair()
    with closing(a), closing(b):
        send_tensor(a, torch.ones(100_000))
        theirs = take_tensor(b)
        send_tensor(b, torch.ones(100_000))
        ours = take_tensor(a)
        b.stream.send([raw_frame(Ack(), [BAD_RETURNS[what]])], None, lambda: None)
        with pytest.raises(ProtocolError):
            receive(a, 1)
    assert ours.sum() == theirs.sum() == 100_000


def test_a_return_where_nothing_is_lent() -> None:
    a, b = make_pair(shared=False)
    with closing(a), closing(b):
        b.stream.send([raw_frame(Ack(), [SegmentSpec(10, returned(1), 0)])], None, lambda: None)
        with pytest.raises(ProtocolError, match="shared memory"):
            receive(a, 1)


def test_a_return_that_is_read_after_the_end_is_no_fault_of_the_peer() -> None:
    a, b = make_pair()
    with closing(a), closing(b):
        send_tensor(a, torch.ones(100_000))
        send_back(b, take_tensors(b))
        lender_of(a).close()  # as by another thread that found the connection lost
        with pytest.raises(ConnectionError):
            receive(a, 1)


# --- nonsense ---


def raw_frame(
    message: object, segments: list[SegmentSpec] | None = None, data: bytes = b"", kind: FrameKind = FrameKind.NOTICE
) -> bytes:
    return encode_prefix(kind, 1, 0, message, (), segments or (), 0, len(data)) + data


NONSENSE = {
    "a segment beyond the data": raw_frame(Ack(), [SegmentSpec(100, INLINE, 0)], b"x"),
    "a negative length": raw_frame(Ack(), [SegmentSpec(-1, INLINE, 0)], b"x"),
    "a negative offset": raw_frame(Ack(), [SegmentSpec(1, INLINE, -1)], b"x"),
    "an overflowing segment": raw_frame(Ack(), [SegmentSpec(2**63 - 1, INLINE, 2**63 - 1)], b"x"),
    "a block released that was not lent": raw_frame(ReleaseBlocks((5,))),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_a_protocol_error(what: str) -> None:
    raw, other = socket.socketpair()
    lanes = make_lane_pair()
    connection = Connection(SocketStream(other, "unix", Lane(lanes[0])), max_frame=LIMIT)
    with closing(raw), closing(connection), closing(lanes[1]):
        raw.sendall(NONSENSE[what])
        connection.stream.readable(60.0)
        with pytest.raises(ProtocolError):
            connection.receive()


def test_blocks_where_none_can_be() -> None:
    raw, other = socket.socketpair()
    connection = Connection(SocketStream(other, "unix", None), max_frame=LIMIT)
    with closing(raw), closing(connection):
        raw.sendall(raw_frame(Ack(), [SegmentSpec(1, 3, 0)]))
        with pytest.raises(ProtocolError):
            connection.receive()


def _announce(lane: socket.socket, number: int, size: int, real: int) -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, real)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
        lane.sendmsg([number.to_bytes(8, "little") + size.to_bytes(8, "little")], [rights])
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("announced", "real", "segment"),
    [
        (4096, 100, SegmentSpec(10, 1, 0)),  # a mapping longer than its file would end the process
        (0, 4096, SegmentSpec(10, 1, 0)),
        (2**63, 4096, SegmentSpec(10, 1, 0)),
        (4096, 4096, SegmentSpec(4097, 1, 0)),
        (4096, 4096, SegmentSpec(10, 1, 4090)),
    ],
)
def test_blocks_that_lie(announced: int, real: int, segment: SegmentSpec) -> None:
    raw, other = socket.socketpair()
    ours, theirs = make_lane_pair()
    connection = Connection(SocketStream(other, "unix", Lane(ours)), max_frame=LIMIT)
    with closing(raw), closing(connection), closing(theirs):
        _announce(theirs, 1, announced, real)
        raw.sendall(raw_frame(Ack(), [segment]))
        with pytest.raises(ProtocolError):
            connection.receive()


def test_a_block_used_twice_before_its_release() -> None:
    raw, other = socket.socketpair()
    ours, theirs = make_lane_pair()
    connection = Connection(SocketStream(other, "unix", Lane(ours)), max_frame=LIMIT)
    with closing(raw), closing(connection), closing(theirs):
        _announce(theirs, 1, 4096, 4096)
        raw.sendall(raw_frame(Ack(), [SegmentSpec(10, 1, 0)]))
        (frame,) = receive(connection, 1)
        assert len(frame.buffers[0]) == 10
        raw.sendall(raw_frame(Ack(), [SegmentSpec(10, 1, 0)]))
        with pytest.raises(ProtocolError, match="twice"):
            connection.receive()


def test_a_block_nobody_announced() -> None:
    raw, other = socket.socketpair()
    ours, theirs = make_lane_pair()
    lane = Lane(ours)
    ours.settimeout(0.05)
    connection = Connection(SocketStream(other, "unix", lane), max_frame=LIMIT)
    with closing(raw), closing(connection), closing(theirs):
        raw.sendall(raw_frame(Ack(), [SegmentSpec(10, 1, 0)]))
        with pytest.raises(ProtocolError, match="not announced"):
            connection.receive()


# --- fuzz ---

FRAMES_PER_EXAMPLE = 50


@pytest.mark.chaos
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, about the rarer dtypes that chance brings up
@given(seed=st.integers(0, 2**32))
def test_fuzzed_frames(seed: int) -> None:
    """Valid frames, damaged in every way: each is taken or refused with a ProtocolError; nothing else ever happens.

    The long profile damages 100,000 frames."""
    chance = random.Random(seed)
    for _ in range(FRAMES_PER_EXAMPLE):
        raw, other = socket.socketpair()
        connection = Connection(SocketStream(other, "unix", None), max_frame=1_000_000)
        with closing(raw), closing(connection):
            raw.sendall(_damaged(chance))
            raw.shutdown(socket.SHUT_WR)
            try:
                while (frames := connection.receive()) is not None:
                    for frame in frames:
                        rebuild(frame.tensors, frame.buffers)
            except ProtocolError:
                pass


def _damaged(chance: random.Random) -> bytes:
    """One to three frames with tensors, with bytes changed, cut out, put in, or lengths made to lie."""
    specs, segments = describe([torch.arange(chance.randrange(20)), torch.ones(2, 3).t()])
    a, b = socket.socketpair()
    with closing(a), closing(b):
        sender = Connection(SocketStream(a, "unix", None), max_frame=LIMIT)
        for _ in range(chance.randint(1, 3)):
            choice = chance.choice([PythonReply(), ReleaseBlocks((1, 2)), RetireBlocks((3,)), Ping()])
            sender.send(chance.choice(list(FrameKind)), 1, 0, choice, b"payload", specs, segments)
        raw = bytearray(b.recv(1_000_000))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(raw))
        match chance.randrange(5):
            case 0:
                raw[at] = chance.randrange(256)
            case 1:
                del raw[at : at + chance.randint(1, 30)]
            case 2:
                raw[at:at] = chance.randbytes(chance.randint(1, 30))
            case 3:
                del raw[at:]
            case 4 if len(raw) >= HEADER.size + LENGTHS.size:
                record, *lengths = [chance.choice([0, 1, 50, 2**16, 2**31]) for _ in range(3)]
                HEADER.pack_into(raw, 0, MAGIC, VERSION, chance.randint(0, 3), record)
                LENGTHS.pack_into(raw, HEADER.size, *lengths)
        if not raw:
            raw = bytearray(b"\0")
    return bytes(raw)
