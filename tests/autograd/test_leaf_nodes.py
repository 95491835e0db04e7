"""Which leaves nobody observes, and which gradients they take as they are."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from telegrad.autograd.functions import SendNode
from telegrad.autograd.leaf_nodes import are_taken_as_they_are, held_by_nobody, is_plain
from telegrad.ids import MessageId, WorkerId


def leaf(*shape: int) -> Tensor:
    return torch.ones(shape or (2,), requires_grad=True)


def edge(tensor: Tensor) -> GradientEdge:
    return get_gradient_edge(tensor)


def test_a_plain_leaf_is_plain_and_its_node_as_before() -> None:
    x = leaf()
    at = edge(x)
    assert is_plain(at)
    (x * 1).sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


@pytest.mark.parametrize(
    "observe",
    [
        lambda x: x.register_hook(lambda g: None),
        lambda x: x.register_post_accumulate_grad_hook(lambda p: None),
        lambda x: edge(x).node.register_hook(lambda *_: None),
        lambda x: edge(x).node.register_prehook(lambda *_: None),
        lambda x: x.requires_grad_(False),
    ],
)
def test_one_that_is_observed_is_not(observe: Any) -> None:
    x = leaf()
    at = edge(x)  # keeps the node, and what is hooked to it
    observe(x)
    assert not is_plain(at)


def test_a_hook_that_was_removed_observes_nothing() -> None:
    x = leaf()
    at = edge(x)
    at.node.register_hook(lambda *_: None).remove()
    x.register_hook(lambda g: None).remove()
    assert is_plain(at)


def test_only_leaves_that_are_contiguous_are_plain() -> None:
    assert not is_plain(edge(torch.ones(2, 3).t().requires_grad_()))
    assert not is_plain(edge(torch.ones(1).expand(3).requires_grad_()))
    assert not is_plain(edge(leaf() * 2))


def test_a_node_that_somebody_else_holds_is_known() -> None:
    x, y = leaf(), leaf()
    assert held_by_nobody([edge(x), edge(y)])
    graph = y * 2
    assert not held_by_nobody([edge(x), edge(y)])
    del graph
    assert held_by_nobody([edge(x), edge(y)])


def test_the_reducer_of_replicas_is_known() -> None:
    """It is hooked to the nodes in C++, which shows nothing to Python."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        nodes = [edge(parameter) for parameter in model.parameters()]
        assert all(map(is_plain, nodes)) and not held_by_nobody(nodes)
    finally:
        dist.destroy_process_group()


def test_a_send_that_has_looked_has_its_edges_again() -> None:
    x = leaf()
    send = SendNode(MessageId(1), WorkerId(1), [x])
    (found,) = send.unobserved_leaves()
    assert found is x
    assert send.edges[0].node.variable is x  # type: ignore[attr-defined]
    send.check([torch.ones(2)])


def test_a_send_of_an_observed_leaf_keeps_its_edges() -> None:
    x = leaf()
    send = SendNode(MessageId(1), WorkerId(1), [x])
    seen = []
    send.edges[0].node.register_hook(lambda *_: seen.append("seen"))
    assert not send.unobserved_leaves()
    torch.autograd.backward(send.edges, [torch.ones(2)])
    assert seen == ["seen"]


def test_gradients_that_a_leaf_takes_as_they_are() -> None:
    assert are_taken_as_they_are([torch.ones(2, 3), torch.ones(1)])
    shared = torch.ones(2)
    for other in (
        [None],
        [torch.ones(2, 3).t()],
        [torch.ones(1).expand(3)],
        [torch.eye(2).to_sparse()],
        [leaf()],
        [shared, shared.view(2)],
    ):
        assert not are_taken_as_they_are(other)


def test_where_it_is_profiled_the_engine_is_asked() -> None:
    with torch.autograd.profiler.profile(use_cpu=True):
        assert not are_taken_as_they_are([torch.ones(2)])
