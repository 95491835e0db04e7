"""One worker's graph: what lies between its Sends and its Recvs and leaves, and the three ways to run a part of it.

Equal to one process means: each node runs once, with the sum of all that reaches it, and so does each hook.

- The last batch, usually the only one, is a plain `torch.autograd.backward`, with `.grad` of the leaves put aside.
- A closed batch before that asks `torch.autograd.grad` for the leaves; what it finds is kept for the last batch.
- A cut batch (`cut.py`) ends before the engine visits a node outside it. Post-hooks on the nodes that lead out collect
  what leaves (`stages.py`); it enters as roots when its region runs. Not by asking the engine for those edges: it
  would run every node on the way to them, and a node visited without a gradient still fires its hooks.

Every call of torch's engine is made by `Graph._call`.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from telegrad.autograd.functions import ANCHOR, TAKER, Gradients, Taker, set_state, taker
from telegrad.autograd.walking import Walked, may_share, walk
from telegrad.cuda import lanes, order
from telegrad.engine.local.claims import WaitOn, await_claim, claimed, release, try_claim, wait_for_claim
from telegrad.engine.local.cut import cut_before
from telegrad.engine.local.leaves import LeafSums, hooks_held, put_back, shared_held, take_grads
from telegrad.engine.local.regions import Part, Stage
from telegrad.engine.local.stages import GoOn, Root, StagedCut, stay


class Entered(Protocol):
    """A Send, or the roots of `backward`: where gradients enter the graph."""

    @property
    def edges(self) -> Sequence[GradientEdge]:
        """One for each tensor."""

    @property
    def at_leaves(self) -> bool:
        """Whether it is known that all of them are leaves."""


_LARGE = 64 * 1024  # bytes of a gradient that are worth more than the node that saves their copy
_LARGE_ON_GPU = 32 * 2**20  # the same where a copy of a megabyte takes a microsecond, and the node as long as ever
_MANY = 4 * 1024  # elements of a gradient that may be so large
_FEW = 64  # nodes of a graph for which a wait for the leaves costs less than a call of the engine of its own
_MOMENT = 1e-3  # seconds of such a wait: as long as another pass, or the step of an optimizer, usually has a leaf
_get_state = torch._C._get_obj_in_tls
_run_backward = torch.autograd.Variable._execution_engine.run_backward


class Graph:
    """All nodes that a worker's Sends reach. Only the thread that runs the pass uses it."""

    may_wait = True  # whether a cut may wait for what follows it (`stages.py`)
    _create_graph = False  # see `higher/graph.py`
    _sums: LeafSums | None = None  # what closed and cut batches found for leaves
    _sharing: Sequence[Node] | None = None  # those that `may_share`, if that is known
    _nones = False  # whether a node handed None across a cut
    gradients: Mapping[Tensor, Tensor] = {}  # of the leaves, once the last batch has run
    inner: Mapping[Any, Entered] = {}  # if there may be several: the Sends that do not enter at leaves alone
    parts: dict[Any, Part[Node]] | None = None  # what each of `inner` reaches, if no two reach the same, leaves aside

    def __init__(
        self, entries: Sequence[GradientEdge], taker: Taker, retain_graph: bool, walked: Walked | None = None
    ) -> None:
        """Walk it from where gradients enter, unless that was done. Engine calls give those of Recvs to `taker`."""
        self._taker = taker
        self._retain_graph = retain_graph
        # Of a Send that enters at leaves, these are among them only once the last batch runs.
        if walked is None:
            self.edges, self.leaves, _ = walk(entries)
        else:
            self.edges, self.leaves, self._sharing = walked

    @classmethod
    def of_sends(cls, sends: Mapping[Any, Entered], taker: Taker, retain_graph: bool) -> "Graph":
        """The graph of any Sends; notes what each of them reaches."""
        inner = {key: send for key, send in sends.items() if not send.at_leaves}
        graph = cls(next(iter(inner.values())).edges if inner else (), taker, retain_graph)
        graph.divide(inner)
        return graph

    def divide(self, inner: Mapping[Any, Entered]) -> None:
        """Walk from the other Sends, too; the first was walked from."""
        self.inner = inner
        if len(inner) > 1:
            self._walk_rest()

    def _walk_rest(self) -> None:
        """The same from all Sends but the first; notes what each reaches."""
        edges, leaves = self.edges, self.leaves
        reached: list[Part[Node]] = [(dict.fromkeys(filter(edges.__getitem__, edges)), list(leaves))]
        apart = True
        for send in itertools.islice(self.inner.values(), 1, None):
            nodes: dict[Node, None] = {}
            ends: list[Node] = []
            found: list[tuple[Node | None, int]] = [edge[:2] for edge in send.edges]
            for node, _ in found:
                if node in leaves:
                    ends.append(node)
                elif node in edges:
                    if apart and edges[node] and node not in nodes:
                        apart = False
                elif node is not None:
                    edges[node] = following = node.next_functions
                    if following:
                        nodes[node] = None
                        found += following
                    elif (leaf := getattr(node, "variable", None)) is not None:
                        leaves[node] = leaf
                        ends.append(node)
            reached.append((nodes, ends))
        if apart:
            self.parts = dict(zip(self.inner, reached, strict=True))

    def run_last(self, roots: list[Root], at_leaves: list[Root], wait_on: WaitOn) -> None:
        """Everything left, leaves included; `at_leaves` is what enters at leaves alone, and is emptied. If another pass
        has some of the leaves, and does not let go of them soon, run the rest before waiting, as `wait_on` lets it."""
        leaves = self.leaves
        if at_leaves:
            for edge, _ in at_leaves:
                if (leaf := getattr(edge[0], "variable", None)) is not None:
                    leaves[edge[0]] = leaf
            del _  # a leaf takes a gradient that nobody else holds
            roots += at_leaves
            at_leaves.clear()
        if not leaves:
            if roots:
                self._call(roots, (), True)
            return
        variables = [*leaves.values()]
        claim = try_claim(variables)
        if claim is None and len(self.edges) <= _FEW:
            claim = await_claim(variables, _MOMENT)
        if claim is None:
            straight = [root for root in roots if root[0].node in leaves]
            self.run_closed(self.edges, [root for root in roots if root[0].node not in leaves])
            roots = straight
            claim = wait_for_claim(variables, wait_on)
        kept = take_grads(variables)
        try:
            self._run_with_leaves(roots)
        finally:
            self.gradients = take_grads(variables)
            if kept:
                put_back(kept)
            release(claim)

    def _run_with_leaves(self, roots: list[Root]) -> None:
        leaves = self.leaves
        for edge, gradient in roots:
            if edge[0] in leaves and gradient is not None and gradient.numel() > _MANY:
                del gradient  # nothing here may hold it: see there
                self._hand_over_large(roots)
                break
        if self._sums:
            roots = [*roots, *self._sums.take_nested()]
        if self._sums:
            sums = self._sums.root()  # kept until the call returns: in inference mode an edge does not keep its node
            roots = [*roots, (get_gradient_edge(sums), torch.empty(0))]
        if not roots:
            return
        sharing = self._sharing
        if sharing is None:
            sharing = may_share(self.edges, leaves)
        if sharing:
            with shared_held(sharing):
                self._call(roots, (), True)
        else:
            self._call(roots, (), True)

    def _hand_over_large(self, roots: list[Root]) -> None:
        """Turn large gradients that enter at a leaf into sums. A leaf copies what it is given unless nobody else holds
        it, and nobody holds a sum when it is handed on. `roots` itself is emptied of them, so that it holds none."""
        large = [
            position
            for position, (edge, gradient) in enumerate(roots)
            if edge[0] in self.leaves and gradient is not None and _is_large(gradient)
        ]
        for position in reversed(large):
            edge, gradient = roots.pop(position)
            self._add(edge[0], gradient)

    def run_all_but_leaves(self, roots: list[Root]) -> None:
        """Everything left above the leaves, of which there may be none."""
        if self.leaves:
            self.run_closed((), roots, [*self.leaves])
        elif roots:
            self._call(roots, (), True)

    def run_closed(self, nodes: Iterable[Node], roots: list[Root], leaves: Sequence[Node] | None = None) -> None:
        """Nodes that lead to nothing but each other and `leaves`; what arrives at these is added to their sums."""
        if not roots:
            return
        if leaves is None:
            leaves = [child for node in nodes for child, _ in self.edges[node] if child in self.leaves]
        if not leaves:
            self._ask((), roots)
            return
        below: dict[Node, None] = dict.fromkeys(leaves)
        found = self._ask(list(below), roots)
        visited: Mapping[Node, object] | None = None
        for leaf, part in zip(below, found, strict=True):
            if part is None and visited is None:
                visited = reached_from(roots)
            if part is not None or (visited is not None and leaf in visited):
                self._add(leaf, part)

    def run_cut(
        self,
        nodes: Collection[Node],
        roots: list[Root],
        wait_on: WaitOn,
        stages: Sequence[Stage[Node]] = (),
        entries: Iterable[GradientEdge] = (),
        go_on: GoOn = stay,
    ) -> StagedCut:
        """Nodes that lead to others that must wait, and of these as many `stages` as `go_on` lets follow. Returns which
        did, and what leaves, as roots of what has not run; leaves are summed."""
        cut = StagedCut(self.edges, self.leaves, [nodes, *[stage.nodes for stage in stages]], entries)
        if not roots:
            return cut
        handles = [node.register_hook(partial(self._collect, cut, node)) for node in cut.leading_out]
        try:
            with (
                claimed([*cut.stage_of, *cut.outside], wait_on),
                cut_before(cut.outside, cut.leaves, cut.stage_of, cut.gates(go_on)) as gates,
            ):
                self._run_to(gates, [*roots, *cut.roots()])
        finally:
            for handle in handles:
                handle.remove()
        self._nones |= any(gradient is None for _, gradient in cut.left())
        return cut

    def _run_to(self, gates: Sequence[GradientEdge], roots: list[Root]) -> None:
        """The engine call of a cut. It is asked for nothing: naming the leaves would cost the engine a second walk over
        all that lies behind the cut, and they are not visited anyway."""
        self._call([*roots, *[(gate, torch.empty(0)) for gate in gates]], (), True)

    def _collect(self, cut: StagedCut, node: Node, leaving: Gradients, _: object) -> Gradients | None:
        """The post-hook of a node that leads out of a cut batch: keep what the engine will not take there."""
        if taker() != self._taker:
            return None  # another engine call over the same graph: of another pass, or a user's own
        if order.active:
            with lanes.back_on_lane(leaving):  # a node runs on the streams of its forward
                return cut.keep(node, leaving, self._add)
        return cut.keep(node, leaving, self._add)

    def _add(self, leaf: Node, part: Tensor | None) -> None:
        if self._sums is None:
            self._sums = LeafSums()
        self._sums.add(leaf, part)

    def _ask(self, leaves: Sequence[Node], roots: list[Root]) -> tuple[Tensor | None, ...]:
        """One engine call from `roots` that writes to no leaf and returns what arrived at each. Recvs run."""
        if not leaves:
            self._call(roots, (), True)  # it visits none
            return ()
        wanted = (*[GradientEdge(leaf, 0) for leaf in leaves], ANCHOR)
        first = {edge.node for edge, _ in roots}
        with hooks_held([self.leaves[leaf] for leaf in leaves], first):
            return self._call(roots, wanted, False)[:-1]

    def _call(
        self, roots: list[Root], wanted: tuple[GradientEdge, ...], accumulate: bool, whole: bool = False
    ) -> tuple[Tensor | None, ...]:
        """One call of torch's engine. Not through `torch.autograd.backward` and `grad`: their checks of shapes and
        dtypes were made when the gradients came, and cost as much as a small graph takes to run."""
        if self._nones and not whole:
            with _entering(roots) as entering:
                return self._call(entering, wanted, accumulate, whole=True)
        edges, gradients = zip(*roots, strict=True)
        try:
            before = _get_state(TAKER)
        except RuntimeError:  # the first time in a thread
            before = None
        set_state(TAKER, self._taker)
        try:
            return _run_backward(edges, gradients, self._retain_graph, self._create_graph, wanted, True, accumulate)
        finally:
            set_state(TAKER, before)


def _is_large(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and gradient.nbytes >= (_LARGE_ON_GPU if gradient.is_cuda else _LARGE)


def reached_from(roots: Iterable[Root]) -> dict[Node, None]:
    """All nodes that an engine call from `roots` would visit."""
    found: dict[Node, None] = {}
    stack = [edge[0] for edge, _ in roots]
    while stack:
        node = stack.pop()
        if node not in found:
            found[node] = None
            stack += [child for child, _ in node.next_functions if child is not None]
    return found


@contextmanager
def _entering(roots: Sequence[Root]) -> Iterator[list[Root]]:
    """The roots as an engine call takes them.

    It takes no root without a gradient, but where a node handed None across a cut, one process would visit the next
    node all the same. So a None enters as zeros, and a pre-hook of the node it enters at makes them None again, unless
    a gradient from elsewhere was added to them.
    """
    entering = [root for root in roots if root[1] is not None]
    handles = []
    for edge, gradient in roots if len(entering) < len(roots) else ():
        if gradient is None and all(edge[:2] != other[:2] for other, _ in entering):
            meta = edge.node._input_metadata[edge.output_nr]
            zeros = torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
            handles.append(edge.node.register_prehook(partial(_empty_again, zeros)))
            entering.append((edge, zeros))
    try:
        yield entering
    finally:
        for handle in handles:
            handle.remove()


def _empty_again(zeros: Tensor, gradients: Gradients) -> Gradients:
    return tuple([None if gradient is zeros else gradient for gradient in gradients])
