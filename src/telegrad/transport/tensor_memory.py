"""The memory of the tensors of one connection's messages: where a sender puts it, where a receiver finds it.

Small tensors travel in the frame. Large ones go through a shared block where the stream has a lane for descriptors:
one copy by the sender, none by the receiver. CUDA tensors stay on the GPU where both sides can reach it
(`device/ways.py`). The notices that keep the blocks in order are answered here; nobody above the connection sees
them.
"""

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from telegrad.cuda import host, order
from telegrad.cuda.forms import Form
from telegrad.cuda.upload import LEAST, Upload, Wanted, begin, collect
from telegrad.errors import ProtocolError
from telegrad.transport.blocks.copying import Copier
from telegrad.transport.blocks.lending import Borrower, Lender
from telegrad.transport.device.blocks import FIRST_NAME, budget
from telegrad.transport.device.channel import DEVICE_NOTICES, DeviceChannel
from telegrad.transport.device.flags import Page
from telegrad.transport.device.in_place import InPlace
from telegrad.transport.device.offers import FIRST_GRANT
from telegrad.transport.stream import Stream, is_running
from telegrad.wire.block_notices import ReleaseBlocks, RetireBlocks
from telegrad.wire.frames import INLINE, Frame, SegmentSpec, align, returned
from telegrad.wire.messages import AnyMessage
from telegrad.wire.tensor.on_device import came_as, device_of
from telegrad.wire.tensor.segments import HOST
from telegrad.wire.tensor.tensors import Segment, TensorSpec, segment_bytes, segment_view

log = logging.getLogger("telegrad.transport")

BLOCK_NOTICES = frozenset({ReleaseBlocks, RetireBlocks, *DEVICE_NOTICES})

SHARE_FROM = 32 * 1024  # bytes of tensors in one message from which a shared block pays
LEND_LIMIT = 8 * 2**30  # bytes lent to one peer beyond which its socket, which pushes back, is used instead
COPY_UP_TO = 64 * 1024  # bytes of tensors in the frame itself that are copied into it rather than written from there
_PADDING = bytes(64)
_SMALL_ALIGNMENT = 16
_SMALL_PART = 4  # a block is given back if a fourth of it or more is in use

_first_use = threading.Lock()  # of device memory, by any connection


@functools.cache
def _say_once(number: int) -> None:
    log.warning("no shared memory (%s): tensors go through sockets, which is slower", os.strerror(number))


class Placed(NamedTuple):
    """Where the segments of a message are: in blocks, or inline."""

    table: Sequence[SegmentSpec]
    inline: list[Any]  # what follows the payload
    inline_bytes: int
    in_blocks: bool  # of this connection: the message cannot be sent over another


def _form_of(spec: TensorSpec | None, nbytes: int) -> Form | None:
    """The form of a plain tensor that takes all of a segment; None for any other, and for what makes no sense."""
    try:
        came = None if spec is None else came_as(spec)
    except ProtocolError:
        return None
    return came.form if came is not None and came.nbytes == nbytes else None


class TensorMemory:
    """Shared blocks of one connection, lent and borrowed, and those of device memory. Any thread may send; one
    reads."""

    def __init__(self, stream: Stream, tell: Callable[[AnyMessage], None]) -> None:
        """`tell` has a notice written before anything that is sent from then on."""
        self._stream = stream
        self._tell = tell
        self.lender = Lender() if stream.lane is not None else None
        self.borrower = Borrower()
        # Blocks that the peer does not know yet to be free, its own and ours. Filled at any moment; looked at before
        # each write.
        self.released = self.borrower.untold
        self.retired = self.lender.untold if self.lender is not None else []
        self._sharing = True  # until there turns out to be no shared memory
        self.devices: DeviceChannel | None = None  # once a CUDA tensor comes by
        self.copier = Copier()
        self._closed = False

    # --- sending ---

    def place(
        self, tensors: Sequence[TensorSpec], segments: Sequence[Segment], in_place: list[InPlace] | None = None
    ) -> Placed:
        """Put the memory of a message where the peer will find it; `in_place` as in `DeviceChannel.lend`."""
        if order.active and segments and (segments[0].device != HOST or any(s.device != HOST for s in segments)):
            devices = self.devices
            if devices is not None and len(segments) == len(tensors) == 1:
                found = devices.lend_one(tensors[0], segments[0], in_place)
                if found is not None:
                    return Placed((found,), [], 0, True)
            return self._place_with_devices(tensors, segments, in_place)
        total = sum(s.nbytes for s in segments)
        if total >= SHARE_FROM and self._sharing and self.lender is not None and self.lender.lent_bytes < LEND_LIMIT:
            table = self._fill_block(segments)
            if table is not None:
                return Placed(table, [], 0, True)
        return _inline(segments, total < COPY_UP_TO)

    def _place_with_devices(
        self, tensors: Sequence[TensorSpec], segments: Sequence[Segment], in_place: list[InPlace] | None
    ) -> Placed:
        """The same where some of it is on the GPU. What cannot stay there goes through the host."""
        placed: list[SegmentSpec | None] = [None] * len(segments)
        if self.lender is not None:
            placed = self._device_channel().lend(tensors, segments, in_place)
            if None not in placed:
                return Placed(placed, [], 0, True)  # type: ignore[arg-type] # there is none
        rest = [segment for segment, at in zip(segments, placed, strict=True) if at is None]
        data: list[Any] = []
        length = 0
        if rest:
            found: Sequence[SegmentSpec] | None = None
            if self._sharing and self.lender is not None:
                found = self._fill_block(rest)
            if found is None:
                found, data, length, _ = _inline(rest, small=False)
            left = iter(found)
            placed = [next(left) if at is None else at for at in placed]
        table = [at for at in placed if at is not None]
        return Placed(table, data, length, not data or len(rest) < len(segments))

    def _fill_block(self, segments: Sequence[Segment]) -> list[SegmentSpec] | None:
        """Copy the segments into one shared block, but for what is given back; None if there is no shared memory."""
        assert self.lender is not None and self._stream.lane is not None
        back = self._to_return(segments)
        size = sum(align(s.nbytes) for s, at in zip(segments, back, strict=True) if at is None)
        if not size:
            return [at for at in back if at is not None]
        try:
            block = self.lender.take(size)
            if block.fd >= 0:
                self._stream.lane.announce(block.number, block.size, block.fd)
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
        found = [self.borrower.find(s.address, s.nbytes) if s.spare else None for s in segments]
        going: dict[int, int] = {}
        for segment, at in zip(segments, found, strict=True):
            if at is not None:
                going[at[0]] = going.get(at[0], 0) + segment.nbytes
        worth = {number for number, nbytes in going.items() if nbytes * _SMALL_PART >= self.borrower.size_of(number)}
        return [
            SegmentSpec(segment.nbytes, returned(at[0]), at[1]) if at is not None and at[0] in worth else None
            for segment, at in zip(segments, found, strict=True)
        ]

    def _device_channel(self) -> DeviceChannel:
        if self.devices is None:
            with _first_use:
                if self.devices is None:
                    self.devices = DeviceChannel(self._tell, self._lend_page, self._find_page, self._peer_is_gone)
        return self.devices

    def _lend_page(self) -> Page:
        """Host memory that the peer sees, too, for as long as the connection lasts."""
        assert self.lender is not None and self._stream.lane is not None
        block = self.lender.take(1)
        if block.fd >= 0:
            self._stream.lane.announce(block.number, block.size, block.fd)
            block.close()
        ctypes.memset(block.address, 0, block.size)
        return Page(block.number, block.mapping)

    def _find_page(self, number: int) -> Page:
        """The same of the peer's; in the thread that reads."""
        lane = self._stream.lane
        assert lane is not None
        while number not in self.borrower:
            self.borrower.map(*self._announced_by(lane))
        return Page(number, self.borrower.mapping_of(number))

    def _peer_is_gone(self) -> bool:
        return self._closed and not is_running(self._stream.peer_pid)

    # --- receiving ---

    @staticmethod
    def upload(frame: Frame, memory: Any, start: int, nbytes: int) -> Upload | None:
        """The inline segments of a message begin to come into `memory`, from `start` on: take those that are wanted on
        a GPU there as they come. Specs come from a peer, so what is odd about them is left to whoever checks them."""
        if not order.active:
            return None
        goes: dict[int, str] = {}
        alone: dict[int, TensorSpec | None] = {}  # the only tensor of a segment
        for spec in frame.tensors:
            if goes.setdefault(spec.segment, spec.device) != spec.device:
                goes[spec.segment] = ""  # to several devices
            alone[spec.segment] = None if spec.segment in alone else spec
        wanted: list[Wanted] = []
        end = 0
        for number, segment in enumerate(frame.segments):
            name = goes.get(number, "")
            if segment.block != INLINE or segment.nbytes < LEAST or not name.startswith("cuda:"):
                continue
            device = device_of(name)
            if device is not None:
                if not end <= segment.offset <= nbytes - segment.nbytes:
                    return None
                form = _form_of(alone[number], segment.nbytes)
                wanted.append(Wanted(number, segment.offset, segment.nbytes, device, form))
                end = segment.offset + segment.nbytes
        return begin(memory, start, nbytes, wanted, budget)

    def find(self, frame: Frame) -> None:
        """Find the memory of a message that came."""
        if len(frame.segments) == 1 and (only := frame.segments[0]).block >= FIRST_NAME:
            frame.buffers = (self._find_on_device(only, {}),)
            frame.is_large = only.nbytes >= SHARE_FROM
            return
        borrowed: dict[int, Any] = {}
        buffers: list[Any] = []
        inline: memoryview | None = None
        for segment in frame.segments:
            if segment.block >= FIRST_NAME:
                buffers.append(self._find_on_device(segment, borrowed))
                if segment.nbytes >= SHARE_FROM:  # on the GPU there are small ones, too
                    frame.is_large = True
                continue
            if segment.block == INLINE:
                if inline is None:
                    inline = memoryview(frame.data if frame.data is not None else b"").cast("B")[frame.data_offset :]
                memory = inline
            else:
                memory = borrowed.get(segment.block) or self._memory_of(segment.block, borrowed)
                frame.is_large = True
            end = segment.offset + segment.nbytes
            if segment.nbytes < 0 or segment.offset < 0 or end > len(memory):
                raise ProtocolError(
                    f"a segment of {segment.nbytes} bytes at {segment.offset} exceeds its {len(memory)} bytes"
                )
            buffers.append(memory[segment.offset : end])
        if frame.upload is not None:
            buffers = [frame.upload.segment(number, buffer) for number, buffer in enumerate(buffers)]
            frame.upload = None
        frame.buffers = buffers

    def _find_on_device(self, segment: SegmentSpec, loans: dict[int, Any]) -> Any:
        """The same on the GPU: in a block of the peer's, or where it was granted to the peer to write."""
        if self.lender is None:
            raise ProtocolError("the peer used device memory on a connection that has none")
        if segment.nbytes < 0 or segment.offset < 0:
            raise ProtocolError(f"a segment of {segment.nbytes} bytes at {segment.offset} of device memory")
        channel = self.devices or self._device_channel()
        if segment.block >= FIRST_GRANT:
            return channel.landing.arrive(segment)
        loan = loans.get(segment.block)
        if loan is None:
            loan = loans[segment.block] = channel.borrower.borrow(segment.block)
        return loan.part(segment.offset, segment.nbytes)

    def _memory_of(self, block: int, known: dict[int, Any]) -> Any:
        """The memory of a block that a message names: of the peer's, or one of ours that it gives back."""
        lane = self._stream.lane
        if lane is None or self.lender is None:
            raise ProtocolError("the peer used shared memory on a connection that has none")
        if block < INLINE:
            alias = self.lender.regain(returned(block))
        else:
            while block not in self.borrower:
                self.borrower.map(*self._announced_by(lane))
            alias = self.borrower.borrow(block)
        memory = known[block] = memoryview(alias).cast("B")
        return memory

    @staticmethod
    def _announced_by(lane: Any) -> tuple[int, int, int]:
        number, size, fd = lane.next()
        return number, fd, size

    # --- what the peers tell each other about blocks ---

    def notices(self) -> list[AnyMessage]:
        """What to tell it; each is told once."""
        notices: list[AnyMessage] = []
        if released := self.borrower.released():
            notices.append(ReleaseBlocks(released))
        if self.lender is not None and (retired := self.lender.retired()):
            notices.append(RetireBlocks(retired))
        if self.devices is not None and self.devices.has_news:
            notices += self.devices.news()
        return notices

    def heard(self, message: AnyMessage) -> None:
        """One of `BLOCK_NOTICES` came."""
        if type(message) is ReleaseBlocks:
            if self.lender is not None:
                self.lender.give_back(message.blocks)
        elif type(message) is RetireBlocks:
            self.borrower.retire(message.blocks)
        elif self.lender is None:
            raise ProtocolError("the peer speaks of device memory on a connection that has none")
        else:
            self._device_channel().heard(message)

    def trim(self, before: float) -> None:
        """Return the blocks that have been idle since `before`."""
        if self.lender is not None:
            self.lender.trim(before)
        if self.devices is not None:
            self.devices.trim(before)

    @property
    def has_blocks(self) -> bool:
        """Whether there is any block on either side."""
        if self.devices is not None and self.devices.is_in_use:
            return True
        return (self.lender is not None and self.lender.has_blocks) or self.borrower.mapped > 0

    def close(self) -> None:
        """The connection has ended; tensors that alias its blocks stay valid."""
        self._closed = True
        if self.lender is not None:
            self.lender.close()
        if self.devices is not None:
            self.devices.close()
        collect()


def _inline(segments: Sequence[Segment], small: bool) -> Placed:
    """Segments that follow the payload. Small ones are copied; those on the GPU come down while they are written, if
    they are large."""
    alignment = _SMALL_ALIGNMENT if small else 64
    table, offset = [], 0
    data: list[Any] = []
    for segment in segments:
        start = align(offset, alignment)
        if start > offset:
            data.append(_PADDING[: start - offset])
        table.append(SegmentSpec(segment.nbytes, INLINE, start))
        if segment.device == HOST:
            data.append(segment_bytes(segment) if small else segment_view(segment))
        elif segment.nbytes > host.CHUNKED_FROM:
            data.append(host.DeviceBytes(segment.address, segment.nbytes, segment.device, segment.owner))
        else:
            data.append(host.bytes_of(segment.address, segment.nbytes, segment.device))
        offset = start + segment.nbytes
    return Placed(table, data, offset, False)
