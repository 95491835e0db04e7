"""Counters of one worker, worked out from its events: calls, failures, bytes and latencies, by link and by function.

Latencies are counted in buckets that grow by a fifth, from 1 us to about an hour: a percentile is right to 10%, and two
workers' buckets can be added.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from telegrad.observe.events.records import AnyEvent, Call, Served

if TYPE_CHECKING:
    from telegrad.rpc.agent import Agent

_GROWTH = math.log(1.2)
_SMALLEST = 1e-6
BUCKETS = 121


def bucket_of(seconds: float) -> int:
    """The bucket of a duration."""
    return min(BUCKETS - 1, max(0, math.ceil(math.log(max(seconds, _SMALLEST) / _SMALLEST) / _GROWTH)))


def upper_end(bucket: int) -> float:
    """The longest duration that a bucket counts, in seconds."""
    return _SMALLEST * math.exp(_GROWTH * bucket)


def percentile(buckets: dict[int, int], share: float) -> float:
    """The duration that `share` of all stay below, in seconds; 0 if there are none."""
    total = sum(buckets.values())
    passed = 0
    for bucket in sorted(buckets):
        passed += buckets[bucket]
        if passed >= share * total:
            return upper_end(bucket)
    return 0.0


class LinkCount(msgspec.Struct, array_like=True):
    """What went from this worker to another."""

    calls: int = 0
    failed: int = 0
    bytes_out: int = 0  # with requests to it, and with replies
    seconds: float = 0.0  # that the calls took
    latency: dict[int, int] = msgspec.field(default_factory=dict)


class FunctionCount(msgspec.Struct, array_like=True):
    """What this worker served of one function or message."""

    calls: int = 0
    failed: int = 0
    seconds: float = 0.0
    latency: dict[int, int] = msgspec.field(default_factory=dict)


_MOST_FUNCTIONS = 512


class Metrics:
    """The counters. They only grow; whoever reads them takes differences."""

    def __init__(self, agent: "Agent") -> None:
        self._agent = agent
        self.links: dict[int, LinkCount] = {}  # by the id of the other worker
        self.functions: dict[str, FunctionCount] = {}
        self.lost = 0

    def count(self, events: Iterable[AnyEvent], lost: int) -> None:
        """Add what was recorded."""
        self.lost += lost
        ids = {int(member.incarnation): int(member.worker_id) for member in self._agent.directory.members()}
        for event in events:
            if isinstance(event, Call):
                link = self.links.setdefault(event.to, LinkCount())
                took = event.end - event.since
                link.calls += 1
                link.failed += not event.ok
                link.bytes_out += event.size
                link.seconds += took
                bucket = bucket_of(took)
                link.latency[bucket] = link.latency.get(bucket, 0) + 1
                self._count_function(event, took, bucket)
            elif isinstance(event, Served) and event.caller in ids:
                self.links.setdefault(ids[event.caller], LinkCount()).bytes_out += event.size

    def _count_function(self, event: Call, took: float, bucket: int) -> None:
        name = event.what.partition(" on worker ")[0] if event.message.startswith("Python") else event.message
        if name not in self.functions and len(self.functions) >= _MOST_FUNCTIONS:
            name = "(others)"
        function = self.functions.setdefault(name, FunctionCount())
        function.calls += 1
        function.failed += not event.ok
        function.seconds += took
        function.latency[bucket] = function.latency.get(bucket, 0) + 1
