"""One engine call over a part of the graph that is cut off, and over what may follow it there, stage by stage.

    Sends   a          b            c
            |          |            |
           {a} -gate-> {a,b} -gate-> {a,b,c}

a has been heard. The call runs {a}, whose Recv tells a peer, and that one answers with the gradients of b. The call
waits for them at the gate before {a,b} and goes on when they come; and so at the next one. If it waits in vain it ends
there: that is a cut, and what was on its way is returned. Each cut costs a walk of the engine over all that lies behind
it; going on costs none. How long a wait is worth that is up to the pass.

An engine call takes all its roots when it begins, and b's gradient has yet to come. So a stand-in without memory enters
in its place. What the nodes in front hand to the same place is kept from the engine by post-hooks, so that the stand-in
remains the one tensor in that node's input buffer. At the gate it becomes the sum: before the node's hooks see it, and
without a copy. Where that cannot be (a sparse sum, or none at all) the call ends at the gate.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd.functions import ANCHOR, Gradients
from telegrad.engine.local.cut import Gate, stop
from telegrad.engine.local.regions import Edges

Root = tuple[GradientEdge, Tensor | None]  # None: visited, but with no gradient
GoOn = Callable[[int], list[Root] | None]  # asked before each stage: what enters it now; None: it must not run
Place = tuple[Node, int]  # where gradients enter: a node, and which of its inputs

_ANCHOR = ANCHOR.node
_REST = 1 << 62  # the stage of all that is outside


def _meta(edge: GradientEdge) -> Any:
    return edge.node._input_metadata[edge[1]]


def may_come_late(edge: GradientEdge) -> bool:
    """Whether a stand-in can be made for what enters there: a nested tensor has no shape."""
    return not _meta(edge).is_nested_tensor


def stay(_: int) -> None:
    """Run no stage."""


class StagedCut:
    """The nodes of one engine call, where it is cut off, and what crosses from one stage to a later one."""

    def __init__(
        self,
        edges: Mapping[Node, Edges[Node]],
        leaves: Mapping[Node, Tensor],
        inside: Sequence[Collection[Node]],
        entries: Iterable[GradientEdge],
    ) -> None:
        """`inside`: the nodes of each stage, the first of which runs at once; `entries`: where gradients come late."""
        self.stage_of = {node: number for number, nodes in enumerate(inside) for node in nodes}
        self.outside: set[Node] = set()
        self.leaves: set[Node] = set()
        self.leading_out: dict[Node, list[tuple[int, Place, int]]] = {}  # node -> output, where it leads, and its stage
        self._borders: list[set[Node]] = [set() for _ in inside]  # the nodes of each stage that others lead to
        self._crossed: list[tuple[int, Root]] = []  # what crossed a border, and the stage behind it
        self._stand_ins: dict[Place, tuple[int, GradientEdge, Tensor]] = {}
        self._parts: dict[Place, list[Tensor | None]] = {}  # what reached the place of each stand-in
        self.reached = 0  # how many stages have followed the first
        if len(inside) > 1:
            self._enter_late(entries)
        for node, stage in self.stage_of.items():
            for position, (child, number) in enumerate(edges[node]):
                if child is None or child is _ANCHOR:
                    continue
                later = self.stage_of.get(child, _REST)
                if later != stage:
                    self._note(node, position, (child, number), later, child in leaves)

    def _note(self, node: Node, position: int, place: Place, later: int, is_leaf: bool) -> None:
        self.leading_out.setdefault(node, []).append((position, place, later))
        if later < _REST:
            self._borders[later].add(place[0])
        else:
            (self.leaves if is_leaf else self.outside).add(place[0])

    def _enter_late(self, entries: Iterable[GradientEdge]) -> None:
        for edge in entries:
            stage = self.stage_of.get(edge[0], 0)
            if stage and edge[:2] not in self._stand_ins:
                meta = _meta(edge)
                with torch.inference_mode(False):
                    stand_in = torch.zeros((), dtype=meta.dtype, device=meta.device).expand(meta.shape)
                self._stand_ins[edge[:2]] = stage, edge, stand_in
                self._parts[edge[:2]] = []
                self._borders[stage].add(edge.node)

    def gates(self, go_on: GoOn) -> list[Gate]:
        """One before each stage but the first. Where `go_on` has nothing the call ends."""
        return [
            (partial(self._pass, number, go_on), border) for number, border in enumerate(self._borders) if number > 0
        ]

    def roots(self) -> list[Root]:
        """The stand-ins."""
        return [(edge, stand_in) for _, edge, stand_in in self._stand_ins.values()]

    def keep(self, node: Node, leaving: Gradients, add_to_leaf: Callable[[Node, Tensor | None], None]) -> Gradients:
        """What leaves a node that leads out of its stage. Returns what the engine is to take on."""
        taken_on = [*leaving]
        for position, place, later in self.leading_out[node]:
            gradient = leaving[position]
            if place in self._parts:
                self._parts[place].append(gradient)
                taken_on[position] = None
            elif place[0] in self.leaves:
                add_to_leaf(place[0], gradient)
                taken_on[position] = None
            else:
                self._crossed.append((later, (GradientEdge(*place), gradient)))
        return tuple(taken_on)

    def _pass(self, number: int, go_on: GoOn) -> None:
        """The gate before a stage."""
        entering = go_on(number - 1)
        for edge, gradient in entering or ():
            self._parts[edge[:2]].insert(0, gradient)  # first, as roots are in one process
        if entering is None or not self._fill(number):
            stop()
        self.reached = number
        self._crossed = [crossed for crossed in self._crossed if crossed[0] > number]

    def _fill(self, number: int) -> bool:
        """Let the stand-ins of a stage become what has reached their places. False: one cannot."""
        filled = []
        for place, (stage, _, stand_in) in self._stand_ins.items():
            if stage == number:
                present = [part for part in self._parts[place] if part is not None]
                if not present or any(type(p) is not Tensor or p.layout is not torch.strided for p in present):
                    return False
                filled.append((place, stand_in, reduce(add, present)))
        for place, stand_in, total in filled:
            stand_in.data = total
            del self._parts[place], self._stand_ins[place]
        return True

    def left(self) -> list[Root]:
        """What was on its way to the stages that did not run, and out of this part."""
        late = [(edge, part) for place, (_, edge, _) in self._stand_ins.items() for part in self._parts[place]]
        return [*late, *[root for _, root in self._crossed]]
