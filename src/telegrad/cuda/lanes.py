"""Lanes: the streams that requests and passes run on, and whose work each of them finds done.

- A request runs on streams of its own, from a pool (a `Lane`), so that several may overlap. It finds the work of
  everything that had been answered here before it arrived, and that its caller may therefore know of: earlier requests,
  earlier passes, and what lies on the default stream.
- A backward pass has streams of its own, too, whichever threads run its parts.

What a lane's work is to others (`ended`, `unfinished` and `left_at` of a `Lane`):

    state         since                              ended  unfinished  left_at  who comes later waits for
    at work       `take`                             no     no          0        nothing: it knows nothing of it
    taken again   `take`, with work left there       no     yes         then     the events of what was there before
    answered      `end`: the answer is about to go   yes    yes                  all that is on its streams
    free          `give_back`                        yes    yes                  the same, as it is the last to end
    done          somebody found its streams idle    yes    no                   nothing

One is done only if nobody has used it since its streams were looked at (`uses`). Later means after `ended_at`, and of
one that was taken again after `left_at`. The default streams are in none of these states: all follow them at any time.

All of this is one process's: agents that share a process share its streams. `_lock` guards the lists; the streams of
one lane belong to one request or pass.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from telegrad.cuda import order

_lock = threading.Lock()
_lanes: list[Lane] = []  # all there are
_free: list[Lane] = []  # the last one used is taken first: its own work needs no waiting for


class _Local(threading.local):
    lane: Lane | None = None  # the one this thread is on
    default: Lane | None = None  # see `default_lane`


_local = _Local()


class Number(Protocol):
    """A number in memory that a stream writes."""

    def will_soon_reach(self, value: int) -> bool:
        """Whether it is that large, or becomes so within the time that a small copy takes."""


class Lane:
    """One stream on each device in use, for one request or one pass at a time."""

    __slots__ = (
        *("_events", "_raw", "_streams"),
        *("ended", "ended_at", "handles", "left_at", "reads", "unfinished", "uses"),
    )

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._raw: list[_Raw] = []
        self.handles: dict[int, int] = {}  # by device: the stream as the CUDA runtime knows it
        self.ended = False  # its request or pass has been answered: others may know of it, and must see its work
        self.unfinished = False  # whether some of that work may not be done
        self.ended_at = 0
        # While the next request or pass is on it: when what was there before had ended. Others wait for that by its
        # events, and not for what is there now.
        self.left_at = 0
        self._events: dict[int, torch.cuda.Event] = {}  # by device
        self.uses = 0
        self.reads: list[tuple[Number, int]] = []  # what is copied out of memory of the caller; see `reads.py`

    def stream(self, device: int) -> torch.cuda.Stream:
        """The stream on one device."""
        found = self._streams.get(device)
        if found is None:
            found = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # of torch's
            self.put(found)
        return found

    def put(self, stream: torch.cuda.Stream) -> None:
        """Have this one on its device."""
        self._streams[stream.device_index] = stream
        self.handles[stream.device_index] = stream.cuda_stream

    def streams(self) -> list[torch.cuda.Stream]:
        """Those on all devices in use."""
        return [self.stream(device) for device in order.used]

    def note_end(self) -> None:
        """All that the request or pass had to enqueue is on its streams."""
        for device, stream in self._streams.items():
            event = self._events.get(device)
            if event is None:
                event = self._events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call] # of torch's
            event.record(stream)

    def events(self) -> list[tuple[int, torch.cuda.Event]]:
        """By device: what was on its streams when they were last given back."""
        return [*self._events.items()]

    def raw(self) -> list[_Raw]:
        """The same, as torch's own functions take them."""
        if len(self._raw) != len(order.used):
            self._raw = [(one.stream_id, one.device_index, one.device_type) for one in self.streams()]
        return self._raw


def take(arrived: int = 0) -> Lane:
    """A lane that nobody uses. Its streams wait for the work of all that had been answered here before `arrived`, by
    default now: who asked for this can know of nothing else, and the rest may run beside it."""
    arrived = arrived or order.now()
    with _lock:
        # The one used last, among those to be waited for anyhow.
        if _free and _free[-1].ended_at < arrived:
            lane = _free.pop()
        else:
            lane = _older_lane(arrived)
        lane.ended = False
        lane.left_at = lane.ended_at if lane.unfinished else 0
    follow_all(lane.stream, arrived, lane)
    return lane


def _older_lane(arrived: int) -> Lane:
    """Under the lock: one of the others that are free, or a new one."""
    for lane in reversed(_free):
        if lane.ended_at < arrived or not lane.unfinished:
            _free.remove(lane)
            return lane
    lane = Lane()
    _lanes.append(lane)
    return lane


def follow_all(stream_on: Callable[[int], torch.cuda.Stream], before: int, own: Lane | None = None) -> None:
    """Have streams, one for each device, wait for the default ones and for all that was answered here before a
    moment: they may use whatever memory is free then. If they are those of a lane, not for its `own` work."""
    for device in order.used:
        default = order.default_stream(device)
        if not default.query():
            order.wait(stream_on(device), default)
    if len(_lanes) > 1 or own is None:
        _follow(stream_on, before, own)


# --- the end of what is on a lane ---


def end(lane: Lane) -> None:
    """A request or a pass on this lane is about to be answered: from now on others follow its work. They always follow
    the default streams."""
    if type(lane) is Lane:
        with _lock:
            _end(lane)


def _end(lane: Lane) -> None:
    lane.uses += 1
    lane.ended_at = order.now()
    lane.ended = lane.unfinished = True


def give_back(lane: Lane) -> None:
    """A request or a pass is over."""
    lane.note_end()
    with _lock:
        _end(lane)
        _free.append(lane)


def _follow(stream_on: Callable[[int], torch.cuda.Stream], before: int, own: Lane | None = None) -> None:
    """Have streams, one for each device, wait for the unfinished work of all that ended on lanes before a moment."""
    with _lock:
        ended = [
            (lane, lane.uses)
            for lane in _lanes
            if lane.ended and lane.unfinished and lane.ended_at < before and lane is not own
        ]
        taken_again = [lane for lane in _lanes if not lane.ended and 0 < lane.left_at < before and lane is not own]
    for lane in taken_again:
        for device, event in lane.events():
            if not event.query():  # type: ignore[no-untyped-call] # of torch's
                stream_on(device).wait_event(event)
    for lane, uses in ended:
        unfinished = False
        for theirs in lane.streams():
            if not theirs.query():
                unfinished = True
                ours = stream_on(theirs.device_index)
                if ours != theirs:
                    order.wait(ours, theirs)
        if not unfinished:
            with _lock:
                if lane.uses == uses and lane.ended:
                    lane.unfinished = False


def answering() -> None:
    """A reply is about to leave from this thread. Its streams are those that the result was made on, or follow them."""
    lane = _local.lane
    if lane is not None:
        end(lane)
    else:
        join()


def join() -> None:
    """What requests and passes that ended here left on their streams is seen by this thread's from now on."""
    if _lanes:
        _follow(torch.cuda.current_stream, order.now())


def adopt(tensors: Iterable[Tensor]) -> None:
    """The same, for tensors that were made there and will be used, and let go of, by this thread."""
    join()
    order.keep_memory(tensors)


# --- on a lane ---


def current_lane() -> Lane | None:
    """The lane this thread is on."""
    return _local.lane


def is_on_default() -> bool:
    """Whether this thread's current streams are the default ones."""
    return _local.lane is None and not any(map(order.current_stream, order.used))


def default_lane() -> Lane:
    """The default streams as a lane of this thread's, which all others follow."""
    lane = _local.default
    if lane is None:
        lane = _local.default = _DefaultLane()
        lane.raw()
    return lane


class _DefaultLane(Lane):
    """Has the default streams, also of a device that comes into use in the midst of a pass: nobody follows others."""

    __slots__ = ()

    def stream(self, device: int) -> torch.cuda.Stream:
        if device not in self.handles:
            self.put(order.default_stream(device))
        return self._streams[device]


class on:  # noqa: N801 - used like a function; a class, because each request enters one
    """Within, the current streams of this thread are those of a lane."""

    __slots__ = ("_before", "_lane", "_outer")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def __enter__(self) -> None:
        lane = self._lane
        streams = lane.raw()
        self._outer, _local.lane = _local.lane, lane
        self._before = [*map(_current_raw, order.used)]
        if self._before != streams:  # a pass that begins within a request is on its lane
            _set_current(streams)

    def __exit__(self, *_: object) -> None:
        _local.lane = self._outer
        if self._before != [*map(_current_raw, order.used)]:
            _set_current(self._before)


_staying = contextlib.nullcontext()


def staying_on(lane: Lane) -> contextlib.AbstractContextManager[None]:
    """The same for code that is likely to be on these streams already."""
    if _local.lane is not lane:
        return on(lane)
    for device in order.used:
        if lane.handles.get(device) != order.current_stream(device):
            return on(lane)
    return _staying


@contextlib.contextmanager
def back_on_lane(tensors: Iterable[Tensor | None]) -> Iterator[None]:
    """Within code of torch's engine, which runs nodes on streams of their own: on the lane of this thread again.

    `tensors` were made on the streams left."""
    lane = _local.lane
    if lane is None:
        yield
        return
    order.hand_over(tensors, lane)
    with on(lane):
        yield


# Past torch's objects for streams, which cost more than what is done with them here. These names exist only in a torch
# that was built for CUDA.
_Raw: TypeAlias = tuple[int, int, int]  # a stream's id, its device, the kind of device
_current_raw: Callable[[int], _Raw] = getattr(torch._C, "_cuda_getCurrentStream", order.no_stream)


def _set_current(streams: list[_Raw]) -> None:
    """Of devices that have come into use since these were noted, the streams stay as they are."""
    if not streams:
        return
    device = torch._C._cuda_getDevice()
    for stream_id, index, kind in streams:
        torch._C._cuda_setStream(stream_id=stream_id, device_index=index, device_type=kind)
    if streams[-1][1] != device:  # setting a stream makes its device the current one
        torch.cuda.set_device(device)
