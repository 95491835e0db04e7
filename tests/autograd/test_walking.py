"""The walk over a graph, made when it is needed or ahead of that, finds the same."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from telegrad.autograd.context import Context
from telegrad.autograd.functions import ANCHOR, SendNode
from telegrad.autograd.walking import may_share, walk, walk_ahead
from telegrad.ids import ContextId, MessageId, WorkerId

MESSAGE = MessageId(7)


def context_with(*tensors: Tensor) -> Context:
    made = Context(ContextId(1), WorkerId(0))
    made.sends[MESSAGE] = SendNode(MESSAGE, WorkerId(1), tensors)
    return made


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def nodes_of(tensor: Tensor) -> set[Any]:
    """By another way than the walk: recursion."""

    def below(node: Any) -> set[Any]:
        return {node}.union(*[below(child) for child, _ in node.next_functions if child is not None])

    return below(get_gradient_edge(tensor).node)


def test_a_walk_finds_every_node_once_and_the_leaves() -> None:
    x, w = leaf(), leaf()
    y = x * w
    z = (y + y).tanh() + x
    edges, leaves, _ = walk([get_gradient_edge(z)])
    assert {*edges} == nodes_of(z) | {ANCHOR.node}
    assert {id(found) for found in leaves.values()} == {id(x), id(w)}


def test_what_was_walked_ahead_is_taken_once_and_for_its_send_alone() -> None:
    x = leaf()
    y = x * 2
    context = context_with(y)
    walk_ahead(context, MESSAGE)
    assert context.ahead is not None
    assert context.walked_from(MessageId(8)) is None
    assert context.ahead is None
    walk_ahead(context, MESSAGE)
    edges, leaves, _ = context.walked_from(MESSAGE)
    assert {*edges} == nodes_of(y) | {ANCHOR.node} and len(leaves) == 1


def test_what_is_done_to_a_tensor_after_its_reply_is_no_part_of_it() -> None:
    x = leaf()
    y = x * 2
    context = context_with(y)
    before = nodes_of(y)
    walk_ahead(context, MESSAGE)
    y.mul_(3)
    assert {*context.walked_from(MESSAGE)[0]} == before | {ANCHOR.node} == {*walk(context.sends[MESSAGE].edges)[0]}


@pytest.mark.parametrize(("length", "is_kept"), [(8, True), (40, True), (100, False)])
def test_a_large_graph_is_not_walked_ahead(length: int, is_kept: bool) -> None:
    y = leaf()
    for _ in range(length):
        y = y.tanh()
    context = context_with(y)
    walk_ahead(context, MESSAGE)
    assert (context.ahead is not None) is is_kept


def test_a_node_that_leads_to_many_ends_the_walk() -> None:
    wide = torch.cat([leaf() for _ in range(100)])
    edges, _, found = walk([get_gradient_edge(wide.tanh())], 64)
    assert len(edges) == 3 and len(found) > 64  # tanh, the cat and the anchor: not one of the leaves
    context = context_with(wide)
    walk_ahead(context, MESSAGE)
    assert context.ahead is None


def test_nothing_is_kept_of_leaves_of_an_ended_context_or_within_a_pass() -> None:
    context = context_with(leaf())
    walk_ahead(context, MESSAGE)
    assert context.ahead is None
    context = context_with(leaf() * 2)
    context.latest = object()
    walk_ahead(context, MESSAGE)
    assert context.ahead is None
    context.latest = None
    walk_ahead(context, MESSAGE)
    context.end()
    assert context.ahead is None
    walk_ahead(context, MESSAGE)  # its Send is gone
    assert context.ahead is None


class Twice(torch.autograd.Function):
    """A node of the user's own, which may hand on anything."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return one.sum() + other.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "shares"),
    [
        (lambda: leaf() + leaf(), True),
        (lambda: leaf() + torch.ones(1, requires_grad=True), False),
        (lambda: leaf() * leaf(), False),
        (lambda: (one := leaf()) + one, False),
        (lambda: leaf() + 1 + leaf() * 2, False),
        (lambda: Twice.apply(leaf(), leaf()), True),
        (lambda: Twice.apply(leaf(), torch.ones(3, requires_grad=True)), False),
        (lambda: nested() + nested(), True),
    ],
)
def test_which_nodes_may_give_leaves_a_gradient_in_common(make: Any, shares: bool) -> None:
    made = make()
    edges, leaves, _ = walk([get_gradient_edge(made)])
    assert may_share(edges, leaves) == ([made.grad_fn] if shares else [])
    context = context_with(made) if not made.is_nested else None
    if context is not None:
        walk_ahead(context, MESSAGE)
        assert context.walked_from(MESSAGE)[2] == may_share(edges, leaves)


def test_what_becomes_of_a_leaf_later_changes_nothing() -> None:
    x, w = leaf(), leaf()
    y = x + w
    w.data = torch.ones(1)
    edges, leaves, _ = walk([get_gradient_edge(y)])
    assert may_share(edges, leaves) == [y.grad_fn]
