"""Frames from a stream of bytes, whatever way these arrive.

It does no I/O: it says where to put the next bytes and is told how many came. Every length is checked before memory is
taken for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from telegrad.errors import ProtocolError
from telegrad.wire.frames import (
    BEGINS,
    HEADER,
    LENGTHS,
    MAGIC,
    MALFORMED,
    MAX_FRAME,
    NAMING_BEGINS,
    STRIPED,
    VERSION,
    WHOLE_BEGINS,
    WITH_MEMORY,
    Frame,
    align,
    decode,
    malformed,
    max_record,
    unpack_header,
)
from telegrad.wire.parts import STRIPE_FROM

READ_SIZE = 64 * 1024
_HEADER_BYTES = HEADER.size
_STRIPED_BEGINS = BEGINS[STRIPED]
_RECORD_ALONE = WHOLE_BEGINS, NAMING_BEGINS
_WITH_LENGTHS = BEGINS[WITH_MEMORY], _STRIPED_BEGINS


class Arrival(Protocol):
    """The segments of a frame that come over several streams."""

    here: int  # bytes of them on the stream of the frame itself

    def is_complete(self) -> bool:
        """Asked when those are there: whether the others are. If not, nothing is to be read until they are."""


class Upload(Protocol):
    """Takes the segments of a frame on, to a GPU, while they are coming."""

    def part(self, start: int, stop: int) -> Callable[[int], None]:
        """Somebody reads the bytes from `start` to `stop`: what to call with the place that was reached."""

    def prepare(self) -> None:
        """They have begun to read: get ready for what comes. Takes a while."""


class _Lengths(NamedTuple):
    record: int
    payload: int
    data: int  # the inline segments


class _Large(NamedTuple):
    """A frame that has memory of its own."""

    lengths: _Lengths
    memory: Any
    start: int  # where it begins there
    frame: Frame | None  # its record, if all of that had come when it began


class FrameReader:
    """Turns a stream of bytes into frames.

    Small frames are cut from one buffer that is read into again and again. A frame that does not fit gets memory of its
    own from `allocate`, and its remaining bytes are read straight into that. If its segments come over several streams,
    `arriving` is given their memory, and the frame is complete when the parts that come elsewhere are.
    """

    def __init__(self, allocate: Callable[[int], Any] = bytearray, max_frame: int = MAX_FRAME) -> None:
        self._allocate = allocate
        self._max_frame, self._max_record = max_frame, max_record(max_frame)
        self._max_whole = min(max_frame, READ_SIZE)
        self._buffer = bytearray(READ_SIZE)
        self._view = memoryview(self._buffer)
        self._start = 0  # what was read and is no whole frame yet lies between these two
        self._end = 0
        self.target = self._view  # where the next bytes of the stream belong
        self.has_memory = False  # whether a frame was read since it was last cleared whose memory is to be found
        self._large: _Large | None = None  # one too large for the buffer; the target is its rest
        self.arriving: Callable[[memoryview, Upload | None], Arrival] | None = None  # where there are several streams
        # Given the record of a large frame, its memory, and which bytes of that are the segments that begin to come.
        self.uploading: Callable[[Frame, Any, int, int], Upload | None] | None = None
        self._reached: Callable[[int], None] | None = None  # of that, for this stream's part of the segments
        self._here = 0  # the end of that part
        self.on_large: Callable[[], None] | None = None  # called when a frame begins that could use several
        # Called with its bytes before memory is taken for a large frame; raises ProtocolError if there is no room.
        self.before_large: Callable[[int], None] | None = None
        self._arrival: Arrival | None = None

    @property
    def waiting(self) -> bool:
        """Whether a frame lacks nothing but what comes over other streams: then there is no target."""
        return self._arrival is not None and not self.target

    @property
    def reserved(self) -> int:
        """Bytes of the large frame that has begun and not ended."""
        large = self._large
        return 0 if large is None else sum(large[0])

    @property
    def idle(self) -> bool:
        """True between frames: the stream may end here without a loss."""
        return self._large is None and self._start == self._end

    def received(self, count: int) -> list[Frame]:
        """`count` bytes were put into the target; the frames that are complete now."""
        view = self._view
        try:
            if self.target is view and count >= _HEADER_BYTES:  # usually that is one frame, and nothing else
                begins, record_bytes = unpack_header(view)
                if record_bytes == count - _HEADER_BYTES <= self._max_whole:
                    if begins == WHOLE_BEGINS:
                        return [decode(view[_HEADER_BYTES:count])]
                    if begins == NAMING_BEGINS:
                        self.has_memory = True
                        return [decode(view[_HEADER_BYTES:count])]
            return self._received_of_large(count) if self._large is not None else self._received_in_buffer(count)
        except MALFORMED as error:
            raise malformed(error) from error

    def _received_in_buffer(self, count: int) -> list[Frame]:
        frames: list[Frame] = []
        view, start, limit = self._view, self._start, self._end + count
        while (begin := start + _HEADER_BYTES) <= limit:
            begins, record_bytes = unpack_header(view, start)
            end = begin + record_bytes
            if begins in _RECORD_ALONE and end <= limit and record_bytes <= self._max_whole:
                frames.append(decode(view[begin:end]))
                if begins == NAMING_BEGINS:
                    self.has_memory = True
            else:
                lengths = self._lengths(begins, record_bytes, begin, limit)
                if lengths is None:
                    break
                begin += LENGTHS.size * (begins in _WITH_LENGTHS)
                end = begin + sum(lengths)
                if begins == _STRIPED_BEGINS or (end > limit and end - start > READ_SIZE // 2):
                    self._begin_large(lengths, view[begin:limit], begins == _STRIPED_BEGINS)
                    return frames
                if end > limit:
                    break
                frames.append(self._read_with_memory(lengths, begin))
            start = end
        if start < limit:
            self._keep(start, limit)
        elif self._end:
            self._keep(0, 0)
        return frames

    def _lengths(self, begins: bytes, record: int, begin: int, limit: int) -> _Lengths | None:
        """Those of a frame; None if they have not come. Refuses what is not this protocol, or more than may come."""
        if begins not in BEGINS:
            raise _not_understood(begins)
        payload = data = 0
        if begins in _WITH_LENGTHS:
            if begin + LENGTHS.size > limit:
                return None
            payload, data = LENGTHS.unpack_from(self._view, begin)
        if record > self._max_record or record + payload + data > self._max_frame:
            raise ProtocolError(
                f"a frame of {record} + {payload} + {data} bytes is over the limit ({self._max_record} for its record, "
                f"{self._max_frame} in all)"
            )
        if begins == _STRIPED_BEGINS and (data < STRIPE_FROM or self.arriving is None):
            raise ProtocolError(
                f"a frame of {data} bytes of tensors comes over several connections that this one does not have"
            )
        return _Lengths(record, payload, data)

    def _keep(self, start: int, end: int) -> None:
        """What is between these two in the buffer is no whole frame yet: the next bytes belong behind it."""
        if end > READ_SIZE // 2:
            remaining = self._buffer[start:end]
            start, end = 0, len(remaining)
            self._view[:end] = remaining
        self._start, self._end = start, end
        self.target = self._view[end:] if end else self._view

    def _read_with_memory(self, lengths: _Lengths, begin: int) -> Frame:
        """A frame with more than its record. Tensors will alias a copy, so the buffer is free to be read into again."""
        middle = begin + lengths.record
        end = middle + lengths.payload
        frame = decode(self._view[begin:middle])
        frame.payload = bytes(self._view[middle:end])
        frame.data = self._buffer[end : end + lengths.data] if lengths.data else None
        self.has_memory = True
        return frame

    def _begin_large(self, lengths: _Lengths, have: memoryview, is_striped: bool) -> None:
        """A frame gets memory of its own; `have` is what has come of it."""
        lead = lengths.record + lengths.payload
        total = lead + lengths.data
        if self.before_large is not None:
            self.before_large(total)
        start = align(lead) - lead  # so that the inline segments are aligned in memory
        memory = self._allocate(start + total)
        view = memoryview(memory).cast("B")[start : start + total]
        frame = decode(have[: lengths.record]) if len(have) >= lengths.record else None
        upload: Upload | None = None
        if self.uploading is not None and frame is not None and frame.segments:
            upload = frame.upload = self.uploading(frame, memory, start + lead, lengths.data)
        self._here = lengths.data
        if is_striped:
            assert self.arriving is not None
            self._arrival = self.arriving(view[lead:], upload)
            self._here = self._arrival.here
            view = view[: lead + self._here]
        elif total >= STRIPE_FROM and self.on_large is not None:
            self.on_large()
        view[: len(have)] = have
        self._reached = None if upload is None else upload.part(0, self._here)
        self._large, self.target = _Large(lengths, memory, start, frame), view[len(have) :]
        self._start = self._end = 0
        if upload is not None:
            upload.prepare()

    def _received_of_large(self, count: int) -> list[Frame]:
        assert self._large is not None
        self.target = self.target[count:]
        if self._reached is not None:
            self._reached(self._here - len(self.target))
        if self.target:
            return []
        if self._arrival is not None:
            if not self._arrival.is_complete():
                return []
            self._arrival = None
        large, self._large, self._reached, self.target = self._large, None, None, self._view
        self.has_memory = True
        return [_frame_in_place(large)]


def _frame_in_place(large: _Large) -> Frame:
    lengths, memory, start, frame = large
    view = memoryview(memory).cast("B")
    middle = start + lengths.record
    end = middle + lengths.payload
    if frame is None:
        frame = decode(view[start:middle])
    frame.is_large = True
    if lengths.payload:
        frame.payload = view[middle:end]  # type: ignore[assignment] # read like bytes
    if lengths.data:
        frame.data, frame.data_offset = memory, end
    return frame


def _not_understood(begins: bytes) -> ProtocolError:
    """What is wrong with how a frame begins."""
    magic, version, form = begins[:2], begins[2], begins[3]
    if magic != MAGIC:
        return ProtocolError(f"a frame starts with {magic!r}, not {MAGIC!r}: the peer does not speak this protocol")
    if version != VERSION:
        return ProtocolError(f"the peer speaks version {version} of the protocol, this worker version {VERSION}")
    return ProtocolError(f"unknown form {form} of a frame")
