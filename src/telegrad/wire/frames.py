"""A frame is one message on a stream: a header, and a record with all that is small about it.

    header (8 bytes) | record: msgpack [kind, request id, ack, message, tensor table, payload, data, segments]
    header           | lengths (16 bytes) | record | payload | inline segments

Most frames are the record alone, and one call decodes it. A payload that is not small follows it, and so do inline
segments: runs of raw tensor bytes. Others are in a block of memory that the record names. A few small tensors need no
segments, their bytes are `data` (`tensor/small.py`). How frames are read from a stream is in `frame_reader.py`.
"""

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Annotated, Any

import msgspec
from torch import Tensor, inference_mode
from torch import is_inference_mode_enabled as _in_inference_mode

from telegrad.errors import ProtocolError
from telegrad.wire.messages import AnyMessage
from telegrad.wire.tensor.small import rebuild_small
from telegrad.wire.tensor.tensors import TensorSpec, rebuild

MAGIC = b"Tg"
VERSION = 4
HEADER = struct.Struct("<2sBBI")  # magic, version, form, length of the record
LENGTHS = struct.Struct("<QQ")  # of the payload and of the inline segments
# Forms: the record is all; or more follows it; or that comes over several streams, too (`parts.py`); or the record is
# all but names memory that the connection has to find, or is word between connections.
WHOLE, WITH_MEMORY, STRIPED, NAMING = range(4)
ALIGNMENT = 64
INLINE = -1  # the block number of a segment that travels in the frame itself
_RETURNED = -2  # those from here down are the receiver's own blocks, which come back

MAX_RECORD = 64 * 2**20
_LEAST_RECORD = 4 * 2**20
MAX_FRAME = 64 * 2**30


class FrameKind(IntEnum):
    """What a frame is to its receiver. The kinds are all there is: a reply ends its request, a notice has no reply."""

    REQUEST = 1
    REPLY = 2
    FAILURE = 3
    NOTICE = 4


REQUEST, REPLY, FAILURE, NOTICE = map(int, FrameKind)  # as they are in frames

BEGINS = tuple(
    MAGIC + bytes([VERSION, form]) for form in (WHOLE, WITH_MEMORY, STRIPED, NAMING)
)  # how frames of a form do
WHOLE_BEGINS, NAMING_BEGINS = BEGINS[WHOLE], BEGINS[NAMING]
_FAST_HEADER = struct.Struct("<4sI")  # the same header, read and written in less time
pack_header, unpack_header = _FAST_HEADER.pack, _FAST_HEADER.unpack_from


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
_NO_UPLOAD: Any = None


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
    upload = _NO_UPLOAD  # what took its segments on to a GPU while they came, until the connection has found them
    arrived = 0  # set by who reads it, where the order of work on a GPU depends on it
    read_at = 0.0  # when, if that is still to be recorded

    def take_tensors(self) -> list[Tensor]:
        """Its tensors. Their memory is from then on theirs alone: nothing else keeps it alive."""
        if not self.tensors:
            return []
        if _in_inference_mode():  # of the thread that reads, which may do so for another
            with inference_mode(False):
                return self.take_tensors()
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
decode: Callable[[Any], Frame] = msgspec.msgpack.Decoder(Frame).decode  # a record
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what that raises


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
    return pack_header(WHOLE_BEGINS, len(record)) + record


def encode_naming(
    kind: int,
    request_id: int,
    ack: int,
    message: AnyMessage,
    payload: bytes = b"",
    tensors: Sequence[TensorSpec] = (),
    segments: Sequence[SegmentSpec] = (),
) -> bytes:
    """A frame that is the record alone, but not for the connection: its tensors are in blocks, or it is about these."""
    record = _encode((kind, request_id, ack, message, tensors, payload, None, segments))
    return pack_header(NAMING_BEGINS, len(record)) + record


def encode_prefix(
    kind: int,
    request_id: int,
    ack: int,
    message: AnyMessage,
    tensors: Sequence[TensorSpec] = (),
    segments: Sequence[SegmentSpec] = (),
    payload_bytes: int = 0,
    data_bytes: int = 0,
    form: int = WITH_MEMORY,
) -> bytes:
    """A frame with more to it, up to its record; the caller sends payload and inline segments right behind that."""
    record = _encode((kind, request_id, ack, message, tensors, b"", None, segments))
    return pack_header(BEGINS[form], len(record)) + LENGTHS.pack(payload_bytes, data_bytes) + record


def max_record(max_frame: int) -> int:
    """Bytes that the record of a frame may have for one who takes frames of so many: decoded it is some twenty times as
    large, so that who takes little of others takes fewer tensors in one message, too."""
    return min(MAX_RECORD, max(_LEAST_RECORD, max_frame // 256))


def align(offset: int, alignment: int = ALIGNMENT) -> int:
    """The first multiple of `alignment` at or after `offset`."""
    return -(-offset // alignment) * alignment


def decode_record(raw: Any) -> Frame:
    """The checked record of a frame."""
    try:
        return decode(raw)
    except MALFORMED as error:
        raise malformed(error) from error


def malformed(error: Exception) -> ProtocolError:
    """What is made of one of `MALFORMED`."""
    return ProtocolError(f"the record of a frame is malformed: {error}")
