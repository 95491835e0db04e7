"""A frame is one message on a stream: a fixed header, the message record, its payload, and the bytes of its tensors.

    header (40 bytes) | head: msgpack [message, tensor table, segment table] | payload | inline segments

Segments are runs of raw tensor bytes. One is inline (it follows the payload) or lies in a shared-memory block that the
table names. A few small tensors need no table: their bytes follow the payload (`tensor/small.py`). `FrameReader` does
no I/O: the transport asks it where to put the next bytes and tells it how many came. Every length is checked before
memory is taken for it.
"""

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Protocol

import msgspec
from torch import Tensor

from telegrad.errors import ProtocolError
from telegrad.wire.messages import AnyMessage
from telegrad.wire.parts import STRIPE_FROM
from telegrad.wire.tensor.small import rebuild_small
from telegrad.wire.tensor.tensors import TensorSpec, rebuild

MAGIC = b"Tg"
VERSION = 1
HEADER = struct.Struct("<2sBBIQQQQ")  # magic, version, kind, head, payload, data lengths, request id, ack
_HEADER_SIZE = HEADER.size
_pack_header = HEADER.pack
ALIGNMENT = 64
INLINE = -1  # the block number of a segment that travels in the frame itself
_RETURNED = -2  # those from here down are the receiver's own blocks, which come back

READ_SIZE = 64 * 1024
MAX_HEAD = 64 * 2**20
MAX_FRAME = 64 * 2**30


class FrameKind(IntEnum):
    """What a frame is to its receiver. The kinds are all there is: a reply ends its request, a notice has no reply."""

    REQUEST = 1
    REPLY = 2
    FAILURE = 3
    NOTICE = 4


REQUEST, REPLY, FAILURE, NOTICE = map(int, FrameKind)  # as they are in frames

# How the header of a frame of each kind begins, and the rest of it: what is read of every frame.
_KINDS = {MAGIC + bytes([VERSION, kind]): int(kind) for kind in FrameKind}
_unpack_fields = struct.Struct("<4sIQQQQ").unpack_from

# What is added to the kind of a frame whose inline segments come over several streams (`parts.py`).
STRIPED = 16
_STRIPED_KINDS = {MAGIC + bytes([VERSION, kind + STRIPED]): MAGIC + bytes([VERSION, kind]) for kind in FrameKind}


class SegmentSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where one run of tensor bytes is: `offset` counts from the start of the block, or of the inline data.

    `block` is the number of a block of the sender, `INLINE`, or `returned` of the number of a block of the receiver.
    """

    nbytes: int
    block: int
    offset: int


def returned(block: int) -> int:
    """What a segment names instead of a block of its sender: a block that the receiver had lent to it, from 0 on. The
    same function leads back."""
    return _RETURNED - block


# The part of a frame that is decoded first and checked whole.
Head = tuple[AnyMessage, tuple[TensorSpec, ...], tuple[SegmentSpec, ...]]


class Frame(msgspec.Struct, eq=False):
    """One received message. `data` holds the inline segments, or the bytes of small tensors, which have no segments;
    `buffers` is one writable buffer per segment, once the connection has found them."""

    kind: int
    request_id: int
    ack: int
    message: AnyMessage
    tensors: tuple[TensorSpec, ...]
    segments: tuple[SegmentSpec, ...]
    payload: Any
    data: Any
    data_offset: int
    is_large: bool = False  # whether it holds more than its sender should keep: it has memory of its own
    buffers: Sequence[Any] = ()
    arrived: int = 0  # set by who reads it, where the order of work on a GPU depends on it
    read_at: float = 0.0  # when, if that is still to be recorded

    def take_tensors(self) -> list[Tensor]:
        """Its tensors. Their memory is from then on theirs alone: nothing else keeps it alive."""
        if not self.tensors:
            return []
        data = self.data
        self.data = None
        if data is not None and not self.segments:
            return rebuild_small(self.tensors, data, self.data_offset)
        buffers, self.buffers = self.buffers, ()
        return rebuild(self.tensors, buffers)

    def __repr__(self) -> str:
        kind = FrameKind(self.kind).name.lower()
        return f"<{kind} {self.request_id}: {type(self.message).__name__}, {len(self.tensors)} tensors>"


_encode_head = msgspec.msgpack.Encoder().encode
_decode_head: Callable[[Any], Head] = msgspec.msgpack.Decoder(Head).decode
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what that raises


def encode_prefix(
    kind: int,
    request_id: int,
    ack: int,
    message: AnyMessage,
    tensors: Sequence[TensorSpec] = (),
    segments: Sequence[SegmentSpec] = (),
    payload_bytes: int = 0,
    data_bytes: int = 0,
) -> bytes:
    """Header and head of a frame; the caller sends payload and inline segments right behind it."""
    head = _encode_head((message, tensors, segments))
    return _pack_header(MAGIC, VERSION, kind, len(head), payload_bytes, data_bytes, request_id, ack) + head


def encode_small(
    kind: int,
    request_id: int,
    ack: int,
    message: AnyMessage,
    payload: bytes,
    tensors: Sequence[TensorSpec],
    data: bytes,
) -> bytes:
    """A whole frame whose tensors, if there are any, are small: their bytes follow the payload."""
    head = _encode_head((message, tensors, ()))
    return (
        _pack_header(MAGIC, VERSION, kind, len(head), len(payload), len(data), request_id, ack) + head + payload + data
    )


def align(offset: int, alignment: int = ALIGNMENT) -> int:
    """The first multiple of `alignment` at or after `offset`."""
    return -(-offset // alignment) * alignment


class Arrival(Protocol):
    """The segments of a frame that come over several streams."""

    here: int  # bytes of them on the stream of the frame itself

    def is_complete(self) -> bool:
        """Asked when those are there: whether the others are. If not, nothing is to be read until they are."""


class FrameReader:
    """Turns a stream of bytes into frames.

    Small frames are cut from one buffer that is read into again and again. A frame that does not fit gets memory of its
    own from `allocate`, and its remaining bytes are read straight into that. If its segments come over several streams,
    `arriving` is given their memory, and the frame is complete when the parts that come elsewhere are.
    """

    def __init__(self, allocate: Callable[[int], Any] = bytearray, max_frame: int = MAX_FRAME) -> None:
        self._allocate = allocate
        self._max_frame = max_frame
        self._buffer = bytearray(READ_SIZE)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        # A frame too large for the buffer: its header fields, memory, where it starts there, its view, bytes so far.
        self._large: tuple[tuple[Any, ...], Any, int] | None = None
        self._large_view: memoryview = self._view[:0]
        self._large_filled = 0
        self.arriving: Callable[[memoryview], Arrival] | None = None  # where there are several streams
        self.on_large: Callable[[], None] | None = None  # called when a frame begins that could use several
        self._arrival: Arrival | None = None

    @property
    def waiting(self) -> bool:
        """Whether a frame lacks nothing but what comes over other streams: then there is no target."""
        return self._arrival is not None and self._large_filled == len(self._large_view)

    @property
    def idle(self) -> bool:
        """True between frames: the stream may end here without a loss."""
        return self._large is None and self._start == self._end

    def target(self) -> memoryview:
        """Where the next bytes of the stream belong."""
        if self._large is not None:
            return self._large_view[self._large_filled :]
        if self._start == self._end:
            self._start = self._end = 0
            return self._view
        if self._end > READ_SIZE // 2:
            remaining = self._buffer[self._start : self._end]
            self._view[: len(remaining)] = remaining
            self._start, self._end = 0, len(remaining)
        return self._view[self._end :]

    def received(self, count: int) -> list[Frame]:
        """`count` bytes were put into the target; the frames that are complete now."""
        if self._large is not None:
            return self._received_of_large(count)
        frames: list[Frame] = []
        buffer, view, start = self._buffer, self._view, self._start
        self._end = limit = self._end + count
        while (begin := start + _HEADER_SIZE) <= limit:
            kind, head_bytes, payload_bytes, data_bytes, request_id, ack = fields = _unpack_fields(buffer, start)
            middle = begin + head_bytes
            end = middle + payload_bytes
            after = end + data_bytes
            if kind not in _KINDS or head_bytes > MAX_HEAD or after - begin > self._max_frame:
                if not self._is_striped(fields):
                    raise self._refusal(start)
                self._begin_large((_STRIPED_KINDS[kind], *fields[1:]), begin, after - begin, self.arriving)
                return frames
            if after > limit:
                if after - start > READ_SIZE // 2:
                    self._begin_large(fields, begin, after - begin)
                    return frames
                break
            try:
                message, tensors, segments = _decode_head(view[begin:middle])
            except _MALFORMED as error:
                raise _malformed(error) from error
            payload = bytes(view[middle:end]) if payload_bytes else b""
            # Tensors will alias this copy, so the buffer itself is free to be read into again.
            data = buffer[end:after] if data_bytes else None
            frames.append(Frame(_KINDS[kind], request_id, ack, message, tensors, segments, payload, data, 0))
            start = after
        self._start = start
        return frames

    def _received_of_large(self, count: int) -> list[Frame]:
        assert self._large is not None
        self._large_filled += count
        if self._large_filled < len(self._large_view):
            return []
        if self._arrival is not None:
            if not self._arrival.is_complete():
                return []
            self._arrival = None
        fields, memory, start = self._large
        self._large = None
        self._large_view = self._view[:0]
        return [_frame_in_place(fields, memory, start)]

    def _refusal(self, start: int) -> ProtocolError:
        """What is wrong with a header."""
        magic, version, kind, head, payload, data, _, _ = HEADER.unpack_from(self._buffer, start)
        if magic != MAGIC:
            text = f"a frame starts with {magic!r}, not {MAGIC!r}: the peer does not speak this protocol"
        elif version != VERSION:
            text = f"the peer speaks version {version} of the protocol, this worker version {VERSION}"
        elif kind not in map(int, FrameKind) and kind - STRIPED not in map(int, FrameKind):
            text = f"unknown frame kind {kind}"
        elif kind not in map(int, FrameKind):
            text = f"a frame of {data} bytes of tensors comes over several connections that this one does not have"
        else:
            text = (
                f"a frame of {head} + {payload} + {data} bytes is over the limit ({MAX_HEAD} for its head, "
                f"{self._max_frame} in all)"
            )
        return ProtocolError(text)

    def _is_striped(self, fields: tuple[Any, ...]) -> bool:
        """Whether a header that is none of the usual is right for a frame that comes over several streams."""
        kind, head, payload, data, _, _ = fields
        fits = head <= MAX_HEAD and head + payload + data <= self._max_frame
        return kind in _STRIPED_KINDS and data >= STRIPE_FROM and fits and self.arriving is not None

    def _begin_large(
        self,
        fields: tuple[Any, ...],
        begin: int,
        total: int,
        arriving: Callable[[memoryview], Arrival] | None = None,
    ) -> None:
        lead = fields[1] + fields[2]
        start = align(lead) - lead  # so that the inline segments are aligned in memory
        memory = self._allocate(start + total)
        view = memoryview(memory).cast("B")[start : start + total]
        have = self._end - begin
        if arriving is not None:
            self._arrival = arriving(view[lead:])
            view = view[: lead + self._arrival.here]
        elif total >= STRIPE_FROM and self.on_large is not None:
            self.on_large()
        view[:have] = self._view[begin : self._end]
        self._large, self._large_view, self._large_filled = (fields, memory, start), view, have
        self._start = self._end = 0


def _frame_in_place(fields: tuple[Any, ...], memory: Any, start: int) -> Frame:
    kind, head_bytes, payload_bytes, _, request_id, ack = fields
    view = memoryview(memory).cast("B")
    middle = start + head_bytes
    end = middle + payload_bytes
    return Frame(_KINDS[kind], request_id, ack, *decode_head(view[start:middle]), view[middle:end], memory, end, True)


def decode_head(raw: Any) -> Head:
    """The checked head of a frame."""
    try:
        return _decode_head(raw)
    except _MALFORMED as error:
        raise _malformed(error) from error


def _malformed(error: Exception) -> ProtocolError:
    return ProtocolError(f"the head of a frame is malformed: {error}")
