"""A connection sends and receives whole messages over one stream, and large tensors over several where it has them.

How they are written, and may wait for that, is in `outgoing.py`. Where the memory of tensors goes is decided in
`tensor_memory.py`, whose notices travel between the messages; nobody above sees them.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from telegrad.cuda import order, upload
from telegrad.errors import AuthenticationError, ProtocolError
from telegrad.transport.addresses import Address
from telegrad.transport.blocks.heap import Heap
from telegrad.transport.device.channel import DeviceChannel
from telegrad.transport.device.in_place import InPlace
from telegrad.transport.outgoing import SMALL_FRAME, Outgoing
from telegrad.transport.stream import SocketStream, Stream
from telegrad.transport.stripes.gathering import Gathering
from telegrad.transport.stripes.stripes import Stripes
from telegrad.transport.stripes.threads import PartThreads
from telegrad.transport.tensor_memory import BLOCK_NOTICES
from telegrad.wire.block_notices import StripesReady
from telegrad.wire.frame_reader import FrameReader
from telegrad.wire.frames import NOTICE, STRIPED, Frame, encode_naming, encode_prefix, encode_whole
from telegrad.wire.messages import AnyMessage
from telegrad.wire.parts import STRIPE_FROM
from telegrad.wire.tensor.segments import Segment
from telegrad.wire.tensor.specs import TensorSpec

SMALL_PAYLOAD = 32 * 1024  # bytes up to which a message usually is one piece, with small tensors that may come along

_first_side = threading.Lock()  # of any connection

heap = Heap()


def _nothing() -> None:
    pass


def _allocate(nbytes: int) -> Any:
    """Memory to receive in."""
    if order.active:
        upload.collect()
    return heap.allocate(nbytes)


class Connection(Outgoing):
    """Messages over one stream. Any thread may send; one at a time may receive."""

    def __init__(self, stream: Stream, *, max_frame: int, on_blocked: Callable[[], None] = lambda: None) -> None:
        super().__init__(stream, max_frame, on_blocked)
        self.number = 0  # what its side streams name it by
        self.address: Address | None = None  # where it was dialled
        self.on_large: Callable[[], None] | None = None  # called once, when a message could use several streams
        self.stripes: Stripes | None = None  # the streams beside this one, once both ends have them all
        self.gathering: Gathering | None = None  # those of them that have come, where this end accepts them
        self._striped = False  # whether what is sent may use them
        self._reader = FrameReader(_allocate, max_frame)
        self._reader.uploading = self.memory.upload
        self.copier = self.memory.copier
        self.before_flush: Callable[[], None] = _nothing  # called when what is held back is about to be written in time
        self.after_hold: Callable[[], None] = _nothing  # and when it has been
        self.closed = False

    def __repr__(self) -> str:
        streams = f", {self.stripes.count} for large messages" if self._striped and self.stripes is not None else ""
        return f"<Connection over {self.stream.kind}{' with shared memory' if self.memory.lender else ''}{streams}>"

    @property
    def devices(self) -> DeviceChannel | None:
        """Device memory on this connection, once a CUDA tensor came by."""
        return self.memory.devices

    # --- sending ---

    def send(
        self,
        kind: int,
        request_id: int,
        ack: int,
        message: AnyMessage,
        payload: bytes = b"",
        tensors: Sequence[TensorSpec] = (),
        memory: Sequence[Segment] | bytes = b"",
        *,
        deadline: float | None = None,
        hold: bool = False,
        in_place: list[InPlace] | None = None,
    ) -> bytes | None:
        """Send one message. With `hold` a small one may wait for the next send or `flush`, to share its write.

        `memory` is that of the tensors: segments, or the bytes of small ones. With a list `in_place` the peer may read
        CUDA tensors where they lie until it has answered, and what is to be ended then is appended.

        Returns the encoded frame if it is small and can be sent again as it is, to this peer, over any connection.
        """
        if type(memory) is bytes:
            frame = encode_whole(kind, request_id, ack, message, payload, tensors, memory)
            if len(frame) <= SMALL_FRAME:
                self.send_encoded(frame, deadline, hold)
                return frame
            prefix = encode_prefix(kind, request_id, ack, message, tensors, (), len(payload), len(memory))
            buffers: list[Any] = [prefix, payload, memory]
            in_blocks = False
        else:
            placed = self.memory.place(tensors, memory, in_place)  # type: ignore[arg-type] # not bytes
            table, inline, length, in_blocks = placed
            if not inline and len(payload) < SMALL_PAYLOAD:
                frame = encode_naming(kind, request_id, ack, message, payload, tensors, table)
                if len(frame) <= SMALL_FRAME:
                    self.send_encoded(frame, deadline, hold)
                    return None if in_blocks else frame
            if length >= STRIPE_FROM and self._uses_stripes():
                prefix = encode_prefix(kind, request_id, ack, message, tensors, table, len(payload), length, STRIPED)
                self._check_size([prefix, payload, *inline])
                self._write_striped([prefix, payload], inline, length, deadline)
                return None
            prefix = encode_prefix(kind, request_id, ack, message, tensors, table, len(payload), length)
            buffers = [prefix, payload, *inline]
        if sum(map(len, buffers)) > SMALL_FRAME:
            self._check_size(buffers)
            self._write(buffers, deadline)
            return None
        frame = b"".join(buffers)
        self.send_encoded(frame, deadline, hold)
        return None if in_blocks else frame

    def tidy(self, before: float) -> bool:
        """Return the blocks that have been idle since `before`, and tell the peer which it need not keep either.

        Says whether the peer may have such news as well."""
        self.memory.trim(before)
        if self.memory.released or self.memory.retired or self.devices is not None:
            self.flush()
        return self.memory.has_blocks

    def _uses_stripes(self) -> bool:
        """A large message is to be sent: whether over several streams. If there are none, somebody may see to it."""
        if not self._striped:
            self._could_use_stripes()
        return self._striped

    def _write_striped(self, lead: list[Any], data: list[Any], length: int, deadline: float | None) -> None:
        """Write a message whose `data` goes over several streams. Nobody else writes to any of them meanwhile."""
        assert self.stripes is not None
        if not self._write_lock.acquire(False):
            self._wait_to_write(deadline)
        try:
            self._write_with_held(lead, deadline)
            self.stripes.send(data, length, deadline, self.on_blocked)
        finally:
            self._write_lock.release()
            if self._due:
                self.flush()

    # --- receiving ---

    def receive(self) -> list[Frame] | None:
        """The frames that can be read without waiting; None at the end of the stream."""
        reader, stream = self._reader, self.stream
        count = stream.receive_into(reader.target)
        if count <= 0:
            if not reader.waiting:
                return [] if count < 0 else None
            count = 0  # a message has come but for its parts on other streams
        frames = reader.received(count)
        while stream.pending and not reader.waiting:  # else nobody would be told that there is more
            frames += reader.received(max(0, stream.receive_into(reader.target)))
        return self._for_others(frames) if reader.has_memory else frames

    def _for_others(self, frames: list[Frame]) -> list[Frame]:
        """Find the memory of large tensors, and keep back what is the connection's own business."""
        self._reader.has_memory = False
        kept = []
        for frame in frames:
            if frame.kind == NOTICE and type(frame.message) in BLOCK_NOTICES:
                self.memory.heard(frame.message)
                continue
            if type(frame.message) is StripesReady and frame.kind == NOTICE:
                self._heard_of_stripes(frame.message)
                continue
            if frame.segments:
                self.memory.find(frame)
            kept.append(frame)
        if order.active:
            arrived = order.now()
            for frame in kept:
                frame.arrived = arrived
        return kept

    @property
    def reserved(self) -> int:
        """Bytes of a large message that has begun to come."""
        return self._reader.reserved

    def ask_before_large(self, ask: Callable[[int], None]) -> None:
        """Have `ask` called with its bytes when a large message begins: ProtocolError ends the connection instead."""
        self._reader.before_large = ask

    # --- several streams ---

    def could_widen(self, act: Callable[[], None]) -> None:
        """Have `act` called once, when a message comes or goes that could use several streams."""
        self.on_large = act
        self._reader.on_large = self._could_use_stripes

    def _could_use_stripes(self) -> None:
        act, self.on_large = self.on_large, None
        self._reader.on_large = None
        if act is not None:
            act()

    def attach(self, sides: Sequence[SocketStream], threads: PartThreads) -> Stripes:
        """The streams beside this one: the peer may use them from now on. They end with the connection."""
        assert isinstance(self.stream, SocketStream)
        stripes = Stripes(self.stream, sides, threads)
        self.stripes = stripes
        self._reader.arriving = stripes.arriving
        if self.closed:  # by another thread, which may not have seen them
            stripes.close()
        return stripes

    def gather(self, sides: int) -> Gathering:
        """Where the streams beside this one are put until all have come."""
        with _first_side:
            if self.gathering is None:
                self.gathering = Gathering(sides)
        if self.closed or self.gathering.sides != sides:
            raise AuthenticationError("the connection has ended, or was to have others beside it")
        return self.gathering

    def use_stripes(self) -> None:
        """Send large messages over all streams from now on, and let the peer do so."""
        assert self.stripes is not None
        self._striped = True  # the peer has them all: it was told so by each
        self._tell(StripesReady(self.stripes.count))
        self.flush()

    def _heard_of_stripes(self, message: StripesReady) -> None:
        if self.stripes is None or message.connections != self.stripes.count:
            raise ProtocolError(f"the peer speaks of {message.connections} connections beside each other; it has fewer")
        self._striped = True

    @property
    def last_progress(self) -> float:
        """When the peer last took in more of what is written to it, or sent a piece of what it divided."""
        stripes = self.stripes
        return self.stream.last_written if stripes is None else max(self.stream.last_written, stripes.last_progress)

    def peer_host_answers(self, seconds: float) -> bool:
        """Whether the peer's kernel confirmed something within `seconds`, whatever its process does."""
        answers = self.stream.peer_host_answers(seconds)
        return answers or (self.stripes is not None and self.stripes.peer_host_answers(seconds))

    @property
    def delivered(self) -> bool:
        """Whether all that was written has reached the peer's host, so that closing this end loses none of it."""
        waits = self.outbox or self.stream.unsent
        return not waits and self.stream.delivered and (self.stripes is None or self.stripes.delivered)

    def close(self) -> None:
        """End the connection; tensors that alias its blocks stay valid."""
        self.closed = True
        if self.gathering is not None:
            self.gathering.close()
        if self.stripes is not None:
            self.stripes.close()
        self.stream.close()
        self.memory.close()
