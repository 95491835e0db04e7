"""A backward pass with CUDA tensors: all its parts, whichever threads run them, are on the streams of one lane.

A gradient that is heard was made on the streams of the thread that hears it, one that leaves a Recv on those of the
Recv's forward, where the engine runs it; both are handed over to the lane. What the pass leaves is found by whoever
comes after its end (`cuda/order.py`). Only a process that has CUDA tensors makes its passes of these classes.
"""

from typing import Any

from telegrad.autograd.functions import Gradients
from telegrad.cuda import order
from telegrad.engine.passes import Pass, Roots
from telegrad.engine.root_pass import RootPass
from telegrad.ids import MessageId


class PassOnLane(Pass):
    """A worker's part in a pass, on a lane of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lane = order.take()

    def begin(self, roots: Roots | None = None) -> None:
        """Start, on the root from what `backward` was given."""
        if roots is not None:
            order.hand_over(roots.gradients, self._lane)
        with order.on(self._lane):
            super().begin(roots)

    def hear(self, key: MessageId, gradients: Gradients | None) -> None:
        """The Send `key` has its gradients, or none will come."""
        order.hand_over(gradients or (), self._lane)
        super().hear(key, gradients)

    def run(self) -> None:
        """Run what may run, and see whether that was all."""
        with order.on(self._lane):
            super().run()

    def _is_nearly_done(self, gradients: Gradients | None) -> bool:
        nearly = super()._is_nearly_done(gradients)
        if nearly:  # they wait for the answer, which leaves from the streams of the pass
            order.hand_over(gradients or (), self._lane)
        return nearly

    def _end(self) -> None:
        order.end(self._lane)
        try:
            super()._end()
        finally:
            order.give_back(self._lane)


class RootPassOnLane(PassOnLane, RootPass):
    """The same on the worker that began the pass."""

    def wait(self) -> None:
        """Return when all are done; what follows in this thread finds the gradients."""
        super().wait()
        order.join()
