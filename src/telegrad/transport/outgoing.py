"""The writing half of a connection: whole frames leave in order, and small ones may wait to share a write.

What waits is in the `outbox`. It leaves before whatever is written next; or by `flush`, which never waits: if another
thread is writing, that one writes it when it has ended, and if the peer does not read, the timer looks again when there
may be room (`flush_within`). Nobody else keeps account of it (`docs/decisions/0018-what-waits-to-be-written.md`).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from telegrad.cuda import host, order
from telegrad.errors import SerializationError
from telegrad.transport.stream import Stream
from telegrad.transport.tensor_memory import TensorMemory
from telegrad.wire.frames import NOTICE, encode_naming, encode_whole, max_record
from telegrad.wire.messages import AnyMessage

log = logging.getLogger("telegrad.transport")

SMALL_FRAME = 64 * 1024  # bytes up to which a message is one piece, and can share a write
_HOLD_UP_TO = 64  # small frames that may wait for one write
_MOST_MENTIONED = 4096  # frames that wait for a peer that does not read, beyond which it is told nothing more
_MOMENT = 0.002  # seconds that a message takes to be written, if nobody is slow
_NO_ROOM = 0.005  # seconds after which to look again whether the peer has read
_FOREVER = float("inf")


def _no_timer(seconds: float) -> None:
    pass


class Outgoing:
    """What is written to one stream. Any thread may write; `Connection` is the other half, which reads."""

    def __init__(self, stream: Stream, max_frame: int, on_blocked: Callable[[], None]) -> None:
        self.stream = stream
        self.on_blocked = on_blocked  # called by a thread that has to wait until the peer reads
        self.peer = "the peer"  # its name, for errors
        self.peer_takes = max_frame  # bytes in one message that it does not refuse
        self.memory = TensorMemory(stream, self._tell)
        # Blocks that the peer does not know yet to be free: looked at before each write.
        self._released, self._retired = self.memory.released, self.memory.retired
        self.outbox: deque[bytes] = deque()  # small frames that wait for the next write
        self.flush_within: Callable[[float], None] = _no_timer  # flushes after some time, if nothing else was written
        self._due = False  # whether the outbox is to be written by whoever has the lock, or takes it next
        self._write_lock = threading.Lock()

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
                    devices = self.memory.devices
                    if self.outbox or self._released or self._retired or (devices is not None and devices.has_news):
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

    def mention(self, message: AnyMessage, ack: int = 0, within: float = 0.0, payload: bytes = b"") -> None:
        """Send a notice that need not arrive, without waiting: at once, or `within` some seconds."""
        if len(self.outbox) < _MOST_MENTIONED:
            self.outbox.append(encode_whole(NOTICE, 0, ack, message, payload))
            if within:
                self.flush_within(within)
            else:
                self.flush()

    def _tell(self, message: AnyMessage) -> None:
        """Have a notice written before anything that is sent from now on."""
        self.outbox.append(encode_naming(NOTICE, 0, 0, message))

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
        """Something was written, and its reader is busy with it: a time for what nobody waits for."""
        devices = self.memory.devices
        if devices is not None and devices.use_time():
            self.flush()  # so that it is not in the way of the next message

    def _waiting(self) -> list[bytes]:
        """Under the lock: what was held back and what is to be told about blocks, taken out to be written."""
        notices: list[bytes] = []
        devices = self.memory.devices
        if self._released or self._retired or (devices is not None and devices.has_news):
            notices = [encode_naming(NOTICE, 0, 0, notice) for notice in self.memory.notices()]
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

    def _check_size(self, buffers: Sequence[Any]) -> None:
        """Refuse here what the peer would refuse: sent all the same, it would end the connection again and again."""
        size, record = sum(map(len, buffers)), len(buffers[0])
        if size > self.peer_takes or record > max_record(self.peer_takes):
            what = f"a message of {size} bytes" if size > self.peer_takes else f"a table of tensors of {record} bytes"
            raise SerializationError(
                f"{what} is over the limit of {self.peer_takes} that {self.peer} has set for what "
                "it takes in; send it in parts, or raise `max_message_bytes` in the options of that worker"
            )
