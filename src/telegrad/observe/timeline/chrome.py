"""A timeline as a file for Perfetto and chrome://tracing (the Trace Event Format). Pure.

Each worker is a process, each of its threads a track. What a thread did lies on its track and nests there. What only
went on meanwhile (a call whose future nobody waited for yet, a request that is answered later) overlaps, and lies on
tracks beside it, as few as there is room on. An arrow leads from a call to where it was served; one of category
`gradient` from a Recv to its Send.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from telegrad.observe.events.kernels import Kernel
from telegrad.observe.events.records import AnyEvent, Call, Mark, Served, Span
from telegrad.observe.timeline.clocks import Bounds, Offset, Ping, align, tighten

_NAMES = {"PropagateGradients": "gradients", "BeginPass": "begin pass"}
_PASS = _NAMES.keys()
_QUEUED = 50e-6  # seconds in a queue that are worth a slice of their own


class Track(NamedTuple):
    """What was collected of one incarnation of one worker."""

    worker_id: int
    incarnation: int
    name: str
    pid: int
    events: Sequence[AnyEvent]
    threads: Mapping[int, str]
    pings: Sequence[Ping] = ()
    lost: int = 0


Key = tuple[int, int, int]


def build(tracks: Sequence[Track], reference: int) -> dict[str, Any]:
    """The whole file. `reference` is the incarnation by whose clock the others are aligned."""
    calls: dict[Key, tuple[Track, Call]] = {}
    served: dict[Key, tuple[Track, Served]] = {}
    for track in tracks:
        for event in track.events:
            if isinstance(event, Call):
                calls[track.incarnation, event.link, event.request_id] = (track, event)
            elif isinstance(event, Served):
                served[event.caller, event.link, event.request_id] = (track, event)
    offsets = _align(tracks, reference, calls, served)
    ahead = {track.incarnation: offsets.get(track.incarnation, Offset(0.0, 0.0)).ahead for track in tracks}
    origin = min((_begin(event) - ahead[t.incarnation] for t in tracks for event in t.events), default=0.0)
    writer = _Writer(tracks, {incarnation: origin + offset for incarnation, offset in ahead.items()})
    for track in tracks:
        for event in sorted(track.events, key=_begin):
            _write(writer, track, event, calls, served)
    return {
        "traceEvents": writer.events,
        "displayTimeUnit": "ms",
        "otherData": {
            "program": "telegrad",
            "clocks": {
                track.name: {
                    "ahead_us": round(offsets.get(track.incarnation, Offset(0, 0)).ahead * 1e6, 1),
                    "error_us": round(offsets.get(track.incarnation, Offset(0, 0)).error * 1e6, 1),
                }
                for track in tracks
            },
            "lost_events": {track.name: track.lost for track in tracks if track.lost},
        },
    }


def _align(
    tracks: Sequence[Track],
    reference: int,
    calls: Mapping[Key, tuple[Track, Call]],
    served: Mapping[Key, tuple[Track, Served]],
) -> dict[int, Offset]:
    bounds: Bounds = {}
    for key, (track, call) in calls.items():
        if key in served:
            other, request = served[key]
            tighten(bounds, track.incarnation, other.incarnation, call.since, request.arrived)
            tighten(bounds, other.incarnation, track.incarnation, request.end, call.end)
    return align(reference, {track.incarnation: track.pings for track in tracks if track.pings}, bounds)


def _begin(event: AnyEvent) -> float:
    if isinstance(event, Served):
        return event.arrived
    return event.when if isinstance(event, Mark) else event.since


class _Writer:
    """Puts events on tracks."""

    def __init__(self, tracks: Sequence[Track], origins: Mapping[int, float]) -> None:
        self.events: list[dict[str, Any]] = []
        self._origins = origins
        self._processes: dict[int, int] = {}
        self._threads: dict[tuple[int, int], int] = {}
        self._beside: dict[tuple[int, str], list[tuple[int, float]]] = defaultdict(list)
        self._next_thread = 0
        for number, track in enumerate(tracks, start=1):
            self._processes[track.incarnation] = number
            label = f"{track.name} (pid {track.pid})" if track.pid else track.name
            self._name("process_name", number, 0, label)
            self.events.append(
                {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
            )

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        self.events.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}})

    def _new_track(self, pid: int, name: str) -> int:
        self._next_thread += 1
        self._name("thread_name", pid, self._next_thread, name)
        return self._next_thread

    def thread(self, track: Track, ident: int) -> int:
        """The track of a thread."""
        pid = self._processes[track.incarnation]
        if (pid, ident) not in self._threads:
            self._threads[pid, ident] = self._new_track(pid, track.threads.get(ident, f"thread {ident}"))
        return self._threads[pid, ident]

    def beside(self, track: Track, what: str, begin: float, end: float) -> int:
        """A track for something that overlaps others: the first that is free."""
        pid = self._processes[track.incarnation]
        lanes = self._beside[pid, what]
        for position, (tid, until) in enumerate(lanes):
            if until <= begin:
                lanes[position] = (tid, end)
                return tid
        tid = self._new_track(pid, what)
        lanes.append((tid, end))
        return tid

    def at(self, track: Track, when: float) -> float:
        """A time of a worker's clock, in microseconds from the beginning."""
        return round((when - self._origins[track.incarnation]) * 1e6, 3)

    def slice(
        self, track: Track, tid: int, name: str, category: str, begin: float, end: float, args: dict[str, Any]
    ) -> None:
        """Something that took a while."""
        begin_us = self.at(track, begin)
        self.events.append(
            {"ph": "X", "name": name, "cat": category, "pid": self._processes[track.incarnation], "tid": tid}
            | {"ts": begin_us, "dur": max(0.0, round(self.at(track, end) - begin_us, 3)), "args": args}
        )

    def instant(self, track: Track, event: Mark) -> None:
        """Something without length, shown over the whole process."""
        self.events.append(
            {"ph": "i", "name": event.name, "cat": event.category, "pid": self._processes[track.incarnation]}
            | {"tid": self.thread(track, event.thread), "ts": self.at(track, event.when), "s": "p"}
            | {"args": event.details}
        )

    def flow(self, phase: str, track: Track, tid: int, when: float, category: str, number: str) -> None:
        """One end of an arrow."""
        event = {"ph": phase, "id": number, "name": category, "cat": category, "tid": tid}
        event |= {"pid": self._processes[track.incarnation], "ts": self.at(track, when)}
        if phase == "f":
            event["bp"] = "e"
        self.events.append(event)


def short(what: str) -> str:
    """The name of what was called, from the words in which a request is described."""
    return what.partition(" on worker ")[0].removesuffix("()") or what


def _write(
    writer: _Writer,
    track: Track,
    event: AnyEvent,
    calls: Mapping[Key, tuple[Track, Call]],
    served: Mapping[Key, tuple[Track, Served]],
) -> None:
    if isinstance(event, Mark):
        writer.instant(track, event)
    elif isinstance(event, Span):
        args = _with_parent(event.details, event.parent, calls)
        tid = writer.thread(track, event.thread)
        writer.slice(track, tid, event.name, event.category, event.since, event.end, args)
    elif isinstance(event, Kernel):
        tid = writer.beside(track, f"GPU {event.device}, stream {event.stream}", event.since, event.end)
        args = {"device": event.device, "stream": event.stream}
        writer.slice(track, tid, event.name, "kernel", event.since, event.end, args)
    elif isinstance(event, Call):
        _write_call(writer, track, event, calls, served)
    else:
        _write_served(writer, track, event, calls)


def _write_call(
    writer: _Writer,
    track: Track,
    call: Call,
    calls: Mapping[Key, tuple[Track, Call]],
    served: Mapping[Key, tuple[Track, Served]],
) -> None:
    key = (track.incarnation, call.link, call.request_id)
    other = served.get(key)
    name = _NAMES.get(call.message) or short(call.what)
    args: dict[str, Any] = {"request": call.request_id, "message": call.message, "bytes": call.size}
    args |= {"tensors": call.tensors, "ok": call.ok}
    if call.context >= 0:
        args["context"] = call.context
    if other is not None:
        args["worker"] = other[0].name
        args["queue_us"] = round((other[1].begun - other[1].arrived) * 1e6, 1)
        args["run_us"] = round((other[1].end - other[1].begun) * 1e6, 1)
        args["send_us"] = round(writer.at(other[0], other[1].arrived) - writer.at(track, call.since), 1)
        args["reply_us"] = round(writer.at(track, call.end) - writer.at(other[0], other[1].end), 1)
        args["reply_bytes"] = other[1].size
        args["reply_tensors"] = other[1].tensors
        if other[1].ways:
            args["tensor_bytes"] = other[1].ways
    if call.ways:
        args["reply_tensor_bytes"] = call.ways
    if call.in_person:
        tid = writer.thread(track, call.thread)
    else:
        tid = writer.beside(track, "calls in flight", call.since, call.end)
    category = "gradient" if call.message in _PASS else "call"
    to = other[0].name if other is not None else f"worker {call.to}"
    writer.slice(track, tid, f"{name} → {to}", category, call.since, call.end, _with_parent(args, call.parent, calls))
    if other is not None:
        writer.flow("s", track, tid, call.since, category, _arrow(key))


def _write_served(writer: _Writer, track: Track, request: Served, calls: Mapping[Key, tuple[Track, Call]]) -> None:
    key = (request.caller, request.link, request.request_id)
    asked = calls.get(key)
    name = _NAMES.get(request.message) or (request.message if asked is None else short(asked[1].what))
    category = "gradient" if request.message in _PASS else "forward" if request.context >= 0 else "run"
    args: dict[str, Any] = {"request": request.request_id, "message": request.message, "ok": request.ok}
    args |= {"reply_bytes": request.size, "reply_tensors": request.tensors}
    args["queue_us"] = round((request.begun - request.arrived) * 1e6, 1)
    if request.context >= 0:
        args["context"] = request.context
    if request.ways:
        args["tensor_bytes"] = request.ways
    if asked is not None:
        args |= {"caller": asked[0].name, "bytes": asked[1].size, "tensors": asked[1].tensors}
    if request.begun - request.arrived > _QUEUED:
        tid = writer.beside(track, "queued", request.arrived, request.begun)
        writer.slice(track, tid, f"queued: {name}", "queue", request.arrived, request.begun, {})
    tid = writer.thread(track, request.thread)
    writer.slice(track, tid, name, category, request.begun, min(request.returned, request.end), args)
    if request.end > request.returned:
        later = writer.beside(track, "answered later", request.begun, request.end)
        writer.slice(track, later, f"{name} (until answered)", category, request.begun, request.end, {})
    if asked is not None:
        writer.flow("f", track, tid, request.begun, "gradient" if request.message in _PASS else "call", _arrow(key))


def _arrow(key: Key) -> str:
    return "-".join(f"{part:x}" for part in key)


def _with_parent(
    args: dict[str, Any], parent: tuple[int, int, int] | None, calls: Mapping[Key, tuple[Track, Call]]
) -> dict[str, Any]:
    """Which call the code served that did this."""
    if parent is None:
        return args
    of = calls.get(parent)
    return {
        **args,
        "parent": _arrow(parent),
        **({"within": _NAMES.get(of[1].message) or short(of[1].what)} if of else {}),
    }
