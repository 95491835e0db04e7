"""Stripes carry the tensor bytes of a large message over several streams at once, one part each (`wire/parts.py`).

One TCP connection is bounded by what one core on each side can copy. Here the thread that sends or reads a message does
so for the first part, on the stream that the message is on, and threads of `threads.py` for the others, on side
streams that belong to the same connection. A message has arrived when all of its parts have: until then nothing
that follows it on the first stream is read. If one stream breaks the connection has broken, as with one stream.

Ownership: the connection's writer sends one message at a time, under its lock; its reader reads one at a time. So each
side stream has one thread that writes and one that reads at most. `_lock` guards who is still at a stream: the last one
closes the sockets, since the number of a closed descriptor may be another's at once.
"""

import functools
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from telegrad.cuda import host, order
from telegrad.errors import SealBroken
from telegrad.transport.stream import SocketStream
from telegrad.transport.stripes.sealed_stream import SealedStream
from telegrad.transport.stripes.threads import PartThreads
from telegrad.wire.frame_reader import Upload
from telegrad.wire.parts import LEAST_FIRST, cut, divide

log = logging.getLogger("telegrad.transport")

_LOOK_AGAIN_SECONDS = 1.0
# Bytes to be there before a thread reads: each time it wants the interpreter, which eight share. At most half of what
# is missing: one that waits for all of a part may wait for what the kernel has no window for, until its time is up.
_AT_ONCE = 2**20
_SLOW_SECONDS = 0.02  # if it takes longer, whatever is there is read, so that others see that it comes
# A reader that finds the rest of a message missing waits so long before it looks for other work: mostly it is there.
_LEAST_WAIT = 0.02


# A peer that lies could have a connection broken as often as it makes one: so many are told of in a minute.
_warned: deque[float] = deque([-60.0] * 20, maxlen=20)


def _nothing() -> None:
    pass


def _warn(error: SealBroken) -> None:
    now = time.monotonic()
    if now - _warned[0] >= 60.0:
        _warned.append(now)
        log.warning("%s", error)


class Stripes:
    """The streams of one connection: `main`, and those beside it."""

    def __init__(self, main: SocketStream, sides: Sequence[SocketStream], threads: PartThreads) -> None:
        self._main = main
        self._sides = tuple(sides)
        for side in self._sides:
            side.keep_alive()
        self._threads = threads
        self._lock = threading.Lock()
        self._busy = 0  # threads that are at a side stream
        self._closed = False
        self.count = len(self._sides) + 1
        # Sealed ones take nearly all of it: the main stream's TLS is slower than each of them.
        self._first = LEAST_FIRST if isinstance(self._sides[0], SealedStream) else None
        self.last_read = 0.0
        self.on_arrival: Callable[[], None] = _nothing  # a message is complete whose reader may have gone

    # --- sending ---

    def send(self, buffers: Sequence[Any], total: int, deadline: float | None, blocked: Callable[[], None]) -> None:
        """Write `buffers`, of `total` bytes, in parts. The head of their message has been written, so whatever goes
        wrong breaks the connection."""
        outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        parts = cut(buffers, divide(total, self.count, self._first))
        begun = 0
        try:
            if order.active:
                _begin_on_gpu(parts)
            for side, part in zip(self._sides, parts[1:], strict=True):
                if not part:
                    break  # nor has any behind it
                self._start(functools.partial(self._write, side, part, deadline, outcomes))
                begun += 1
            _write_part(self._main, parts[0], deadline, blocked)
            if outcomes.qsize() < begun:
                blocked()  # the peer may wait until what it sends is read, and this thread waits for the peer
            while begun:
                error = _next_outcome(outcomes, deadline)
                begun -= 1
                if error is not None:
                    raise error
        except BaseException:
            self.abort()  # wakes those who still write
            raise

    def _write(
        self,
        side: SocketStream,
        part: list[Any],
        deadline: float | None,
        outcomes: "queue.SimpleQueue[BaseException | None]",
    ) -> None:
        try:
            _write_part(side, part, deadline, _nothing)
        except BaseException as error:
            outcomes.put(error)
        else:
            outcomes.put(None)

    # --- receiving ---

    def arriving(self, view: memoryview, upload: Upload | None = None) -> "Arrival":
        """A message with so much memory for its tensors begins to come: read its parts into it. With `upload`, what
        has come of them is taken on to a GPU."""
        bounds = divide(len(view), self.count, self._first)
        elsewhere = [(begin, end) for begin, end in itertools.pairwise(bounds[1:]) if begin < end]
        arrival = Arrival(self, self._main, bounds[1], len(elsewhere))
        for side, (begin, end) in zip(self._sides, elsewhere, strict=False):  # small messages leave the last ones out
            reached = None if upload is None else upload.part(begin, end)
            self._start(functools.partial(self._read, side, view[begin:end], arrival, begin, reached))
        return arrival

    def _read(
        self,
        side: SocketStream,
        view: memoryview,
        arrival: "Arrival",
        begin: int,
        reached: Callable[[int], None] | None,
    ) -> None:
        error: Exception | None = None
        try:
            at, end = 0, len(view)
            while at < end:
                side.wait_for(min(_AT_ONCE, (end - at) // 2 or 1))
                if not side.readable(_SLOW_SECONDS):
                    side.wait_for(1)
                    if not side.readable(_LOOK_AGAIN_SECONDS):
                        if self._closed:
                            raise ConnectionResetError("the connection was closed in the middle of a message")
                        continue
                count = side.receive_into(view[at:])
                if count == 0:
                    raise ConnectionResetError("a stream of the connection ended in the middle of a message")
                self.last_read = time.monotonic()
                at += max(0, count)
                if reached is not None:
                    reached(begin + at)
        except Exception as problem:
            error = problem
            if isinstance(problem, SealBroken):
                _warn(problem)
            self.abort()
        arrival.part_came(error)

    # --- both ---

    def _start(self, task: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise ConnectionResetError("the connection is closed")
            self._busy += 1
        try:
            self._threads.run(functools.partial(self._run, task))
        except RuntimeError as error:
            self._leave()
            raise ConnectionResetError(str(error)) from None

    def _run(self, task: Callable[[], None]) -> None:
        try:
            task()
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._busy -= 1
            last = self._closed and not self._busy
        if last:
            self._close_sides()

    @property
    def last_progress(self) -> float:
        """When the peer last took in, or sent, a piece of a part beside the first."""
        return max(self.last_read, *(side.last_written for side in self._sides))

    def peer_host_answers(self, seconds: float) -> bool:
        """Whether the peer's kernel confirmed something on a side stream within `seconds`."""
        return any(side.peer_host_answers(seconds) for side in self._sides)

    @property
    def delivered(self) -> bool:
        """Whether all that was written to the side streams has reached the peer's host."""
        return all(side.delivered for side in self._sides)

    def abort(self) -> None:
        """A part cannot be sent or read: nothing can follow it, on any of the streams."""
        for stream in (self._main, *self._sides):
            stream.abort()

    def close(self) -> None:
        """End the side streams; those who wait at one wake up."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = not self._busy
        for side in self._sides:
            side.abort()
        if idle:
            self._close_sides()

    def _close_sides(self) -> None:
        for side in self._sides:
            side.close()


class Arrival:
    """A message that is coming in parts. One thread reads its first part and asks whether it is complete."""

    def __init__(self, stripes: Stripes, main: SocketStream, here: int, elsewhere: int) -> None:
        self.here = here  # bytes of it that come over the main stream
        self._stripes = stripes
        self._main = main
        self._missing = elsewhere
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._held = False

    def part_came(self, error: Exception | None) -> None:
        """A thread has read a part, or cannot."""
        with self._lock:
            self._missing -= 1
            self._error = self._error or error
            if self._missing and self._error is None:
                return
        self._done.set()
        if self._held:
            self._stripes.on_arrival()

    def is_complete(self) -> bool:
        """The first part is there: whether the others are. If not, the main stream has nothing to read until they
        are. ConnectionResetError if one cannot come."""
        if not self._done.is_set():
            self._main.hold_until(self._done, self._wait)
            self._held = True
            if not self._done.is_set():  # looked at again: it may have come before it could know that it is waited for
                return False
        self._main.go_on()
        if isinstance(self._error, SealBroken):
            raise self._error
        if self._error is not None:
            raise ConnectionResetError(f"a large message did not arrive: {self._error}")
        return True

    def _wait(self, seconds: float) -> bool:
        return self._done.wait(max(seconds, _LEAST_WAIT))


def _begin_on_gpu(parts: Sequence[Sequence[Any]]) -> None:
    """Have what comes first of each part on its way from the GPU, before the threads that write them begin."""
    by_device: dict[int, list[host.DeviceBytes]] = {}
    for part in parts:
        first = next((data for data in part if type(data) is host.DeviceBytes), None)
        if first is not None:
            by_device.setdefault(first.device, []).append(first)
    for several in by_device.values():
        host.bring_down(several)


def _write_part(stream: SocketStream, part: Sequence[Any], deadline: float | None, blocked: Callable[[], None]) -> None:
    """Write a part, some of which may be on the GPU and comes from there in chunks."""
    if not order.active or isinstance(stream, SealedStream):
        if part:
            stream.send(part, deadline, blocked)
        return
    for buffer in part:
        for piece in buffer.chunks() if type(buffer) is host.DeviceBytes else (buffer,):
            if len(piece):
                stream.send([piece], deadline, blocked)


def _next_outcome(outcomes: "queue.SimpleQueue[BaseException | None]", deadline: float | None) -> BaseException | None:
    try:
        return outcomes.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise TimeoutError("the peer does not read what is sent to it") from None
