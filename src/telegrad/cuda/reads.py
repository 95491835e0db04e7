"""Tensors that a request reads where its caller has them: they were read before anybody hears from the request.

The caller waits for the answer and sees to it that nothing changes its memory before (`transport/device/in_place.py`).
But others may, once they hear from here. So a thread that asks something of another worker, and one that leaves its
request to be answered by another thread, waits until the streams of its lane have read what they were to read. A reply
needs no such wait: it goes to the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from telegrad.cuda import lanes, order
from telegrad.cuda.lanes import Number

A = TypeVar("A")


def run_on_lane(function: Callable[[A], Any], argument: A, arrived: int = 0) -> None:
    """Call `function(argument)`, which serves a request, on a lane of its own; who asked for it did so before
    `arrived`."""
    lane = lanes.take(arrived)
    try:
        with lanes.on(lane):
            function(argument)
            if lane.reads and not lane.ended:  # to be answered later, by who knows which thread
                finish_reading()
    finally:
        lane.reads.clear()
        lanes.give_back(lane)


def reading(number: Number, value: int) -> None:
    """This thread's streams read memory of a caller that waits for its answer; `number` is `value` when they have.

    The caller sees to it that nothing changes that memory before. But others may, if they hear from here: so whoever
    is asked for something from this thread is asked after it was read."""
    lane = lanes.current_lane()
    if lane is not None:
        lane.reads.append((number, value))
    else:
        _wait_until_read([(number, value)], torch.cuda.current_stream())


def asking(waits: bool) -> list[Any] | None:
    """This thread is about to ask something of another worker. A list, for those of its tensors that may stay where
    they are, if it waits for the answer (`transport/device/in_place.py`)."""
    finish_reading()
    return [] if waits and order.direct else None


def finish_reading() -> None:
    """Wait until what this request reads elsewhere was read."""
    lane = lanes.current_lane()
    if lane is not None and lane.reads:
        reads, lane.reads = lane.reads, []
        _wait_until_read(reads, *lane.streams())


def _wait_until_read(reads: list[tuple[Number, int]], *streams: torch.cuda.Stream) -> None:
    if not all(number.will_soon_reach(value) for number, value in reads):
        for stream in streams:
            stream.synchronize()
