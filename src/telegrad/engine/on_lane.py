"""A backward pass with CUDA tensors: all its parts, whichever threads run them, are on the streams of one lane.

That is the lane of the request it began with, and on the root the default streams, if the thread that waits is on them.

A gradient that is heard was made on the streams of the thread that hears it, one that leaves a Recv on those of the
Recv's forward, where the engine runs it; both are handed over to the lane. What the pass leaves is found by whoever
comes after its end (`cuda/lanes.py`). Only a process that has CUDA tensors makes its passes of these classes.
"""

import contextlib
from typing import Any

import torch

from telegrad.autograd.functions import Gradients
from telegrad.cuda import lanes, order
from telegrad.engine.local.graph import Graph
from telegrad.engine.local.local_pass import Taken
from telegrad.engine.passes import Heard, Pass, Roots
from telegrad.engine.root_pass import RootPass
from telegrad.ids import MessageId

# Past torch's context manager for them.
_is_multithreaded, _set_multithreaded = torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled


class PassOnLane(Pass):
    """A worker's part in a pass, on the lane of the request that it began with."""

    _taken: lanes.Lane | None = None  # to be given back
    _has_ended = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lane = self._choose_lane()

    def _choose_lane(self) -> lanes.Lane:
        lane = lanes.current_lane()
        if lane is None:
            lane = self._taken = lanes.take()
        return lane

    def begin(self, heard: Heard | None = None, roots: Roots | None = None) -> None:
        """Start, with what the first word of the pass brought."""
        gradients = roots.gradients if roots is not None else heard[1] if heard is not None else None
        order.hand_over(gradients or (), self.lane)
        super().begin(heard, roots)

    def hear_and_run(self, key: MessageId, gradients: Gradients | None) -> None:
        """A Send of this worker has its gradients, or none will come."""
        order.hand_over(gradients or (), self.lane)
        super().hear_and_run(key, gradients)

    def _run(self, graph: Graph, taken: Taken | None) -> None:
        # All of it by this thread: to wake the engine's own thread for a device takes longer than a small graph.
        before = _is_multithreaded()
        _set_multithreaded(order.uses_several_devices())
        try:
            with lanes.staying_on(self.lane):
                super()._run(graph, taken)
        finally:
            _set_multithreaded(before)

    def _is_nearly_done(self, gradients: Gradients | None) -> bool:
        nearly = super()._is_nearly_done(gradients)
        if nearly:  # they wait for the answer, which leaves from the streams of the pass
            order.hand_over(gradients or (), self.lane)
        return nearly

    def _end(self) -> None:
        with self._lock:
            again, self._has_ended = self._has_ended, True
        if again:  # a root whose part was done, by an error of another worker: the lane may be somebody else's
            super()._end()
            return
        if not self._to_answer or lanes.current_lane() is not self.lane:  # else the answer says so when it leaves
            lanes.end(self.lane)
        try:
            super()._end()
        finally:
            if self._taken is not None:
                lanes.give_back(self._taken)


class RootPassOnLane(PassOnLane, RootPass):
    """The same on the worker that began the pass."""

    def _choose_lane(self) -> lanes.Lane:
        # The default streams, which all requests follow, are as good as a lane. Streams of the user's own are not.
        return lanes.default_lane() if lanes.is_on_default() else super()._choose_lane()

    def wait(self) -> None:
        """Return when all are done; what follows in this thread finds the gradients."""
        # Now, while the others work, and not when an answer is there. But one that was taken is given back before that.
        with lanes.on(self.lane) if self._taken is None else contextlib.nullcontext():
            super().wait()
        lanes.join()
