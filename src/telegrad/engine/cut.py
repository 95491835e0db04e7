"""Ends a call of torch's engine before it visits the nodes outside a part of the graph.

The engine takes ready nodes by falling sequence number. For the call, the nodes next outside get the lowest, and just
above them stands a node whose backward raises: it comes when everything inside has run, and before anything outside.
Raising from a node of its own, not from a hook of the last node inside, lets that one, too, release what it saved.

The number orders nodes and does nothing else, and it is given back after the call. Two calls that order the same nodes
differently must not overlap: the caller claims them.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from telegrad.autograd.functions import anchored

_OUTSIDE, _STOP, _INSIDE = 0, 1, 2


@contextmanager
def cut_before(outside: Collection[Node], inside: Collection[Node]) -> Iterator[GradientEdge]:
    """Within, an engine call with the edge yielded among its roots runs `inside` and ends before `outside`.

    The calling thread does all of it, whatever devices the nodes are for: each device's thread has a queue of its own
    otherwise, and no order holds between two.
    """
    stop = anchored(_Stop)
    kept = [(node, _number(node)) for node in outside]
    kept += [(node, number) for node in inside if (number := _number(node)) < _INSIDE]
    try:
        for node, _ in kept[len(outside) :]:
            _set_number(node, _INSIDE)
        for node in outside:
            _set_number(node, _OUTSIDE)
        _set_number(stop.grad_fn, _STOP)
        with torch.autograd.set_multithreading_enabled(False):
            yield get_gradient_edge(stop)
    except _Stopped:
        pass
    finally:
        for node, number in kept:
            _set_number(node, number)


class _Stopped(Exception):
    """Everything inside has run."""


class _Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise _Stopped


def _number(node: Any) -> int:
    number: int = node._sequence_nr()
    return number


def _set_number(node: Any, number: int) -> None:
    node._set_sequence_nr(number)
