"""A connection sends and receives whole messages over one stream, and decides which way tensor bytes go.

Small tensors travel in the frame. Large ones go through a shared block where the stream has a lane for descriptors:
one copy by the sender, none by the receiver. CUDA tensors stay on the GPU where both sides can reach it
(`device/channel.py`). The notices that keep the blocks in order are the connection's own business; nobody above sees
them.
"""

import ctypes
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from telegrad.cuda import host, order
from telegrad.errors import ProtocolError, SerializationError
from telegrad.transport.blocks import Borrower, Heap, Lender
from telegrad.transport.copying import Copier
from telegrad.transport.device.channel import DEVICE_NOTICES, DeviceChannel, is_of_device
from telegrad.transport.device.flags import Page
from telegrad.transport.stream import Stream, is_running
from telegrad.wire.frames import (
    INLINE,
    Frame,
    FrameKind,
    FrameReader,
    SegmentSpec,
    align,
    encode_prefix,
    encode_small,
    returned,
)
from telegrad.wire.messages import AnyMessage, ReleaseBlocks, RetireBlocks
from telegrad.wire.tensor.segments import HOST
from telegrad.wire.tensor.tensors import Segment, TensorSpec, segment_bytes, segment_view

log = logging.getLogger("telegrad.transport")

SHARE_FROM = 32 * 1024  # bytes of tensors in one message from which a shared block pays
LEND_LIMIT = 8 * 2**30  # bytes lent to one peer beyond which its socket, which pushes back, is used instead
_JOIN_UP_TO = 64 * 1024
_NOTICE = int(FrameKind.NOTICE)
_HOLD_UP_TO = 64  # small frames that may wait for one write
_PADDING = bytes(64)
_SMALL_ALIGNMENT = 16
_SMALL_PART = 4  # a block is given back if a fourth of it or more is in use

_ELSEWHERE = bytearray()  # ends the buffers of a message some of whose memory is not among them
_first_use = threading.Lock()  # of device memory, by any connection

heap = Heap()


def _nothing() -> None:
    pass


@functools.cache
def _say_once(number: int) -> None:
    log.warning("no shared memory (%s): tensors go through sockets, which is slower", os.strerror(number))


class Connection:
    """Messages over one stream. Any thread may send; one at a time may receive."""

    def __init__(self, stream: Stream, *, max_frame: int, on_blocked: Callable[[], None] = lambda: None) -> None:
        self.stream = stream
        self.on_blocked = on_blocked
        self.peer = "the peer"  # its name, for errors
        self.peer_takes = max_frame  # bytes in one message that it does not refuse
        self._reader = FrameReader(heap.allocate, max_frame)
        self._write_lock = threading.Lock()
        self._lender = Lender() if stream.lane is not None else None
        self._sharing = True  # until there turns out to be no shared memory
        self._borrower = Borrower()
        self.devices: DeviceChannel | None = None  # once a CUDA tensor comes by
        self.copier = Copier()
        self._outbox: deque[bytes] = deque()
        self.after_hold: Callable[[], None] = _nothing  # called when what was held back has been written in time
        self.closed = False

    def __repr__(self) -> str:
        return f"<Connection over {self.stream.kind}{' with shared memory' if self._lender else ''}>"

    # --- sending ---

    def send(
        self,
        kind: FrameKind,
        request_id: int,
        ack: int,
        message: AnyMessage,
        payload: bytes = b"",
        tensors: Sequence[TensorSpec] = (),
        memory: Sequence[Segment] | bytes = (),
        *,
        deadline: float | None = None,
        hold: bool = False,
    ) -> bytes | None:
        """Send one message. With `hold` a small one may wait for the next send or `flush`, to share its write.

        `memory` is that of the tensors: segments, or the bytes of small ones. Returns the encoded frame if it is small
        and can be sent again as it is, to this peer, over any connection.
        """
        if not memory or isinstance(memory, bytes):
            frame = encode_small(kind, request_id, ack, message, payload, tensors, memory or b"")  # type: ignore[arg-type] # empty, or bytes
            if len(frame) <= _JOIN_UP_TO:
                if hold and len(self._outbox) < _HOLD_UP_TO:
                    self._outbox.append(frame)
                else:
                    self._write([frame], deadline)
                return frame
            buffers: list[Any] = [frame]
            self_contained = True
        else:
            buffers = self._with_segments(kind, request_id, ack, message, payload, tensors, memory)
            # Else tensors are in a block of this connection.
            self_contained = buffers[-1] is not payload and buffers[-1] is not _ELSEWHERE
        if sum(map(len, buffers)) > _JOIN_UP_TO:
            self._check_size(buffers)
            self._write(buffers, deadline)
            return None
        frame = b"".join(buffers)
        if hold and len(self._outbox) < _HOLD_UP_TO:
            self._outbox.append(frame)
        else:
            self._write([frame], deadline)
        return frame if self_contained else None

    def _check_size(self, buffers: Sequence[Any]) -> None:
        """Refuse here what the peer would refuse: sent all the same, it would end the connection again and again."""
        size = sum(map(len, buffers))
        if size > self.peer_takes:
            raise SerializationError(
                f"a message of {size} bytes is over the limit of {self.peer_takes} that {self.peer} has set for what "
                "it takes in; send it in parts, or raise `max_message_bytes` in the options of that worker"
            )

    def send_encoded(self, frame: bytes, deadline: float | None = None) -> None:
        """Send a small frame that was encoded before."""
        self._write([frame], deadline)

    def flush(self, deadline: float | None = None) -> None:
        """Write what was held back."""
        if self._outbox:
            self.send_encoded(b"", deadline)

    def tidy(self, before: float) -> bool:
        """Return the blocks that have been idle since `before`, and tell the peer which it need not keep either.

        Says whether the peer may have such news as well."""
        if self._lender is None:
            return False
        self._lender.trim(before)
        if self.devices is not None:
            self.devices.lender.trim(before)
        if self._has_notices():
            try:
                self.send_encoded(b"", time.monotonic())
            except (OSError, ValueError):
                log.debug("a peer hears of idle blocks with the next message")
        if self.devices is not None and (self.devices.lender.has_blocks or self.devices.borrower.mapped):
            return True
        return self._lender.has_blocks or self._borrower.mapped > 0

    def _write(self, buffers: list[Any], deadline: float | None) -> None:
        """Write, after what was held back. TimeoutError at the deadline, also if another thread is still writing."""
        if not self._write_lock.acquire(blocking=False):
            self._wait_to_write(deadline)
        held: list[bytes] = []
        try:
            if self._outbox or self._has_notices():
                notices = self._notices()
                # After what was held back: that may name a block which is free since it was encoded.
                held = [*self._drain_outbox(), *notices]
                small = len(buffers) == 1 and len(buffers[0]) <= _JOIN_UP_TO
                buffers = [b"".join((*held, *buffers))] if small else [b"".join(held), *buffers]
            if order.active and any(type(buffer) is host.DeviceBytes for buffer in buffers):
                self._write_chunks(buffers, deadline)
            else:
                self.stream.send(buffers, deadline, self.on_blocked)
        except TimeoutError:
            if not self.stream.broken:
                self._outbox.extendleft(reversed(held))  # nothing was written: they wait for the next write
            raise
        finally:
            self._write_lock.release()

    def _write_chunks(self, buffers: list[Any], deadline: float | None) -> None:
        """Write buffers some of which are on the GPU and come from there in chunks."""
        begun = False
        try:
            for buffer in buffers:
                for part in buffer.chunks() if type(buffer) is host.DeviceBytes else (buffer,):
                    if len(part):
                        self.stream.send([part], deadline, self.on_blocked)
                        begun = True
        except TimeoutError:
            if begun and not self.stream.broken:  # between two of them: nothing can follow what was written
                self.stream.broken = True
                self.stream.close()
            raise

    def _wait_to_write(self, deadline: float | None) -> None:
        if deadline is None:
            self._write_lock.acquire()
        elif not self._write_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError("another message is still being written to the peer, which does not take it in")

    def _has_notices(self) -> bool:
        return bool(
            self._borrower.untold
            or (self._lender is not None and self._lender.untold)
            or (self.devices is not None and self.devices.has_news)
        )

    def _drain_outbox(self) -> list[bytes]:
        held = []
        while self._outbox:
            held.append(self._outbox.popleft())
        return held

    def _notices(self) -> list[bytes]:
        notices = []
        if released := self._borrower.released():
            notices.append(encode_prefix(FrameKind.NOTICE, 0, 0, ReleaseBlocks(released)))
        if self._lender is not None and (retired := self._lender.retired()):
            notices.append(encode_prefix(FrameKind.NOTICE, 0, 0, RetireBlocks(retired)))
        if self.devices is not None and self.devices.has_news:
            notices += [encode_prefix(FrameKind.NOTICE, 0, 0, message) for message in self.devices.news()]
        return notices

    def _with_segments(
        self,
        kind: FrameKind,
        request_id: int,
        ack: int,
        message: AnyMessage,
        payload: bytes,
        tensors: Sequence[TensorSpec],
        segments: Sequence[Segment],
    ) -> list[Any]:
        if order.active and any(s.device != HOST for s in segments):
            return self._with_device_segments(kind, request_id, ack, message, payload, tensors, segments)
        total = sum(s.nbytes for s in segments)
        if total >= SHARE_FROM and self._sharing and self._lender is not None and self._lender.lent_bytes < LEND_LIMIT:
            table = self._fill_block(segments)
            if table is not None:
                return [encode_prefix(kind, request_id, ack, message, tensors, table, len(payload)), payload]
        small = total < _JOIN_UP_TO
        alignment = _SMALL_ALIGNMENT if small else 64
        table, offset = [], 0
        data: list[bytes | memoryview] = []
        for segment in segments:
            start = align(offset, alignment)
            if start > offset:
                data.append(_PADDING[: start - offset])
            table.append(SegmentSpec(segment.nbytes, INLINE, start))
            data.append(segment_bytes(segment) if small else segment_view(segment))
            offset = start + segment.nbytes
        return [encode_prefix(kind, request_id, ack, message, tensors, table, len(payload), offset), payload, *data]

    def _with_device_segments(
        self,
        kind: FrameKind,
        request_id: int,
        ack: int,
        message: AnyMessage,
        payload: bytes,
        tensors: Sequence[TensorSpec],
        segments: Sequence[Segment],
    ) -> list[Any]:
        """The same for a message some of whose memory is on the GPU. What cannot stay there goes through the host."""
        placed: list[SegmentSpec | None] = [None] * len(segments)
        if self._lender is not None:
            placed = self._device_channel().lend(tensors, segments)
        rest = [segment for segment, at in zip(segments, placed, strict=True) if at is None]
        data: list[Any] = []
        if rest:
            shared = self._fill_block(rest) if self._sharing and self._lender is not None else None
            found, data, length = (shared, [], 0) if shared is not None else _inline(rest)
            left = iter(found)
            placed = [next(left) if at is None else at for at in placed]
        else:
            length = 0
        table = [at for at in placed if at is not None]
        prefix = encode_prefix(kind, request_id, ack, message, tensors, table, len(payload), length)
        return [prefix, payload, *data, _ELSEWHERE] if data and len(rest) < len(segments) else [prefix, payload, *data]

    def _device_channel(self) -> DeviceChannel:
        if self.devices is None:
            with _first_use:
                if self.devices is None:
                    self.devices = DeviceChannel(self._tell, self._lend_page, self._find_page, self._peer_is_gone)
        return self.devices

    def _lend_page(self) -> Page:
        """Host memory that the peer sees, too, for as long as the connection lasts."""
        assert self._lender is not None and self.stream.lane is not None
        block = self._lender.take(1)
        if block.fd >= 0:
            self.stream.lane.announce(block.number, block.size, block.fd)
            block.close()
        ctypes.memset(block.address, 0, block.size)
        return Page(block.number, block.mapping)

    def _find_page(self, number: int) -> Page:
        """The same of the peer's; in the thread that reads."""
        lane = self.stream.lane
        assert lane is not None
        while number not in self._borrower:
            self._borrower.map(*self._announced_by(lane))
        return Page(number, self._borrower.mapping_of(number))

    def _peer_is_gone(self) -> bool:
        return self.closed and not is_running(self.stream.peer_pid)

    def _tell(self, message: AnyMessage) -> None:
        """Have a notice written before anything that is sent from now on."""
        self._outbox.append(encode_prefix(FrameKind.NOTICE, 0, 0, message))

    def _fill_block(self, segments: Sequence[Segment]) -> list[SegmentSpec] | None:
        """Copy the segments into one shared block, but for what is given back; None if there is no shared memory."""
        assert self._lender is not None and self.stream.lane is not None
        back = self._to_return(segments)
        size = sum(align(s.nbytes) for s, at in zip(segments, back, strict=True) if at is None)
        if not size:
            return [at for at in back if at is not None]
        try:
            block = self._lender.take(size)
            if block.fd >= 0:
                self.stream.lane.announce(block.number, block.size, block.fd)
                block.close()  # the peer has it now
        except OSError as error:
            self._sharing = False
            _say_once(error.errno or 0)
            return None
        table, offset = [], 0
        for segment, at in zip(segments, back, strict=True):
            if at is not None:
                table.append(at)
                continue
            if segment.device != HOST:
                host.pin_large(block.mapping)
                host.to_host(block.address + offset, segment.address, segment.nbytes, segment.device)
            else:
                self.copier.copy(block.address + offset, segment.address, segment.nbytes)
            table.append(SegmentSpec(segment.nbytes, block.number, offset))
            offset += align(segment.nbytes)
        return table

    def _to_return(self, segments: Sequence[Segment]) -> list[SegmentSpec | None]:
        """Where each segment lies in the peer's own memory, if it may be given back.

        A small part of a block is copied: whoever keeps it would keep the whole block from being used again."""
        found = [self._borrower.find(s.address, s.nbytes) if s.spare else None for s in segments]
        going: dict[int, int] = {}
        for segment, at in zip(segments, found, strict=True):
            if at is not None:
                going[at[0]] = going.get(at[0], 0) + segment.nbytes
        worth = {number for number, nbytes in going.items() if nbytes * _SMALL_PART >= self._borrower.size_of(number)}
        return [
            SegmentSpec(segment.nbytes, returned(at[0]), at[1]) if at is not None and at[0] in worth else None
            for segment, at in zip(segments, found, strict=True)
        ]

    # --- receiving ---

    def receive(self) -> list[Frame] | None:
        """The frames that can be read without waiting; None at the end of the stream."""
        count = self.stream.receive_into(self._reader.target())
        if count <= 0:
            return [] if count < 0 else None
        frames = self._reader.received(count)
        while self.stream.pending:  # else nobody would be told that there is more
            frames += self._reader.received(max(0, self.stream.receive_into(self._reader.target())))
        for frame in frames:
            if frame.segments or frame.kind == _NOTICE:
                return self._for_others(frames)
        return frames

    def _for_others(self, frames: list[Frame]) -> list[Frame]:
        """Find the memory of large tensors, and keep back what is the connection's own business."""
        kept = []
        for frame in frames:
            if frame.segments:
                self._find_segments(frame)
            elif frame.kind == FrameKind.NOTICE and self._own_notice(frame.message):
                continue
            kept.append(frame)
        if order.active:
            arrived = order.now()
            for frame in kept:
                frame.arrived = arrived
        return kept

    def _own_notice(self, message: AnyMessage) -> bool:
        if type(message) is ReleaseBlocks:
            if self._lender is not None:
                self._lender.give_back(message.blocks)
            return True
        if type(message) is RetireBlocks:
            self._borrower.retire(message.blocks)
            return True
        if type(message) in DEVICE_NOTICES:
            if self._lender is None:
                raise ProtocolError("the peer speaks of device memory on a connection that has none")
            self._device_channel().heard(message)
            return True
        return False

    def _find_segments(self, frame: Frame) -> None:
        borrowed: dict[int, Any] = {}
        buffers: list[Any] = []
        inline: memoryview | None = None
        for segment in frame.segments:
            if segment.block == INLINE:
                if inline is None:
                    inline = memoryview(frame.data if frame.data is not None else b"").cast("B")[frame.data_offset :]
                memory = inline
            else:
                memory = borrowed.get(segment.block) or self._memory_of(segment.block, borrowed)
            end = segment.offset + segment.nbytes
            if segment.nbytes < 0 or segment.offset < 0 or end > len(memory):
                raise ProtocolError(
                    f"a segment of {segment.nbytes} bytes at {segment.offset} exceeds its {len(memory)} bytes"
                )
            buffers.append(memory[segment.offset : end])
        frame.buffers = buffers

    def _memory_of(self, block: int, known: dict[int, Any]) -> Any:
        """The memory of a block that a message names: of the peer's, or one of ours that it gives back."""
        lane = self.stream.lane
        if lane is None or self._lender is None:
            raise ProtocolError("the peer used shared memory on a connection that has none")
        if is_of_device(block):
            known[block] = loan = self._device_channel().borrower.borrow(block)
            return loan
        if block < INLINE:
            alias = self._lender.regain(returned(block))
        else:
            while block not in self._borrower:
                self._borrower.map(*self._announced_by(lane))
            alias = self._borrower.borrow(block)
        memory = known[block] = memoryview(alias).cast("B")
        return memory

    @staticmethod
    def _announced_by(lane: Any) -> tuple[int, int, int]:
        number, size, fd = lane.next()
        return number, fd, size

    def close(self) -> None:
        """End the connection; tensors that alias its blocks stay valid."""
        self.closed = True
        self.stream.close()
        if self._lender is not None:
            self._lender.close()
        if self.devices is not None:
            self.devices.close()


def _inline(segments: Sequence[Segment]) -> tuple[list[SegmentSpec], list[Any], int]:
    """Where segments lie that follow the payload, what to write there, and how many bytes that is.

    Those on the GPU come down while they are written, if they are large."""
    table, offset = [], 0
    data: list[Any] = []
    for segment in segments:
        start = align(offset)
        if start > offset:
            data.append(_PADDING[: start - offset])
        table.append(SegmentSpec(segment.nbytes, INLINE, start))
        if segment.device == HOST:
            data.append(segment_view(segment))
        elif segment.nbytes > host.CHUNK:
            data.append(host.DeviceBytes(segment.address, segment.nbytes, segment.device, segment.owner))
        else:
            data.append(host.bytes_of(segment.address, segment.nbytes, segment.device))
        offset = start + segment.nbytes
    return table, data, offset
