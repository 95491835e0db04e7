"""Ends a call of torch's engine before it visits the nodes outside a part of the graph.

The engine takes ready nodes by falling sequence number. For the call, the nodes next outside get the lowest, and just
above them stands a node whose backward raises: it comes when everything inside has run, and before anything outside.
Raising from a node of its own, not from a hook of the last node inside, lets that one, too, release what it saved.

In the same way the inside can be divided into stages that run one after the other. Before the first nodes of each
stands a gate, again a node of our own, whose backward decides whether the call goes on or ends there (`stages.py`).

The number orders nodes and does nothing else, and it is given back after the call. Two calls that order the same nodes
differently must not overlap: the caller claims them. Leaves need no claim. They are outside of every cut, so those that
overlap agree, and the last one gives the number back; to any other call the order of a leaf makes no difference.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from telegrad.autograd.functions import ANCHOR, anchored

_LAST, _OUTSIDE, _STOP, _INSIDE = range(4)  # sequence numbers, taken from the highest to the lowest

Gate = tuple[Callable[[], None], Collection[Any]]  # what is called before these nodes run


@contextmanager
def cut_before(
    outside: Collection[Any], leaves: Collection[Any], inside: Collection[Any], gates: Sequence[Gate] = ()
) -> Iterator[list[GradientEdge]]:
    """Within, an engine call with the edges yielded among its roots runs the nodes `inside` and ends before `outside`
    and before `leaves`, the nodes of leaf tensors. The nodes of a gate are inside, too: they run after all that is in
    front of them, and after the gate's function has been called. That one may end the call (`stop`).

    The calling thread does all of it, whatever devices the nodes are for: each device's thread has a queue of its own
    otherwise, and no order holds between two.
    """
    made = [anchored(_Gate, stop)]
    _set_number(made[0], _STOP)
    numbers = dict.fromkeys(outside, _OUTSIDE)
    highest = _INSIDE + 2 * len(gates)
    for place, (function, nodes) in enumerate(gates):
        gate = anchored(_Gate, function)
        made.append(gate)
        numbers.update(dict.fromkeys(nodes, highest - 2 * place - 2))
        _set_number(gate, highest - 2 * place - 1)
    for node in inside:
        if node._sequence_nr() < highest:
            numbers.setdefault(node, highest)
    kept = [(node, node._sequence_nr()) for node in numbers]
    _postpone(leaves)
    try:
        for node, number in numbers.items():
            node._set_sequence_nr(number)
        with torch.autograd.set_multithreading_enabled(False):
            yield [get_gradient_edge(gate) for gate in made]
    except _Stopped as stopped:
        # Its frames hold the graph, and Python 3.12 keeps it until the garbage collector comes by.
        stopped.__traceback__ = None
    finally:
        empty_queue()  # before the numbers change back: the queue is a heap, ordered by them
        for node, number in kept:
            node._set_sequence_nr(number)
        _restore(leaves)


_postponed: dict[Node, tuple[int, int]] = {}  # a leaf's node -> calls that are to end before it, and its own number
_postponed_lock = threading.Lock()


def _postpone(leaves: Collection[Any]) -> None:
    with _postponed_lock:
        for node in leaves:
            calls, number = _postponed.get(node) or (0, node._sequence_nr())
            _postponed[node] = calls + 1, number
            node._set_sequence_nr(_OUTSIDE)


def _restore(leaves: Collection[Any]) -> None:
    with _postponed_lock:
        for node in leaves:
            calls, number = _postponed.pop(node)
            if calls > 1:
                _postponed[node] = calls - 1, number
            else:
                node._set_sequence_nr(number)


def empty_queue() -> None:
    """Let the engine drop what an exception left in this thread's queue: nodes that were ready, with their gradients.

    It drops them unvisited when it comes across them, in the thread's next call. This one has a single node, the last
    of all in the queue.
    """
    torch.autograd.grad([_LAST_EDGE], [ANCHOR], [torch.zeros(())], retain_graph=True)


class _Stopped(Exception):
    """Everything inside has run."""


def stop() -> NoReturn:
    """End the engine call that this is called from."""
    raise _Stopped


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        ctx.function()
        return None, None


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor) -> Tensor:
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _set_number(tensor: Any, number: int) -> None:
    tensor.grad_fn._set_sequence_nr(number)


_last = anchored(_Pass)
_set_number(_last, _LAST)
_LAST_EDGE = get_gradient_edge(_last)
