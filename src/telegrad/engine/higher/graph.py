"""The graph of one worker in a pass whose gradients have a graph, or are wanted of some tensors only."""

import functools
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from telegrad.autograd.functions import ANCHOR, Taker, edge_of_any, taker
from telegrad.engine.local.claims import WaitOn
from telegrad.engine.local.graph import Entered, Graph
from telegrad.engine.local.leaves import LeafSums, hooks_held, variable_of
from telegrad.engine.local.stages import Root


@functools.cache
def _expect_torchs_warning() -> None:
    """torch warns, once in a process, of a cycle that `backward` with `create_graph` leaves. Here there is none: the
    gradient is in `.grad` only until the engine call returns. So let it warn of a call of ours, unheard."""
    with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")
        leaf = torch.ones(1, requires_grad=True)
        torch.autograd.backward([leaf * 1], create_graph=True)
        leaf.grad = None


class RecordedGraph(Graph):
    """As `Graph`, with what a higher order needs. `captured` gets the gradients of `inputs`, by their keys."""

    __slots__ = ("_create_graph", "_handles", "_inner", "_only", "_wanted", "captured")
    may_wait = False  # a stand-in has no graph of its own

    def __init__(
        self,
        sends: Mapping[Any, Entered],
        taker: Taker,
        retain_graph: bool,
        *,
        create_graph: bool,
        inputs: Mapping[int, Tensor] | None,
        recvs: Collection[Node],
    ) -> None:
        inner = {key: send for key, send in sends.items() if not send.at_leaves}
        super().__init__(next(iter(inner.values())).edges if inner else (), taker, retain_graph)
        self.divide(inner)
        self._create_graph = create_graph
        self._only = inputs is not None  # no leaf gets a gradient but those asked for, and none keeps one
        self._wanted: dict[int, GradientEdge] = {}
        self._inner: tuple[GradientEdge, ...] = ()  # those among them that are no leaves
        self._handles: list[Any] = []
        self.captured: dict[int, Tensor] = {}
        if create_graph:
            _expect_torchs_warning()
        if inputs is not None:
            for edge in [edge for send in sends.values() if send.at_leaves for edge in send.edges]:
                self.edges[edge.node] = ()
                if (leaf := variable_of(edge.node)) is not None:
                    self.leaves[edge.node] = leaf
            self._narrow(inputs, recvs)

    def close(self) -> None:
        """Take the hooks back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _narrow(self, inputs: Mapping[int, Tensor], recvs: Collection[Node]) -> None:
        """Keep the part that leads to a Recv or to one of `inputs`; the edges out of it lead nowhere.

        torch's engine narrows each of its calls in the same way, by what it is asked for. A tensor hook, the last of
        its tensor, sees what `torch.autograd.grad` would return, in whichever way its node is visited.
        """
        for key, tensor in inputs.items():
            edge = edge_of_any(tensor)
            if edge.node in self.edges:
                self._wanted[key] = edge
                if tensor.grad_fn is not None:
                    self._handles.append(tensor.register_hook(functools.partial(self._capture, key)))  # type: ignore[no-untyped-call] # torch's own, without types
        needed = self._leading_to({edge.node for edge in self._wanted.values()} | {n for n in recvs if n in self.edges})
        if ANCHOR.node in self.edges:
            needed.add(ANCHOR.node)
        self.edges = {
            node: [(child if child in needed else None, position) for child, position in edges]
            for node, edges in self.edges.items()
            if node in needed
        }
        self.leaves = {node: leaf for node, leaf in self.leaves.items() if node in needed}
        if self.parts is not None:
            self.parts = {
                key: ({node: None for node in inner if node in needed}, [node for node in ends if node in needed])
                for key, (inner, ends) in self.parts.items()
            }
        self._inner = tuple([edge for edge in self._wanted.values() if edge.node not in self.leaves])

    def _leading_to(self, ends: Collection[Node]) -> set[Node]:
        parents: dict[Node, list[Node]] = {}
        for node, edges in self.edges.items():
            for child, _ in edges:
                if child is not None:
                    parents.setdefault(child, []).append(node)
        found = set(ends)
        stack = list(found)
        while stack:
            for parent in parents.get(stack.pop(), ()):
                if parent not in found:
                    found.add(parent)
                    stack.append(parent)
        return found

    def _capture(self, key: int, gradient: Tensor) -> None:
        if taker() == self._taker:  # else another engine call over the same graph
            self.captured[key] = gradient

    # --- running ---

    def run_last(self, roots: list[Root], at_leaves: list[Root], wait_on: WaitOn) -> None:
        """Everything left; with `inputs`, for those alone: no leaf's node runs, but hooks of a leaf asked for do."""
        if not self._only:
            super().run_last(roots, at_leaves, wait_on)
            return
        roots = [root for root in [*roots, *at_leaves] if root[0].node in self.edges]
        for edge, gradient in roots:
            if edge.node in self.leaves:
                self._add(edge.node, gradient)
        self.run_closed(self.edges, [root for root in roots if root[0].node not in self.leaves])
        sums = self._sums
        if sums is None:
            return
        wanted = {key: edge for key, edge in self._wanted.items() if edge.node in sums}
        if wanted:
            nested = sums.take_nested()
            entry = (get_gradient_edge(sums.root()), torch.empty(0))
            found = self._call([*nested, entry], tuple(wanted.values()), False)
            self.captured.update({key: total for key, total in zip(wanted, found, strict=True) if total is not None})

    def run_closed(self, nodes: Iterable[Node], roots: list[Root], leaves: Sequence[Node] | None = None) -> None:
        """Nodes that lead to nothing but each other and `leaves`; what enters elsewhere is not asked for."""
        super().run_closed(nodes, [root for root in roots if root[0].node in self.edges], leaves)

    def _hand_over_large(self, roots: list[Root]) -> None:
        if not self._create_graph:  # with a graph a leaf copies in any case
            super()._hand_over_large(roots)

    def _add(self, leaf: Node, part: Tensor | None) -> None:
        if self._sums is None and self._create_graph:
            self._sums = RecordedSums()
        super()._add(leaf, part)

    def _ask(self, leaves: Sequence[Node], roots: list[Root]) -> tuple[Tensor | None, ...]:
        if not self._only:
            return super()._ask(leaves, roots)
        wanted = (*[GradientEdge(leaf, 0) for leaf in leaves], ANCHOR, *self._inner)
        first = {edge.node for edge, _ in roots}
        with hooks_held([self.leaves[leaf] for leaf in leaves], first):
            return self._call(roots, wanted, False)[: len(leaves)]

    def _run_to(self, gates: Sequence[GradientEdge], roots: list[Root]) -> None:
        if not self._only:
            super()._run_to(gates, roots)
        else:  # the engine leaves out what leads to nothing that it is asked for
            self._ask(list(self.leaves), [*roots, *[(gate, torch.empty(0)) for gate in gates]])


class RecordedSums(LeafSums):
    """Sums that are part of a graph: none is changed in place."""

    def add(self, leaf: Node, part: Tensor | None) -> None:
        """Add what arrived for a leaf."""
        super().add(leaf, part)
        self._owned.clear()
