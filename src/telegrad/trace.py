"""What a worker records about itself while somebody watches: events as plain tuples, in a queue of bounded length.

`recorder` is the one flag. It is None unless recording is on, and each place that has something to record tests it
once: `if trace.recorder is not None: trace.recorder.answered(slot)`. What is recorded is only appended here; names,
times of other workers and statistics are worked out later, off the path of a call (`telegrad.observe`).

    ("call",  (parent, thread, message, bytes, tensors), since, end, (link, request id, what), kind of the reply's
              frame, segments of the reply, waited for by a thread)
    ("serve", [arrived, begun, returned, thread, message, segments of the request], end, session, request id, bytes,
              tensors, kind of the reply's frame)
    ("span",  parent, since, end, thread, name, category, {details})
    ("mark",  when, thread, name, category, {details})

Times are those of `time.monotonic`; bytes and tensors are what this worker sent, with the request or with the reply;
segments say how the tensors came that it received. A parent is the request whose code was running, by its session and
number there. Nothing here keeps a payload or the memory of a tensor.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

CAPACITY = 100_000  # events that wait to be collected; about 30 MB

Event = tuple[Any, ...]
Key = tuple[Any, int]  # a request that is served: its session, and its number there

# The request whose code runs, in this thread or coroutine; known only while recording.
current: ContextVar[Key | None] = ContextVar("telegrad_request", default=None)
recorder: "Recorder | None" = None
_REQUEST, _REPLY = 1, 2  # kinds of frames, as in `wire/frames.py`, a layer above
now = _now = time.monotonic
_thread = threading.get_ident
_current, _set_current, _reset_current = current.get, current.set, current.reset


class _NoReply:
    """Stands for the reply of a request that has none."""

    kind = 0
    segments = ()


_NO_REPLY = _NoReply()


class Recorder:
    """The events of one process. Any thread may add one; whoever drains takes each event once."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.lost = 0  # events there was no room for
        self._capacity = capacity
        self._events: deque[Event] = deque()
        self._running: dict[Key, list[Any]] = {}

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: Event) -> None:
        """Keep an event, if there is room."""
        if len(self._events) < self._capacity:
            self._events.append(event)
        else:
            self.lost += 1

    def drain(self) -> list[Event]:
        """The events so far, taken out."""
        events = self._events
        return [events.popleft() for _ in range(len(events))]

    # --- the caller's side ---

    def asked(self, slot: Any, message: Any, payload: Any, tensors: Any, memory: Any) -> None:
        """A request is about to be sent."""
        size = len(payload) + _size(memory) if memory else len(payload)
        slot.seen = (_current(), _thread(), message, size, len(tensors))

    def answered(self, slot: Any) -> None:
        """A request has its reply, or its error."""
        seen = slot.seen
        if seen is None:  # it was asked before the recording began
            return
        slot.seen = None
        frame = slot.frame or _NO_REPLY
        events, request = self._events, (slot.link, slot.request_id, slot.subject)
        if len(events) < self._capacity:
            in_person = slot.complete is None
            events.append(("call", seen, slot.since, _now(), request, frame.kind, frame.segments, in_person))
        else:
            self.lost += 1

    def waited(self, wait: Callable[[], None], slot: Any) -> None:
        """Wait for the reply of a request that was asked before."""
        since = _now()
        try:
            wait()
        finally:
            self.span("wait", "wait", since, what=slot.subject, worker=int(slot.link.member.worker_id))

    # --- the side that serves ---

    def arrived(self, frames: Any) -> None:
        """Messages were read; others may have to be served first."""
        when = _now()
        for frame in frames:
            if frame.kind == _REQUEST:
                frame.read_at = when

    def serve(self, request: Any, serve: Callable[[Any], None]) -> None:
        """Serve a request. It is recorded when it is answered, once: a wrapped one is served twice."""
        frame = request.frame
        key = (request.session, frame.request_id)
        running = self._running[key] = [frame.read_at, _now(), 0.0, _thread(), frame.message, frame.segments]
        frame.read_at = 0.0
        token = _set_current(key)
        try:
            serve(request)
        finally:
            _reset_current(token)
            running[2] = _now()  # it may be answered later: a coroutine, or a part in a backward pass

    def replied(self, session: Any, request_id: int, kind: int, content: Sequence[Any]) -> None:
        """A request was answered, by whichever thread; with a message, and perhaps a payload, tensors and memory."""
        running = self._running.pop((session, request_id), None)
        if running is None:
            return
        size = count = 0
        if len(content) > 1:
            size = len(content[1])
            if len(content) > 3 and content[3]:
                size += _size(content[3])
                count = len(content[2])
        events = self._events
        if len(events) < self._capacity:
            events.append(("serve", running, _now(), session, request_id, size, count, kind))
        else:
            self.lost += 1

    # --- anything else ---

    def span(self, name: str, category: str, since: float, **details: Any) -> None:
        """Something went on since `since` in this thread, until now."""
        self.add(("span", _current(), since, _now(), _thread(), name, category, details))

    def timed(self, name: str, category: str, function: Callable[[], Any]) -> Any:
        """Run `function` as a span."""
        since = _now()
        try:
            return function()
        finally:
            self.span(name, category, since)

    def mark(self, name: str, category: str, **details: Any) -> None:
        """Something happened."""
        self.add(("mark", _now(), _thread(), name, category, details))


def _size(memory: Any) -> int:
    """The bytes of tensors that go with a message: as they are, or segments of memory."""
    return len(memory) if type(memory) is bytes else sum([segment.nbytes for segment in memory])
