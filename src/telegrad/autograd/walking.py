"""The walk over the graph behind the tensors of a Send: its nodes, where they lead, and the leaves among them.

A pass needs it when the gradients of the Send come. A worker that has answered a call usually has nothing to do until
then, so it walks over a small graph ahead, while nobody waits for it. A graph that was recorded does not change: what
is done later to its tensors, in place too, makes new nodes that lead to these.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd.context import Context
from telegrad.autograd.functions import ANCHOR
from telegrad.ids import MessageId

_ANCHOR = ANCHOR.node
_FEW = 64  # steps of a walk that is made ahead: it takes less time than a message
_node_of: Callable[[Any], Any] = itemgetter(0)  # of an edge, in whichever form


# By node where it leads (the anchor leads nowhere), the leaves, and a node for each step. Who takes it may change it.
Walked: TypeAlias = tuple[dict[Any, Sequence[tuple[Node | None, int]]], dict[Node, Tensor], list[Any]]


def walk(entries: Sequence[GradientEdge], most: int | None = None) -> Walked:
    """All nodes that lie behind these edges, or as many as are found before there are more than so many steps."""
    leaves: dict[Node, Tensor] = {}
    edges: dict[Any, Sequence[tuple[Node | None, int]]] = {_ANCHOR: (), None: ()}  # where no way leads on
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


def walk_ahead(context: Context, message_id: MessageId) -> None:
    """A reply with this Send has left: its gradients may be the next thing that comes."""
    send = context.sends.get(message_id)
    if send is not None and not send.at_leaves and context.latest is None:
        walked = walk(send.edges, _FEW)
        if len(walked[2]) <= _FEW:
            context.ahead = message_id, walked
