"""A connection sends and receives whole messages over one stream, and large tensors over several where it has them.

Small messages are one piece and may wait in the `outbox`, to share a write. They leave before whatever is written next;
or by `flush`, which never waits: if another thread is writing, that one writes them when it has ended, and if the peer
does not read, the timer looks again when there may be room (`flush_within`). Nobody else keeps account of them.

Where the memory of tensors goes is decided in
`tensor_memory.py`, whose notices travel between the messages; nobody above sees them.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from telegrad.cuda import host, order
from telegrad.errors import AuthenticationError, ProtocolError, SerializationError
from telegrad.transport.addresses import Address
from telegrad.transport.blocks.heap import Heap
from telegrad.transport.device.channel import DeviceChannel
from telegrad.transport.device.in_place import InPlace
from telegrad.transport.stream import SocketStream, Stream
from telegrad.transport.stripes.gathering import Gathering
from telegrad.transport.stripes.stripes import Stripes
from telegrad.transport.stripes.threads import PartThreads
from telegrad.transport.tensor_memory import BLOCK_NOTICES, TensorMemory
from telegrad.wire.block_notices import StripesReady
from telegrad.wire.frame_reader import FrameReader
from telegrad.wire.frames import NOTICE, STRIPED, Frame, encode_prefix, encode_whole, max_record
from telegrad.wire.messages import AnyMessage
from telegrad.wire.parts import STRIPE_FROM
from telegrad.wire.tensor.segments import Segment
from telegrad.wire.tensor.specs import TensorSpec

log = logging.getLogger("telegrad.transport")

SMALL_FRAME = 64 * 1024  # bytes up to which a message is one piece, and can share a write
SMALL_PAYLOAD = 32 * 1024  # bytes up to which it usually is one, with the small tensors that may come along
_HOLD_UP_TO = 64  # small frames that may wait for one write
_MOST_MENTIONED = 4096  # frames that wait for a peer that does not read, beyond which it is told nothing more
_MOMENT = 0.002  # seconds that a message takes to be written, if nobody is slow
_NO_ROOM = 0.005  # seconds after which to look again whether the peer has read
_FOREVER = float("inf")

_first_side = threading.Lock()  # of any connection

heap = Heap()


def _nothing() -> None:
    pass


def _no_timer(seconds: float) -> None:
    pass


class Connection:
    """Messages over one stream. Any thread may send; one at a time may receive."""

    def __init__(self, stream: Stream, *, max_frame: int, on_blocked: Callable[[], None] = lambda: None) -> None:
        self.stream = stream
        self.on_blocked = on_blocked
        self.peer = "the peer"  # its name, for errors
        self.peer_takes = max_frame  # bytes in one message that it does not refuse
        self.number = 0  # what its side streams name it by
        self.address: Address | None = None  # where it was dialled
        self.on_large: Callable[[], None] | None = None  # called once, when a message could use several streams
        self.stripes: Stripes | None = None  # the streams beside this one, once both ends have them all
        self.gathering: Gathering | None = None  # those of them that have come, where this end accepts them
        self._striped = False  # whether what is sent may use them
        self._reader = FrameReader(heap.allocate, max_frame)
        self._write_lock = threading.Lock()
        self.memory = TensorMemory(stream, self._tell)
        self._reader.uploading = self.memory.upload
        self.copier = self.memory.copier
        # Blocks that the peer does not know yet to be free: looked at before each write.
        self._released, self._retired = self.memory.released, self.memory.retired
        self.outbox: deque[bytes] = deque()  # small frames that wait for the next write
        self._due = False  # whether it is to be written by whoever has the lock, or takes it next
        self.flush_within: Callable[[float], None] = _no_timer  # flushes after some time, if nothing else was written
        self.after_hold: Callable[[], None] = _nothing  # called when what was held back has been written in time
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

    def _check_size(self, buffers: Sequence[Any]) -> None:
        """Refuse here what the peer would refuse: sent all the same, it would end the connection again and again."""
        size, record = sum(map(len, buffers)), len(buffers[0])
        if size > self.peer_takes or record > max_record(self.peer_takes):
            what = f"a message of {size} bytes" if size > self.peer_takes else f"a table of tensors of {record} bytes"
            raise SerializationError(
                f"{what} is over the limit of {self.peer_takes} that {self.peer} has set for what "
                "it takes in; send it in parts, or raise `max_message_bytes` in the options of that worker"
            )

    def send_encoded(self, frame: bytes, deadline: float | None = None, hold: bool = False) -> None:
        """Send a frame in one piece. If another thread is writing, that one writes it as well."""
        if len(frame) > SMALL_FRAME:
            self._check_size([frame])
            self._write([frame], deadline)
        elif hold or not self._write_lock.acquire(False):
            if len(self.outbox) >= _HOLD_UP_TO:
                self._write([frame], deadline)
                return
            self.outbox.append(frame)
            if not hold:
                self.flush()
        else:
            try:
                if self.stream.unsent:  # the peer does not read: from now on whoever sends waits until it does
                    self._write_with_held([frame], deadline)
                else:
                    if self.outbox or self._released or self._retired or self.memory.devices is not None:
                        frame = b"".join((*self._waiting(), frame))
                    if not self.stream.begin(frame):
                        self.flush_within(_NO_ROOM)
            finally:
                self._write_lock.release()
                if self._due:  # looked at once the lock is free: who could not have it has left something before
                    self.flush()
            if order.active:
                self._has_written()

    def flush(self) -> None:
        """Write what waits. Returns at once: another thread that is writing does this when it has ended, and what the
        peer has no room for is written when it has. If the connection has ended, its reader learns so."""
        self._due = True
        while self._due and self._write_lock.acquire(False):
            try:
                self._due = False  # before taking it: what comes from now on is due again
                if not self._write_what_fits():
                    self.flush_within(_NO_ROOM)
            except (OSError, ValueError) as error:
                log.debug("a connection ended before what it held back was written: %s", error)
            finally:
                self._write_lock.release()
        self._has_written()

    def mention(self, message: AnyMessage, ack: int = 0, within: float = 0.0) -> None:
        """Send a notice that need not arrive, without waiting: at once, or `within` some seconds."""
        if len(self.outbox) < _MOST_MENTIONED:
            self.outbox.append(encode_whole(NOTICE, 0, ack, message))
            if within:
                self.flush_within(within)
            else:
                self.flush()

    def tidy(self, before: float) -> bool:
        """Return the blocks that have been idle since `before`, and tell the peer which it need not keep either.

        Says whether the peer may have such news as well."""
        self.memory.trim(before)
        if self.memory.released or self.memory.retired or self.devices is not None:
            self.flush()
        return self.memory.has_blocks

    def _write(self, buffers: list[Any], deadline: float | None) -> None:
        """Write, after what waits. TimeoutError at the deadline, also if another thread is still writing."""
        if not self._write_lock.acquire(False):
            self._wait_to_write(deadline)
        try:
            self._write_with_held(buffers, deadline)
        finally:
            self._write_lock.release()
            if self._due:
                self.flush()
        self._has_written()

    def _has_written(self) -> None:
        if order.active and self.memory.devices is not None:
            self.memory.devices.landing.prepare_expected()

    def _waiting(self) -> list[bytes]:
        """Under the lock: what was held back and what is to be told about blocks, taken out to be written."""
        notices: list[bytes] = []
        if self._released or self._retired or self.memory.devices is not None:
            notices = [encode_prefix(NOTICE, 0, 0, notice) for notice in self.memory.notices()]
        held: list[bytes] = []
        while self.outbox:
            held.append(self.outbox.popleft())
        # After what was held back: that may name a block which is free since it was encoded. And looked at before: they
        # may name what has just been put there (`_tell`).
        return held + notices

    def _write_what_fits(self) -> bool:
        """Under the lock: write what waits, as far as there is room. Whether that is all."""
        if self.stream.unsent and not self.stream.begin(b""):
            return False
        waiting = self._waiting()
        return not waiting or self.stream.begin(b"".join(waiting))

    def _write_with_held(self, buffers: list[Any], deadline: float | None) -> None:
        """Under the lock: write, after what waits."""
        held = self._waiting()
        if held:
            is_one = len(buffers) == 1  # which is small, or nearly so
            buffers = [b"".join((*held, *buffers))] if is_one else [b"".join(held), *buffers]
        try:
            if order.active and any(type(buffer) is host.DeviceBytes for buffer in buffers):
                self._write_chunks(buffers, deadline)
            else:
                self.stream.send(buffers, deadline, self.on_blocked)
        except TimeoutError:
            if not self.stream.broken:
                self.outbox.extendleft(reversed(held))  # nothing was written: they wait for the next write
            raise

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

    def _wait_to_write(self, deadline: float | None) -> None:
        """Another thread is writing. Usually it is done in a moment; else the peer does not read, perhaps until what it
        sends is read, and this may be the thread that does so."""
        left = _FOREVER if deadline is None else max(0.0, deadline - time.monotonic())
        if self._write_lock.acquire(timeout=min(left, _MOMENT)):
            return
        if left > _MOMENT:
            self.on_blocked()
            if self._write_lock.acquire(timeout=-1 if deadline is None else left - _MOMENT):
                return
        raise TimeoutError("another message is still being written to the peer, which does not read it")

    def _tell(self, message: AnyMessage) -> None:
        """Have a notice written before anything that is sent from now on."""
        self.outbox.append(encode_prefix(NOTICE, 0, 0, message))

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
