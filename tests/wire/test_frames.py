"""Frames on a stream: whatever way the bytes arrive, the frames are the same; whatever is wrong is a ProtocolError."""

import random
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import ProtocolError
from telegrad.wire.frame_reader import READ_SIZE, FrameReader
from telegrad.wire.frames import (
    HEADER,
    INLINE,
    LENGTHS,
    MAGIC,
    MAX_RECORD,
    STRIPED,
    VERSION,
    WHOLE,
    WITH_MEMORY,
    Frame,
    FrameKind,
    SegmentSpec,
    align,
    encode_naming,
    encode_prefix,
    encode_whole,
)
from telegrad.wire.messages import Ack, Barrier, PythonCall, PythonReply
from telegrad.wire.tensor.specs import TensorSpec

CALL = PythonCall(3, b"definition")


def frame_bytes(
    request_id: int = 1, payload: bytes = b"", data: bytes = b"", kind: FrameKind = FrameKind.REQUEST
) -> bytes:
    """One whole frame; `data` is one inline segment."""
    segments = [SegmentSpec(len(data), INLINE, 0)] if data else []
    return encode_prefix(kind, request_id, 7, CALL, (), segments, len(payload), len(data)) + payload + data


def feed(reader: FrameReader, raw: bytes, piece: int = 1 << 30) -> list[Frame]:
    """Give the reader `raw` in pieces of at most `piece` bytes, as a socket would."""
    frames, view = [], memoryview(raw)
    while view:
        target = reader.target
        count = min(len(target), piece, len(view))
        assert count > 0, "the reader asks for nothing"
        target[:count] = view[:count]
        frames += reader.received(count)
        view = view[count:]
    return frames


def content(frame: Frame) -> tuple[object, ...]:
    data = b"" if frame.data is None else bytes(memoryview(frame.data).cast("B")[frame.data_offset :])
    length = sum(s.nbytes for s in frame.segments)
    return frame.kind, frame.request_id, frame.ack, frame.message, bytes(frame.payload), data[:length]


@pytest.mark.parametrize("payload", [b"", b"p" * 40_000, b"p" * 200_000])
@pytest.mark.parametrize("piece", [1 << 30, 1000, 7])
def test_round_trip_of_a_record_that_names_memory(payload: bytes, piece: int) -> None:
    tensors = (TensorSpec(0, 0, (8,), (), 0, 0, 0, "cuda:0"),)
    segments = (SegmentSpec(32, 5, 64),)
    raw = encode_naming(FrameKind.REQUEST, 9, 7, CALL, payload, tensors, segments)
    reader = FrameReader()
    for behind in (b"", encode_whole(FrameKind.NOTICE, 1, 0, Ack())):
        frames = feed(reader, raw + behind, piece)
        assert (frames[0].message, bytes(frames[0].payload)) == (CALL, payload)
        assert (frames[0].tensors, frames[0].segments) == (tensors, segments)
        assert reader.has_memory and reader.idle
        reader.has_memory = False
    feed(reader, encode_whole(FrameKind.NOTICE, 1, 0, Ack()), piece)
    assert not reader.has_memory, "the connection has nothing to see to"


@pytest.mark.parametrize("kind", FrameKind)
@pytest.mark.parametrize("payload", [b"", b"p", b"p" * 40_000])
@pytest.mark.parametrize("data", [b"", b"d" * 16, b"d" * 20_000])
def test_round_trip_of_the_record_alone(kind: FrameKind, payload: bytes, data: bytes) -> None:
    tensors = (TensorSpec(0, 0, (len(data),), (), 0, -1, 0),) if data else ()
    raw = encode_whole(kind, 9, 7, CALL, payload, tensors, data)
    for piece in (1 << 30, 1000, 7):
        reader = FrameReader()
        (frame,) = feed(reader, raw, piece)
        assert (frame.kind, frame.request_id, frame.ack, frame.message) == (kind, 9, 7, CALL)
        assert (bytes(frame.payload), frame.data or b"", frame.tensors) == (payload, data, tensors)
        assert reader.idle


@pytest.mark.parametrize("kind", FrameKind)
@pytest.mark.parametrize(("payload", "data"), [(b"", b""), (b"p" * 100, b""), (b"", b"d" * 100), (b"p", b"d" * 1000)])
def test_round_trip(kind: FrameKind, payload: bytes, data: bytes) -> None:
    reader = FrameReader()
    (frame,) = feed(reader, frame_bytes(9, payload, data, kind))
    assert content(frame) == (kind, 9, 7, CALL, payload, data)
    assert reader.idle
    assert "9" in repr(frame)


def test_split_at_every_byte() -> None:
    raw = frame_bytes(1, b"payload", b"data" * 9) + frame_bytes(2)
    for cut in range(len(raw) + 1):
        reader = FrameReader()
        frames = feed(reader, raw[:cut]) + feed(reader, raw[cut:])
        assert [f.request_id for f in frames] == [1, 2]
        assert content(frames[0])[4:] == (b"payload", b"data" * 9)
        assert reader.idle


def test_byte_by_byte() -> None:
    raw = frame_bytes(1, b"payload", b"data") * 3
    reader = FrameReader()
    frames = feed(reader, raw, piece=1)
    assert len(frames) == 3
    assert not any(feed(reader, raw[:-1], piece=1)[2:])
    assert not reader.idle


def test_many_frames_in_one_read() -> None:
    raws = [frame_bytes(i, bytes([i % 256]) * (i % 50)) for i in range(2000)]
    frames = feed(FrameReader(), b"".join(raws))
    assert [f.request_id for f in frames] == list(range(2000))
    assert all(bytes(f.payload) == bytes([i % 256]) * (i % 50) for i, f in enumerate(frames))


@pytest.mark.parametrize(
    "size", [READ_SIZE // 2 - 200, READ_SIZE // 2, READ_SIZE - 1, READ_SIZE, READ_SIZE + 1, 3_000_000]
)
@pytest.mark.parametrize("where", ["payload", "data"])
@pytest.mark.parametrize("piece", [1 << 30, 65_536, 40_001])
def test_large_frames_between_small_ones(size: int, where: str, piece: int) -> None:
    bulk = random.Random(size).randbytes(size)
    raw = frame_bytes(1) + frame_bytes(2, **{where: bulk}) + frame_bytes(3, b"after")
    frames = feed(FrameReader(), raw, piece)
    assert [f.request_id for f in frames] == [1, 2, 3]
    assert content(frames[1])[4:] == ((bulk, b"") if where == "payload" else (b"", bulk))
    assert bytes(frames[2].payload) == b"after"


def test_a_frame_keeps_its_bytes_when_the_buffer_is_used_again() -> None:
    reader = FrameReader()
    (first,) = feed(reader, frame_bytes(1, b"first", b"11111"))
    feed(reader, frame_bytes(2, b"other", b"22222"))
    assert content(first)[4:] == (b"first", b"11111")
    memoryview(first.data)[0] = 9  # and the bytes of its tensors may be written to


def test_inline_bytes_of_large_frames_are_aligned() -> None:
    taken: list[bytearray] = []

    def allocate(count: int) -> bytearray:
        taken.append(bytearray(count))
        return taken[-1]

    (frame,) = feed(FrameReader(allocate), frame_bytes(1, b"odd", b"x" * READ_SIZE))
    assert frame.data is taken[0]
    assert frame.data_offset % 64 == 0
    assert align(0) == 0
    assert align(1) == align(64) == 64
    assert align(17, 16) == 32


LYING = {
    "magic": HEADER.pack(b"HT", VERSION, WHOLE, 10),
    "version": HEADER.pack(MAGIC, VERSION + 1, WHOLE, 10),
    "form": HEADER.pack(MAGIC, VERSION, 4, 10),
    "streams": HEADER.pack(MAGIC, VERSION, STRIPED, 10) + LENGTHS.pack(0, 2**24),
    "length of the record": HEADER.pack(MAGIC, VERSION, WHOLE, MAX_RECORD + 1),
    "length of the payload": HEADER.pack(MAGIC, VERSION, WITH_MEMORY, 10) + LENGTHS.pack(2**63, 0),
    "length of the data": HEADER.pack(MAGIC, VERSION, WITH_MEMORY, 10) + LENGTHS.pack(0, 2**63),
}


@pytest.mark.parametrize("what", LYING)
def test_headers_that_lie(what: str) -> None:
    def allocate(count: int) -> bytearray:
        raise AssertionError(f"{count} bytes were taken for a frame that is refused")

    with pytest.raises(ProtocolError):
        feed(FrameReader(allocate), LYING[what])


def test_a_stranger_who_speaks_http() -> None:
    with pytest.raises(ProtocolError, match="does not speak this protocol"):
        feed(FrameReader(), b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl\r\n\r\n")


def test_the_limit_on_a_frame_holds_before_memory_is_taken() -> None:
    reader = FrameReader(max_frame=10_000)
    assert len(feed(reader, frame_bytes(1, b"x" * 9000))) == 1
    with pytest.raises(ProtocolError, match="over the limit"):
        feed(reader, frame_bytes(2, b"x" * 10_001))


def test_a_truncated_frame_is_not_idle() -> None:
    reader = FrameReader()
    assert feed(reader, frame_bytes(1, b"x" * 10)[:-1]) == []
    assert not reader.idle
    large = FrameReader()
    assert feed(large, frame_bytes(1, b"x" * 1_000_000)[:-1]) == []
    assert not large.idle


@pytest.mark.parametrize("message", [[999], [1], [1, 2], [1, "x", b"", 0.0], "text", None, {}, [41, 1, 2, 3]])
def test_records_with_something_else_than_a_message(message: object) -> None:
    record = msgspec.msgpack.encode([1, 1, 0, message])
    header = HEADER.pack(MAGIC, VERSION, WHOLE, len(record))
    with pytest.raises(ProtocolError, match="malformed"):
        feed(FrameReader(), header + record)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([Ack(), PythonReply(), CALL, Barrier("k", "w", 3)]),
            st.binary(max_size=300),
            st.sampled_from([0, 0, 0, 5, 70_000, 200_000]),
        ),
        max_size=6,
    ),
    st.lists(st.integers(1, 100_000), min_size=1, max_size=5),
)
def test_any_frames_in_any_pieces(frames: list[tuple[object, bytes, int]], pieces: list[int]) -> None:
    raw = b"".join(
        encode_prefix(FrameKind.NOTICE, i, 0, message, (), [SegmentSpec(extra, INLINE, 0)], len(payload), extra)
        + payload
        + b"e" * extra
        if extra
        else encode_whole(FrameKind.NOTICE, i, 0, message, payload)
        for i, (message, payload, extra) in enumerate(frames)
    )
    reader, got, at, turn = FrameReader(), [], 0, 0
    while at < len(raw):
        piece = raw[at : at + pieces[turn % len(pieces)]]
        got += feed(reader, piece)
        at, turn = at + len(piece), turn + 1
    assert [(f.message, bytes(f.payload)) for f in got] == [(m, p) for m, p, _ in frames]
    assert reader.idle


def test_the_header_is_what_the_page_says() -> None:
    assert HEADER.size == struct.calcsize("<2sBBI") == 8
    assert LENGTHS.size == struct.calcsize("<QQ") == 16
