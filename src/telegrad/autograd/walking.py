"""The walk over the graph behind the tensors of a Send: its nodes, where they lead, and the leaves among them.

A pass needs it when the gradients of the Send come. A worker that has answered a call usually has nothing to do until
then, so it walks over a small graph ahead, while nobody waits for it, and looks which of its nodes `may_share`. A graph
that was recorded does not change: what is done later to its tensors, in place too, makes new nodes that lead to these.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd.context import Context
from telegrad.autograd.functions import ANCHOR
from telegrad.ids import MessageId

_ANCHOR = ANCHOR.node
_FEW = 64  # steps of a walk that is made ahead: it takes less time than a message
_node_of: Callable[[Any], Any] = itemgetter(0)  # of an edge, in whichever form

Edges: TypeAlias = dict[Any, Sequence[tuple[Node | None, int]]]  # by node where it leads; the anchor leads nowhere
Leaves: TypeAlias = dict[Node, Tensor]
Walked: TypeAlias = tuple[Edges, Leaves, list[Node]]  # with the nodes that `may_share`. Who takes it may change it

# The nodes that hand on one tensor twice: of torch's own only an addition, and any that a user wrote.
with torch.inference_mode(False), torch.enable_grad():  # whatever the mode is where this is imported
    _ADDITION = type((torch.ones(1, requires_grad=True) + 1).grad_fn)
_SHARING: Any = (_ADDITION, torch.autograd.function.BackwardCFunction)

_never_shares: set[type[Node]] = set()  # types of nodes that were met, and do not: torch has some hundreds


def walk(entries: Sequence[GradientEdge], most: int | None = None) -> tuple[Edges, Leaves, list[Any]]:
    """All nodes that lie behind these edges, or as many as are found before there are more than so many steps; and a
    node for each step."""
    leaves: Leaves = {}
    edges: Edges = {_ANCHOR: (), None: ()}  # where no way leads on
    found = [*map(_node_of, entries)]
    for node in found if most is None else _few_of(found, most):  # grows; a node may be there more than once
        if node not in edges:
            edges[node] = following = node.next_functions
            if following:
                found += map(_node_of, following)
            elif (leaf := getattr(node, "variable", None)) is not None:
                leaves[node] = leaf
    del edges[None]
    return edges, leaves, found


def _few_of(found: list[Any], most: int) -> Iterator[Any]:
    """Not by counting what was visited: one node may lead to thousands."""
    for node in found:
        if len(found) > most:
            break
        yield node


def may_share(graph: Mapping[Any, Sequence[tuple[Node | None, int]]], leaves: Mapping[Node, Tensor]) -> list[Node]:
    """The nodes that may hand one and the same gradient to several leaves: they lead to two of one shape at least."""
    found: list[Node] = []
    if len(leaves) < 2 or _never_shares.issuperset(map(type, graph)):
        return found
    for node, edges in graph.items():
        if not isinstance(node, _SHARING):
            _never_shares.add(type(node))
        elif len(edges) > 1:
            below = {child for child, _ in edges if child is not None and child in leaves}
            if len(below) > 1 and len({*map(_shape_at, below)}) < len(below):
                found.append(node)
    return found


def _shape_at(leaf: Any) -> tuple[int, ...] | None:
    """The shape of the gradient of a leaf, by its node. It is that of the tensor when it was used, whatever is done to
    the tensor later (`leaf.data = ...`). None for a nested one, which has no shape."""
    (meta,) = leaf._input_metadata
    return None if meta.is_nested_tensor else (*meta.shape,)


def walk_ahead(context: Context, message_id: MessageId) -> None:
    """A reply with this Send has left: its gradients may be the next thing that comes."""
    send = context.sends.get(message_id)
    if send is not None and not send.at_leaves and context.latest is None:
        edges, leaves, found = walk(send.edges, _FEW)
        if len(found) <= _FEW:
            walked: Walked = edges, leaves, may_share(edges, leaves) if leaves else []
            context.ahead = message_id, walked
