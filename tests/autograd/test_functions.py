"""Send and Recv nodes alone: what they look like to torch, what memory they share, and which gradients they accept."""

import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad.autograd.functions import Gradients, SendNode, attach_recv, running_in
from telegrad.errors import AutogradError, GradientMismatch
from telegrad.ids import MessageId, WorkerId

MESSAGE, PEER = MessageId(42), WorkerId(1)


def test_received_tensors_share_one_node_and_require_grad() -> None:
    (first, second), recv = attach_recv([torch.ones(2), torch.ones(3)], MESSAGE, PEER)
    assert first.requires_grad and second.requires_grad
    assert first.grad_fn is second.grad_fn is recv.node
    assert (first.output_nr, second.output_nr) == (0, 1)
    assert recv.node.name() == recv.name() == "torch::distributed::autograd::RecvRpcBackward"
    assert recv.next_functions == recv.node.next_functions
    assert recv.count == 2
    assert repr(recv) == "<RecvNode 42: 2 tensors from worker 1>"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0),
        lambda: torch.arange(6.0).view(2, 3).detach(),
        lambda: torch.arange(6.0).view(2, 3).t().detach(),
        lambda: torch.arange(6.0).as_strided((2, 2), (1, 2)).detach(),
        lambda: torch.tensor(1.0),
        lambda: torch.empty(0),
        lambda: torch.zeros(2, dtype=torch.complex64),
        lambda: torch.frombuffer(bytearray(16), dtype=torch.float32),
    ],
)
def test_received_tensors_keep_their_memory_and_may_change_in_place(make: Any) -> None:
    tensor, other = make(), make()
    pointer = tensor.data_ptr()
    (received, _), recv = attach_recv([tensor, other], MESSAGE, PEER)
    assert received.data_ptr() == pointer
    assert received.stride() == tensor.stride()
    arrived: list[Gradients] = []
    received.mul_(2)
    assert received.data_ptr() == pointer
    with running_in(lambda node, gradients: arrived.append(gradients) if node is recv.node else None):
        received.backward(torch.ones_like(received))
    assert torch.equal(arrived[0][0], torch.full_like(received, 2))
    assert arrived[0][1] is None


def test_one_tensor_twice_in_a_message_gives_its_gradient_once() -> None:
    tensor = torch.ones(2)
    (first, second), recv = attach_recv([tensor, tensor], MESSAGE, PEER)
    arrived: list[Gradients] = []
    with running_in(lambda node, gradients: arrived.append(gradients) if node is recv.node else None):
        (first + second * 2).sum().backward()
    assert torch.equal(sum(g for g in arrived[0] if g is not None), torch.full((2,), 3.0))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_receiving_does_not_depend_on_the_threads_grad_mode(mode: Any) -> None:
    tensor = torch.ones(2)
    with mode():
        (received,), recv = attach_recv([tensor], MESSAGE, PEER)
    assert received.grad_fn is recv.node


def test_a_plain_backward_through_a_received_tensor_says_what_to_call() -> None:
    (received,), _ = attach_recv([torch.ones(2)], MESSAGE, PEER)
    with pytest.raises(AutogradError, match=r"worker 1 \(message 42\).*telegrad.autograd.backward"):
        received.sum().backward()


def test_a_recv_forms_no_cycle() -> None:
    gc.collect()
    gc.disable()
    try:
        (received,), recv = attach_recv([torch.ones(2)], MESSAGE, PEER)
        out = received * 2
        alive = [weakref.ref(recv), weakref.ref(received)]
        del received, recv, out
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


def test_a_send_looks_to_torch_like_its_own() -> None:
    leaf = torch.ones(2, requires_grad=True)
    product = leaf * 3
    send = SendNode(MESSAGE, PEER, [leaf, product, product])
    assert send.name() == "torch::distributed::autograd::SendRpcBackward"
    (leaf_node, leaf_nr), (node, number), again = send.next_functions
    assert leaf_node.name() == "torch::autograd::AccumulateGrad"
    assert leaf_node.variable is leaf
    assert (leaf_nr, number) == (0, 0)
    assert node is product.grad_fn
    assert again == (node, number)
    assert repr(send) == "<SendNode 42: 3 tensors to worker 1>"


def test_a_send_stays_with_the_value_that_was_sent() -> None:
    product = torch.ones(2, requires_grad=True) * 3
    sent_by = product.grad_fn
    send = SendNode(MESSAGE, PEER, [product])
    product.mul_(2)
    assert send.next_functions[0][0] is sent_by is not product.grad_fn


def test_a_send_of_leaves_is_resolved_when_its_message_has_left_or_a_pass_asks() -> None:
    leaf = torch.ones(2, requires_grad=True)
    for ask in (SendNode.resolve, lambda send: send.edges, lambda send: send.check([None])):
        send = SendNode(MESSAGE, PEER, [leaf], later=True)
        assert send.at_leaves and send._tensors is not None
        ask(send)
        assert send._tensors is None and send.next_functions[0][0].variable is leaf
        assert send.metas == [(leaf.shape, leaf.dtype, leaf.device)]
    with pytest.raises(AttributeError, match="no 'other'"):
        send.other  # noqa: B018 - asked for to see the error
    with pytest.raises(AttributeError):
        SendNode(MESSAGE, PEER, [leaf], later=True).other  # noqa: B018 - the same before it is resolved


def test_a_send_may_be_resolved_by_another_thread_in_the_moment_in_which_a_pass_asks() -> None:
    send = SendNode(MESSAGE, PEER, [torch.ones(2, requires_grad=True)], later=True)
    send.resolve()
    assert send.__getattr__("edges") is send.edges  # as Python calls it: the place was empty when it looked


def test_a_send_of_what_is_no_leaf_is_resolved_at_once() -> None:
    leaf = torch.ones(2, requires_grad=True)
    product = leaf * 3
    sent_by = product.grad_fn
    send = SendNode(MESSAGE, PEER, [leaf, product], later=True)
    assert not send.at_leaves
    product.mul_(2)
    assert send.next_functions[1][0] is sent_by is not product.grad_fn


def test_a_leaf_that_requires_grad_no_more_drops_its_gradient_as_in_one_process() -> None:
    leaf = torch.ones(2, requires_grad=True)
    send = SendNode(MESSAGE, PEER, [leaf], later=True)
    leaf.requires_grad_(False)
    send.resolve()
    (edge,) = send.edges
    torch.autograd.backward([edge], [torch.ones(2)])
    assert leaf.grad is None


@pytest.mark.parametrize(
    ("gradients", "complaint"),
    [
        ([], "worker 1 returned 0 gradients for message 42, which sent 2 tensors"),
        ([None] * 3, "returned 3 gradients"),
        ([None, torch.ones(3)], r"gradient of \(3,\) torch.float32 on cpu for tensor 1 of message 42, which is \(2,\)"),
        ([torch.ones(2, dtype=torch.float64), None], r"\(2,\) torch.float64 on cpu for tensor 0"),
        ([torch.ones(2, device="meta"), None], r"\(2,\) torch.float32 on meta for tensor 0"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(gradients: list[Tensor | None], complaint: str) -> None:
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(GradientMismatch, match=complaint):
        SendNode(MESSAGE, PEER, [leaf, leaf * 2]).check(gradients)


def test_gradients_that_fit_may_be_missing_or_sparse() -> None:
    leaf = torch.ones(2, requires_grad=True)
    send = SendNode(MESSAGE, PEER, [leaf, leaf * 2])
    send.check([None, None])
    send.check([torch.ones(2).to_sparse(), torch.ones(2)])


_USE_BESIDE_A_SEND = """
import faulthandler, sys, threading, time
import torch
from telegrad.autograd.functions import edge_of

class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

leaf = torch.ones(2, requires_grad=True)
if {no_grad}:
    with torch.no_grad():
        sent = edge_of(leaf)
else:
    sent = edge_of(leaf)
faulthandler.dump_traceback_later(30, exit=True)  # by a thread of its own, which needs no interpreter
until = time.monotonic() + 2
counts = [0, 0]

def use(which, operation):
    while time.monotonic() < until:
        operation(leaf)
        counts[which] += 1

threads = [threading.Thread(target=use, args=each) for each in [(0, lambda x: x.view_as(x)), (1, Same.apply)] * 2]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert min(counts) > 0 and sent.node.variable is leaf
"""


@pytest.mark.slow
@pytest.mark.parametrize("no_grad", [False, True])
def test_a_leaf_that_was_sent_may_be_used_by_operations_and_functions_in_several_threads(no_grad: bool) -> None:
    """With a node that Python alone holds, torch 2.13 has them wait for each other, with the interpreter held."""
    script = _USE_BESIDE_A_SEND.replace("{no_grad}", str(no_grad))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
