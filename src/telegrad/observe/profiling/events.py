"""An event of a profile on its way between workers, and what becomes of it in the profile of the caller.

Events come back under the name of the call they belong to, as in torch: `rpc_sync#f(worker0 -> worker1)#remote_op:
aten::mm`, nested calls with one more such part each. The times of another worker are its own; in the caller's profile
its events lie in the middle of the call, which is where they were if both ways took the same time.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch.autograd.profiler_util import FunctionEvent

REMOTE_OP = "#remote_op: "
_MOST_EVENTS = 20_000  # of one call


class RemoteEvent(msgspec.Struct, array_like=True):
    """What is sent of an event; times in microseconds from when the profile began."""

    name: str
    node: int
    start: float
    end: float
    thread: int
    shapes: list[Any]
    stack: list[str]
    scope: int
    cpu_memory: int
    device_memory: int
    flops: int
    sequence: int
    is_async: bool


class Profiled(msgspec.Struct, array_like=True):
    """The profile of one call, and how long it took."""

    seconds: float
    events: list[RemoteEvent]


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Profiled).decode


class ProfiledCall:
    """One call made under a profiler. Its beginning is an event of that profile, of the same name."""

    def __init__(self, key: str, here: int, there: int) -> None:
        self.key = key
        self.here = here
        self.there = there
        self.began = time.perf_counter()
        self.seconds = 0.0
        self.profile: Profiled | None = None

    def finish(self, events: bytes) -> None:
        """The reply came."""
        self.seconds = time.perf_counter() - self.began
        if events:
            self.profile = decode(events)


class _Local(threading.local):
    calls: list[ProfiledCall] | None = None
    options = 0


local = _Local()  # of the thread that is being profiled


def take_calls() -> list[ProfiledCall]:
    """The calls that were made under the profile which ends in this thread."""
    calls, local.calls = local.calls or [], None
    return calls


def to_send(events: Iterable[Any], here: int) -> list[RemoteEvent]:
    """Events of this worker's own profile, as they are sent."""
    sent: list[RemoteEvent] = []
    for event in events:
        if len(sent) == _MOST_EVENTS:
            break
        sent.append(
            RemoteEvent(
                event.name,
                event.node_id if event.node_id >= 0 else here,
                float(event.time_range.start),
                float(event.time_range.end),
                event.thread,
                [list(shape) for shape in event.input_shapes or ()],
                list(event.stack or ()),
                event.scope,
                event.cpu_memory_usage,
                event.device_memory_usage,
                event.flops or 0,
                event.sequence_nr if event.sequence_nr is not None else -1,
                bool(event.is_async),
            )
        )
    return sent


def merge(events: list[Any], calls: Sequence[ProfiledCall], *, legacy: bool) -> list[Any]:
    """The events of a profile, with those of the calls made under it. Each call is already there, as a moment."""
    moments: dict[str, list[Any]] = defaultdict(list)
    wanted = {call.key for call in calls}
    for event in events:
        if event.name in wanted:
            moments[event.name].append(event)
    added = []
    for call in calls:
        found = moments[call.key]
        if not found:  # the profile began after the call, or has dropped it
            continue
        moment = found.pop(0)
        moment.node_id = call.here
        moment.is_async = True  # it may overlap others, and its length is not this thread's work
        moment.time_range.end = max(moment.time_range.end, moment.time_range.start + call.seconds * 1e6)
        if call.profile is not None:
            begin = moment.time_range.start + max(0.0, call.seconds - call.profile.seconds) / 2 * 1e6
            added += [_received(event, call, begin, legacy) for event in call.profile.events]
    merged = [*events, *added]
    merged.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    return merged


def _received(event: RemoteEvent, call: ProfiledCall, begin: float, legacy: bool) -> Any:
    name = f"{call.key}{REMOTE_OP}{event.name}"
    return FunctionEvent(  # type: ignore[no-untyped-call] # torch's own, without types
        id=0,
        node_id=event.node,
        name=name,
        trace_name=name,
        thread=event.thread,
        fwd_thread=event.thread,
        start_us=begin + event.start,
        end_us=begin + event.end,
        input_shapes=event.shapes,
        stack=event.stack,
        scope=event.scope,
        cpu_memory_usage=event.cpu_memory,
        device_memory_usage=event.device_memory,
        is_async=event.is_async,
        is_remote=True,
        sequence_nr=event.sequence,
        device_type=torch.autograd.DeviceType.CPU,  # type: ignore[attr-defined] # torch declares no type for it
        is_legacy=legacy,
        flops=event.flops or None,
    )
