"""What a worker records about itself while somebody watches: events as plain tuples, in a queue of bounded length.

`recorder` is the one flag. It is None unless recording is on, and each place that has something to record tests it
once: `if trace.recorder is not None: trace.recorder.answered(slot)`. What is recorded is only appended here; names,
times of other workers and statistics are worked out later, off the path of a call (`telegrad.observe`).

    ("call",  parent, since, end, thread, worker id, link, request id, what, message, bytes, tensors, ok,
              waited for by a thread)
    ("serve", arrived, begun, returned, end, thread, caller's incarnation, link, request id, message, bytes, tensors,
              ok)
    ("span",  parent, since, end, thread, name, category, {details})
    ("mark",  when, thread, name, category, {details})

Times are those of `time.monotonic`; bytes and tensors are what this worker sent, with the request or with the reply. A
parent is the request whose code was running. A request is named by the incarnation of its caller, the link and its
number there; of its own calls a worker notes the last two.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

CAPACITY = 100_000  # events that wait to be collected; about 30 MB

Event = tuple[Any, ...]
Key = tuple[int, int, int]  # a request: its caller's incarnation, link and number

# The request whose code runs, in this thread or coroutine; known only while recording.
current: ContextVar[Key | None] = ContextVar("telegrad_request", default=None)
recorder: "Recorder | None" = None
_REQUEST, _REPLY = 1, 2  # kinds of frames, as in `wire/frames.py`, a layer above
now = _now = time.monotonic
_thread = threading.get_ident


class Recorder:
    """The events of one process. Any thread may add one; whoever drains takes each event once."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.lost = 0  # events there was no room for
        self._capacity = capacity
        self._events: deque[Event] = deque()
        self._arrived: dict[Key, float] = {}
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
        slot.seen = (current.get(), _thread(), message, len(payload) + _size(memory), len(tensors))

    def answered(self, slot: Any) -> None:
        """A request has its reply, or its error."""
        seen = slot.seen
        if seen is None:  # it was asked before the recording began
            return
        slot.seen = None
        parent, thread, message, size, count = seen
        frame, link = slot.frame, slot.link
        to, ok = link.member.worker_id, frame is not None and frame.kind == _REPLY
        request = (link.number, slot.request_id, slot.subject, message)
        self.add(("call", parent, slot.since, _now(), thread, to, *request, size, count, ok, slot.complete is None))

    def waited(self, wait: Callable[[], None], slot: Any) -> None:
        """Wait for the reply of a request that was asked before."""
        since = _now()
        try:
            wait()
        finally:
            self.span("wait", "wait", since, what=slot.subject, worker=int(slot.link.member.worker_id))

    # --- the side that serves ---

    def arrived(self, session: Any, frames: Any) -> None:
        """Requests were read; others may have to be served first."""
        when = _now()
        if len(self._arrived) < self._capacity:
            for frame in frames:
                if frame.kind == _REQUEST:
                    self._arrived[session.member.incarnation, session.number, frame.request_id] = when

    def takes(self, request: Any) -> bool:
        """Whether a request is not being recorded yet. A wrapped one is served twice: as it came, and unwrapped."""
        session, frame = request.session, request.frame
        key = (session.member.incarnation, session.number, frame.request_id)
        return frame.kind == _REQUEST and current.get() != key

    def serve(self, request: Any, serve: Callable[[Any], None]) -> None:
        """Serve a request. It is recorded when it is answered."""
        session, frame = request.session, request.frame
        key = (session.member.incarnation, session.number, frame.request_id)
        begun = _now()
        running = self._running[key] = [self._arrived.pop(key, begun), begun, 0.0, _thread(), frame.message]
        token = current.set(key)
        try:
            serve(request)
        finally:
            current.reset(token)
            running[2] = _now()  # it may be answered later: a coroutine, or a part in a backward pass

    def replied(self, session: Any, request_id: int, kind: int, content: Sequence[Any]) -> None:
        """A request was answered, by whichever thread; with a message, and perhaps a payload, tensors and memory."""
        key = (session.member.incarnation, session.number, request_id)
        running = self._running.pop(key, None)
        if running is not None:
            arrived, begun, returned, thread, message = running
            payload, tensors, memory = (*content[1:], b"", (), b"")[:3] if len(content) > 1 else (b"", (), b"")
            end, size = _now(), len(payload) + _size(memory)
            times = (arrived, begun, returned or end, end)
            self.add(("serve", *times, thread, *key, message, size, len(tensors), kind == _REPLY))

    # --- anything else ---

    def span(self, name: str, category: str, since: float, **details: Any) -> None:
        """Something went on since `since` in this thread, until now."""
        self.add(("span", current.get(), since, _now(), _thread(), name, category, details))

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
