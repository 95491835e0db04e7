"""Leaves during a pass: hooks are held back while parts of a gradient arrive; at the end `.grad` is put aside.

A leaf's own node runs once in a pass, with the total, so that hooks on leaves see what they would see in one
process. Until then its gradient arrives in parts, and asking the engine for a part would fire the leaf's tensor hooks:
`hooks_held`. When the node runs it writes to `.grad`, which belongs to the user: `take_grads` takes the user's value
before that and the result after it, `put_back` gives the value back. A leaf takes a gradient that nobody else holds
and copies any other; one that several leaves have in common is to be copied for each, as in torch's distributed pass:
`shared_held`. Other passes may use the same leaves in other threads: whoever does any of this has claimed them.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd.functions import Gradients, anchored

_hooks_lock = threading.Lock()
_grad_of: Callable[[Tensor], Any] = attrgetter("grad")
_is_there = partial(is_not, None)  # with `map`, in C


def take_grads(leaves: Collection[Tensor]) -> dict[Tensor, Tensor]:
    """Empty `.grad` of `leaves`, which the caller has claimed: what was there. Before an engine call, the user's; after
    it, what the call wrote."""
    grads = [*map(_grad_of, leaves)]
    found = dict(compress(zip(leaves, grads, strict=True), map(_is_there, grads)))
    for leaf in found:
        leaf.grad = None
    return found


def put_back(kept: Mapping[Tensor, Tensor]) -> None:
    """Give the user's `.grad` back."""
    for leaf, grad in kept.items():
        leaf.grad = grad


@contextmanager
def shared_held(nodes: Sequence[Node]) -> Iterator[None]:
    """Hold what one of `nodes` hands to several children until the way out, so that no leaf takes it for itself."""
    held: list[Tensor] = []

    def hold(leaving: Gradients, _: object) -> None:
        held.extend(repeated(leaving))

    handles = [node.register_hook(hold) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def repeated(gradients: Iterable[Tensor | None]) -> list[Tensor]:
    """Those whose memory is there more than once. One that two leaves had in common elsewhere comes as two tensors."""
    seen: set[int] = set()
    again = []
    for gradient in gradients:
        if gradient is not None:
            plain = type(gradient) is Tensor and gradient.layout is torch.strided
            memory = gradient.untyped_storage()._cdata if plain else id(gradient)
            if memory in seen:
                again.append(gradient)
            seen.add(memory)
    return again


class _HeldHook:
    """Stands in for a leaf's tensor hook: silent within engine calls that collect parts, itself in all others."""

    __slots__ = ("hook", "silent_in")

    def __init__(self, hook: Callable[[Tensor], Tensor | None], silent_in: set[int]) -> None:
        self.hook = hook
        self.silent_in = silent_in

    def __call__(self, gradient: Tensor) -> Tensor | None:
        if torch._C._current_graph_task_id() in self.silent_in:
            return None
        return self.hook(gradient)


@contextmanager
def hooks_held(leaves: Iterable[Tensor], first: Iterable[Node]) -> Iterator[None]:
    """Keep the tensor hooks of `leaves` silent in the engine call within, which enters the graph at the nodes `first`.

    The hooks stay where they are, under a stand-in that knows the call by its graph task: another thread's backward
    over the same leaf, or one that a hook starts in this thread, still fires them, and a handle still removes them.
    """
    hooked = [leaf._backward_hooks for leaf in leaves if leaf._backward_hooks]
    if not hooked:
        yield
        return
    tasks: set[int] = set()

    def note_task(_: object) -> None:
        tasks.add(torch._C._current_graph_task_id())

    handles: list[Any] = [node.register_prehook(note_task) for node in first]
    with _hooks_lock:
        stand_ins = [(hooks, key, _HeldHook(hook, tasks)) for hooks in hooked for key, hook in hooks.items()]
        for hooks, key, stand_in in stand_ins:
            hooks[key] = stand_in
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for hooks, key, stand_in in stand_ins:
            _unwrap(hooks, key, stand_in)


def _unwrap(hooks: dict[int, Any], key: int, stand_in: _HeldHook) -> None:
    """Take one stand-in out from the chain under `key`, wherever another thread's may lie on top of it."""
    with _hooks_lock:
        outer = None
        current = hooks.get(key)
        while current is not stand_in:
            if not isinstance(current, _HeldHook):
                return  # the hook was removed meanwhile
            outer, current = current, current.hook
        if outer is None:
            hooks[key] = stand_in.hook
        else:
            outer.hook = stand_in.hook


def variable_of(node: Node) -> Tensor | None:
    """The leaf whose node this is; None if it is not a leaf's."""
    return getattr(node, "variable", None)


class LeafSums:
    """What has arrived for each leaf so far, by the leaf's node. None: the leaf was visited, but with no gradient."""

    def __init__(self) -> None:
        self._sums: dict[Node, Tensor | None] = {}
        self._owned: set[Node] = set()  # whose sum was made here: only those may change in place

    def __bool__(self) -> bool:
        return bool(self._sums)

    def __contains__(self, leaf: object) -> bool:
        return leaf in self._sums

    def add(self, leaf: Node, part: Tensor | None) -> None:
        total = self._sums.get(leaf)
        if total is None:
            self._sums[leaf] = part
        elif part is not None:
            if leaf in self._owned and not total.is_sparse:
                total += part
            else:
                # torch adds a sparse tensor to a dense one, and not the other way round.
                self._sums[leaf] = part + total if total.is_sparse and not part.is_sparse else total + part
                self._owned.add(leaf)

    def take_nested(self) -> list[tuple[GradientEdge, Tensor]]:
        """The sums of nested leaves, taken out, as roots: torch makes no nested tensor an input of a Function, so they
        enter at the leaves themselves, which copy them."""
        nested = [node for node, total in self._sums.items() if total is not None and total.is_nested]
        return [(GradientEdge(node, 0), self._sums.pop(node)) for node in nested]  # type: ignore[misc] # not None

    def root(self) -> Tensor:
        """A root whose backward visits each of these leaves with its sum. The sums are handed over to it."""
        leaves = [variable_of(node) for node in self._sums]
        sums = list(self._sums.values())
        self._sums = {}
        return anchored(_Handover, sums, *leaves)


class _Handover(torch.autograd.Function):
    """A node that leads to leaves and gives each its sum. Nobody else holds the sums then, and the leaves take them
    without a copy, except those that several have in common: the node keeps these, and goes when the pass ends."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, sums: list[Tensor | None], *leaves: Tensor) -> Tensor:
        ctx.sums = sums
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        sums: list[Tensor | None] = ctx.sums
        handed = (None, None, *sums)
        sums[:] = repeated(sums)
        return handed
