"""A connection sends and receives whole messages over one stream, and decides which way tensor bytes go.

Small tensors travel in the frame. Large ones go through a shared block where the stream has a lane for descriptors:
one copy by the sender, none by the receiver. The notices that keep the blocks in order are the connection's own
business; nobody above sees them.
"""

import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from telegrad.errors import ProtocolError, SerializationError
from telegrad.transport.blocks import Borrower, Heap, Lender
from telegrad.transport.copying import Copier
from telegrad.transport.stream import Stream
from telegrad.wire.frames import INLINE, Frame, FrameReader, Kind, SegmentSpec, align, encode_prefix, returned
from telegrad.wire.messages import AnyMessage, ReleaseBlocks, RetireBlocks
from telegrad.wire.tensors import Segment, TensorSpec, segment_bytes, segment_view

log = logging.getLogger("telegrad.transport")

SHARE_FROM = 32 * 1024  # bytes of tensors in one message from which a shared block pays
LEND_LIMIT = 8 * 2**30  # bytes lent to one peer beyond which its socket, which pushes back, is used instead
_JOIN_UP_TO = 64 * 1024
_HOLD_UP_TO = 64  # small frames that may wait for one write
_PADDING = bytes(64)
_SMALL_ALIGNMENT = 16
_SMALL_PART = 4  # a block is given back if a fourth of it or more is in use

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
        self.copier = Copier()
        self._outbox: deque[bytes] = deque()
        self.after_hold: Callable[[], None] = _nothing  # called when what was held back has been written in time
        self.closed = False

    def __repr__(self) -> str:
        return f"<Connection over {self.stream.kind}{' with shared memory' if self._lender else ''}>"

    # --- sending ---

    def send(
        self,
        kind: Kind,
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
        if isinstance(memory, bytes) or not memory:
            data = memory or b""
            prefix = encode_prefix(kind, request_id, ack, message, tensors, (), len(payload), len(data))
            buffers: list[Any] = [prefix, payload, data]
            self_contained = True
        else:
            buffers = self._with_segments(kind, request_id, ack, message, payload, tensors, memory)
            self_contained = buffers[-1] is not payload  # else the tensors are in a block of this connection
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
        if self._has_notices():
            try:
                self.send_encoded(b"", time.monotonic())
            except (OSError, ValueError):
                log.debug("a peer hears of idle blocks with the next message")
        return self._lender.has_blocks or self._borrower.mapped > 0

    def _write(self, buffers: list[Any], deadline: float | None) -> None:
        """Write, after what was held back. TimeoutError at the deadline, also if another thread is still writing."""
        if deadline is None:
            self._write_lock.acquire()
        elif not self._write_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError("another message is still being written to the peer, which does not take it in")
        held: list[bytes] = []
        try:
            if self._outbox or self._has_notices():
                notices = self._notices()
                # After what was held back: that may name a block which is free since it was encoded.
                held = [*self._drain_outbox(), *notices]
                small = len(buffers) == 1 and len(buffers[0]) <= _JOIN_UP_TO
                buffers = [b"".join((*held, *buffers))] if small else [b"".join(held), *buffers]
            self.stream.send(buffers, deadline, self.on_blocked)
        except TimeoutError:
            if not self.stream.broken:
                self._outbox.extendleft(reversed(held))  # nothing was written: they wait for the next write
            raise
        finally:
            self._write_lock.release()

    def _has_notices(self) -> bool:
        return bool(self._borrower.untold or (self._lender is not None and self._lender.untold))

    def _drain_outbox(self) -> list[bytes]:
        held = []
        while self._outbox:
            held.append(self._outbox.popleft())
        return held

    def _notices(self) -> list[bytes]:
        notices = []
        if released := self._borrower.released():
            notices.append(encode_prefix(Kind.NOTICE, 0, 0, ReleaseBlocks(released)))
        if self._lender is not None and (retired := self._lender.retired()):
            notices.append(encode_prefix(Kind.NOTICE, 0, 0, RetireBlocks(retired)))
        return notices

    def _with_segments(
        self,
        kind: Kind,
        request_id: int,
        ack: int,
        message: AnyMessage,
        payload: bytes,
        tensors: Sequence[TensorSpec],
        segments: Sequence[Segment],
    ) -> list[Any]:
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
        kept = []
        for frame in frames:
            if frame.segments:
                self._find_segments(frame)
            elif frame.kind == Kind.NOTICE and self._own_notice(frame.message):
                continue
            kept.append(frame)
        return kept

    def _own_notice(self, message: AnyMessage) -> bool:
        if type(message) is ReleaseBlocks:
            if self._lender is not None:
                self._lender.give_back(message.blocks)
            return True
        if type(message) is RetireBlocks:
            self._borrower.retire(message.blocks)
            return True
        return False

    def _find_segments(self, frame: Frame) -> None:
        borrowed: dict[int, memoryview] = {}
        buffers: list[memoryview] = []
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

    def _memory_of(self, block: int, known: dict[int, memoryview]) -> memoryview:
        """The memory of a block that a message names: of the peer's, or one of ours that it gives back."""
        lane = self.stream.lane
        if lane is None or self._lender is None:
            raise ProtocolError("the peer used shared memory on a connection that has none")
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
