"""A frame is one message on a stream: a header, and a record with all that is small about it.

    header (8 bytes) | record: msgpack [kind, request id, ack, message, tensor table, payload, data, segments]
    header           | lengths (16 bytes) | record | payload | inline segments

Most frames are the record alone, and one call decodes it. A payload that is not small follows it, and so do segments:
runs of raw tensor bytes, inline or in a shared-memory block that the record names. A few small tensors need no
segments, their bytes are `data` (`tensor/small.py`). `FrameReader` does no I/O: it says where to put the next bytes and
is told how many came. Every length is checked before memory is taken for it.
"""

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Annotated, Any

import msgspec
from torch import Tensor

from telegrad.errors import ProtocolError
from telegrad.wire.messages import AnyMessage
from telegrad.wire.tensor.small import rebuild_small
from telegrad.wire.tensor.tensors import TensorSpec, rebuild

MAGIC = b"Tg"
VERSION = 2
HEADER = struct.Struct("<2sBBI")  # magic, version, form, length of the record
LENGTHS = struct.Struct("<QQ")  # of the payload and of the inline segments
WHOLE, WITH_MEMORY = 0, 1  # forms: the record is all; or the connection has to see to what follows, or to its memory
ALIGNMENT = 64
INLINE = -1  # the block number of a segment that travels in the frame itself
_RETURNED = -2  # those from here down are the receiver's own blocks, which come back

READ_SIZE = 64 * 1024
MAX_RECORD = 64 * 2**20
MAX_FRAME = 64 * 2**30


class FrameKind(IntEnum):
    """What a frame is to its receiver. The kinds are all there is: a reply ends its request, a notice has no reply."""

    REQUEST = 1
    REPLY = 2
    FAILURE = 3
    NOTICE = 4


REQUEST, REPLY, FAILURE, NOTICE = map(int, FrameKind)  # as they are in frames

# How frames of each form begin.
WHOLE_FRAME, FRAME_WITH_MEMORY = (MAGIC + bytes([VERSION, form]) for form in (WHOLE, WITH_MEMORY))
_HEADER = struct.Struct("<4sI")
_HEADER_BYTES = _HEADER.size
_pack_header, _unpack_header = _HEADER.pack, _HEADER.unpack_from


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


_Number = Annotated[int, msgspec.Meta(ge=0)]
_NO_BUFFERS: Sequence[Any] = ()


class Frame(msgspec.Struct, array_like=True, forbid_unknown_fields=True, eq=False, dict=True):
    """One received message: the record, checked whole as it is decoded, and below what its receiver adds."""

    kind: Annotated[int, msgspec.Meta(ge=1, le=4)]  # a `FrameKind`
    request_id: _Number
    ack: _Number
    message: AnyMessage
    tensors: tuple[TensorSpec, ...] = ()
    payload: bytes = b""
    data: bytearray | None = None  # the bytes of small tensors, or the inline segments
    segments: tuple[SegmentSpec, ...] = ()

    data_offset = 0  # where those begin in `data`
    is_large = False  # whether it holds more than its sender should keep: it has memory of its own
    buffers = _NO_BUFFERS  # one writable buffer per segment, once the connection has found them
    arrived = 0  # set by who reads it, where the order of work on a GPU depends on it
    read_at = 0.0  # when, if that is still to be recorded

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


_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[Any], Frame] = msgspec.msgpack.Decoder(Frame).decode
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what that raises


def encode_whole(
    kind: int,
    request_id: int,
    ack: int,
    message: AnyMessage,
    payload: bytes = b"",
    tensors: Sequence[TensorSpec] = (),
    data: bytes = b"",
) -> bytes:
    """A frame that is the record alone: what is in it is small, and so are its tensors, whose bytes are `data`."""
    if tensors:
        record = _encode((kind, request_id, ack, message, tensors, payload, data))
    else:
        record = _encode((kind, request_id, ack, message, (), payload))
    return _pack_header(WHOLE_FRAME, len(record)) + record


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
    """A frame with more to it, up to its record; the caller sends payload and inline segments right behind that."""
    record = _encode((kind, request_id, ack, message, tensors, b"", None, segments))
    return _pack_header(FRAME_WITH_MEMORY, len(record)) + LENGTHS.pack(payload_bytes, data_bytes) + record


def align(offset: int, alignment: int = ALIGNMENT) -> int:
    """The first multiple of `alignment` at or after `offset`."""
    return -(-offset // alignment) * alignment


class FrameReader:
    """Turns a stream of bytes into frames.

    Small frames are cut from one buffer that is read into again and again. A frame that does not fit gets memory of its
    own from `allocate`, and its remaining bytes are read straight into that.
    """

    def __init__(self, allocate: Callable[[int], Any] = bytearray, max_frame: int = MAX_FRAME) -> None:
        self._allocate = allocate
        self._max_frame = max_frame
        self._max_whole = min(max_frame, READ_SIZE)
        self._buffer = bytearray(READ_SIZE)
        self._view = memoryview(self._buffer)
        self._start = 0  # what was read and is no whole frame yet lies between these two
        self._end = 0
        self.target = self._view  # where the next bytes of the stream belong
        self.has_memory = False  # whether a frame was read since it was last cleared whose memory is to be found
        # A frame too large for the buffer: its lengths, its memory, where it starts there; the target is its rest.
        self._large: tuple[tuple[int, int, int], Any, int] | None = None

    @property
    def idle(self) -> bool:
        """True between frames: the stream may end here without a loss."""
        return self._large is None and self._start == self._end

    def received(self, count: int) -> list[Frame]:
        """`count` bytes were put into the target; the frames that are complete now."""
        view = self._view
        if self.target is view and count >= _HEADER_BYTES:  # usually that is one frame, and nothing else
            form, record_bytes = _unpack_header(view)
            if form == WHOLE_FRAME and record_bytes == count - _HEADER_BYTES <= self._max_whole:
                try:
                    return [_decode(view[_HEADER_BYTES:count])]
                except _MALFORMED as error:
                    raise _malformed(error) from error
        return self._received_of_large(count) if self._large is not None else self._received_in_buffer(count)

    def _received_in_buffer(self, count: int) -> list[Frame]:
        frames: list[Frame] = []
        view, start, limit = self._view, self._start, self._end + count
        while (begin := start + _HEADER_BYTES) <= limit:
            form, record_bytes = _unpack_header(view, start)
            end = begin + record_bytes
            if form == WHOLE_FRAME and end <= limit and record_bytes <= self._max_whole:
                try:
                    frames.append(_decode(view[begin:end]))
                except _MALFORMED as error:
                    raise _malformed(error) from error
            else:
                lengths = self._lengths(form, record_bytes, begin, limit)
                if lengths is None:
                    break
                begin += LENGTHS.size * (form == FRAME_WITH_MEMORY)
                end = begin + sum(lengths)
                if end > limit:
                    if end - start > READ_SIZE // 2:
                        self._begin_large(lengths, view[begin:limit])
                        return frames
                    break
                frames.append(self._read_with_memory(lengths, begin))
            start = end
        if start < limit:
            self._keep(start, limit)
        elif self._end:
            self._keep(0, 0)
        return frames

    def _lengths(self, form: bytes, record: int, begin: int, limit: int) -> tuple[int, int, int] | None:
        """Of a frame's record, payload and inline segments; None if they have not come. Refuses what is none of this
        protocol, or more than may come."""
        payload = data = 0
        if form == FRAME_WITH_MEMORY:
            if begin + LENGTHS.size > limit:
                return None
            payload, data = LENGTHS.unpack_from(self._view, begin)
        elif form != WHOLE_FRAME:
            raise _not_understood(form)
        if record > MAX_RECORD or record + payload + data > self._max_frame:
            raise ProtocolError(
                f"a frame of {record} + {payload} + {data} bytes is over the limit ({MAX_RECORD} for its record, "
                f"{self._max_frame} in all)"
            )
        return record, payload, data

    def _keep(self, start: int, end: int) -> None:
        """What is between these two in the buffer is no whole frame yet: the next bytes belong behind it."""
        if end > READ_SIZE // 2:
            remaining = self._buffer[start:end]
            start, end = 0, len(remaining)
            self._view[:end] = remaining
        self._start, self._end = start, end
        self.target = self._view[end:] if end else self._view

    def _read_with_memory(self, lengths: tuple[int, int, int], begin: int) -> Frame:
        """A frame with more than its record. Tensors will alias a copy, so the buffer is free to be read into again."""
        record_bytes, payload_bytes, data_bytes = lengths
        middle = begin + record_bytes
        end = middle + payload_bytes
        frame = decode_record(self._view[begin:middle])
        frame.payload = bytes(self._view[middle:end])
        frame.data = self._buffer[end : end + data_bytes] if data_bytes else None
        self.has_memory = True
        return frame

    def _received_of_large(self, count: int) -> list[Frame]:
        assert self._large is not None
        self.target = self.target[count:]
        if self.target:
            return []
        lengths, memory, start = self._large
        self._large, self.target = None, self._view
        self.has_memory = True
        return [_frame_in_place(lengths, memory, start)]

    def _begin_large(self, lengths: tuple[int, int, int], have: memoryview) -> None:
        """A frame gets memory of its own; `have` is what has come of it."""
        lead = lengths[0] + lengths[1]
        total = lead + lengths[2]
        start = align(lead) - lead  # so that the inline segments are aligned in memory
        memory = self._allocate(start + total)
        view = memoryview(memory).cast("B")[start : start + total]
        view[: len(have)] = have
        self._large, self.target = (lengths, memory, start), view[len(have) :]
        self._start = self._end = 0


def _frame_in_place(lengths: tuple[int, int, int], memory: Any, start: int) -> Frame:
    record_bytes, payload_bytes, data_bytes = lengths
    view = memoryview(memory).cast("B")
    middle = start + record_bytes
    end = middle + payload_bytes
    frame = decode_record(view[start:middle])
    frame.is_large = True
    if payload_bytes:
        frame.payload = view[middle:end]  # type: ignore[assignment] # read like bytes
    if data_bytes:
        frame.data, frame.data_offset = memory, end
    return frame


def decode_record(raw: Any) -> Frame:
    """The checked record of a frame."""
    try:
        return _decode(raw)
    except _MALFORMED as error:
        raise _malformed(error) from error


def _malformed(error: Exception) -> ProtocolError:
    return ProtocolError(f"the record of a frame is malformed: {error}")


def _not_understood(form: bytes) -> ProtocolError:
    """What is wrong with how a frame begins."""
    magic, version = form[:2], form[2]
    if magic != MAGIC:
        return ProtocolError(f"a frame starts with {magic!r}, not {MAGIC!r}: the peer does not speak this protocol")
    if version != VERSION:
        return ProtocolError(f"the peer speaks version {version} of the protocol, this worker version {VERSION}")
    return ProtocolError(f"unknown form {form[3]} of a frame")
