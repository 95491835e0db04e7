"""A gradient's journey over three workers, step by step, and how many messages a pass takes.

The program, and the numbers that name its messages (`docs/journey.md` tells the same with a picture):

      worker0                        worker1                        worker2

      x (leaf) --- Send 1 ---------> Recv 1
                                     t = x * w1 -- Send 2 --------> Recv 2
                                     |                              c = sin(t) * w2
                                     |  Recv 3 <------------------- Send 3
                                     |  |
      Recv 4 <------------ Send 4 -- h = t + c
      loss = sum(h * w0)
      x (leaf) --- Send 5 -----------------------------------------> Recv 5
      Recv 6 <----------------------------------------------------- Send 6: spare = x * w2, which nobody uses

On worker1 two Sends share one graph: Send 4 reaches everything, Send 2 reaches `t` and Recv 1. So there are two
regions: {4} with the sum and Recv 3, and {2, 4} with the product and Recv 1. The second must wait for Send 2, which
waits for worker2, which waits for Recv 3. So the first has to run alone, and what it leads to runs once, later, with
both parts.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.autograd.functions import RecvNode
from telegrad.autograd.registry import registry, within
from telegrad.engine.passes import Pass
from telegrad.rpc.current import require_agent
from tests.cluster import Cluster, cluster
from tests.oracle.interpreter import await_empty
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    with cluster(4, heartbeat=0) as made:  # whose pings would be counted
        yield made
        await_empty(4)


weight = torch.tensor([0.5, 2.0], requires_grad=True)  # w0, w1, w2: each worker has its own
Step = tuple[str, int, list[float] | None]  # "Recv", the worker it tells, the gradient or none
_journey: list[Step] = []
_runs: list[str] = []
_deliver = Pass.deliver


def encode(x: Tensor) -> Tensor:
    """worker1"""
    t = x * weight
    t.register_hook(lambda _: _runs.append("t"))
    return t + rpc.rpc_sync("worker2", lookup, (t,))


def lookup(t: Tensor) -> Tensor:
    """worker2"""
    return t.sin() * weight


def peek(x: Tensor) -> Tensor:
    """worker2"""
    return x * weight


def follow() -> None:
    """From now on note what the Recvs of this worker tell."""

    def deliver(self: Pass, recv: RecvNode, gradients: Any) -> None:
        _journey.append(("Recv", recv.peer, None if gradients is None else gradients[0].tolist()))
        _deliver(self, recv, gradients)

    Pass.deliver = deliver


def journey() -> list[Step]:
    Pass.deliver = _deliver
    noted = list(_journey)
    _journey.clear()
    return noted


def runs() -> list[str]:
    noted = list(_runs)
    _runs.clear()
    return noted


def gradient_here(context_id: int) -> Tensor:
    return autograd.get_gradients(context_id)[weight]


def requests_sent() -> dict[str, int]:
    return {link.member.name: link.pending.asked for link in require_agent().peers.links()}


def outside(worker: str, function: Any, *args: Any) -> Any:
    with within(None):
        return rpc.rpc_sync(worker, function, args)


def test_the_journey(four: Cluster) -> None:
    x = torch.tensor([1.0, -1.0], requires_grad=True)
    for worker in ("worker0", "worker1", "worker2"):
        outside(worker, follow)
    with autograd.context() as context_id:
        h = rpc.rpc_sync("worker1", encode, (x,))
        rpc.rpc_sync("worker2", peek, (x,))
        autograd.backward(context_id, [(h * weight).sum()])
        steps = {worker: outside(worker, journey) for worker in ("worker0", "worker1", "worker2")}
        ours = [
            autograd.get_gradients(context_id)[x],
            *(outside(worker, gradient_here, context_id) for worker in ("worker0", "worker1", "worker2")),
        ]

    # The same in one process, which also tells the gradients on the way.
    x1 = x.detach().clone().requires_grad_()
    w0, w1, w2 = (weight.detach().clone().requires_grad_() for _ in range(3))
    t = x1 * w1
    c = t.sin() * w2
    h1 = t + c
    for tensor in (t, c, h1):
        tensor.retain_grad()
    (h1 * w0).sum().backward()
    for mine, theirs in zip(ours, (x1, w0, w1, w2), strict=True):
        torch.testing.assert_close(mine, theirs.grad)

    # 1. Nothing reaches Recv 6: it says so first. Then the root's graph runs, and Recv 4 tells worker1.
    assert steps["worker0"] == [("Recv", 2, None), ("Recv", 1, pytest.approx(h1.grad.tolist()))]
    # 2. worker1 runs what Send 4 alone reaches; Recv 3 tells worker2.
    # 4. Send 2 has been heard: the product runs once, with both parts, and Recv 1 tells worker0.
    assert [step[1] for step in steps["worker1"]] == [2, 0]
    assert steps["worker1"][0][2] == pytest.approx(c.grad.tolist())
    assert steps["worker1"][1][2] == pytest.approx(x1.grad.tolist())
    assert outside("worker1", runs) == ["t"]
    # 3. worker2 heard "none" for Send 6, and says so at Recv 5; Send 3 brought a gradient, and Recv 2 tells worker1.
    part = (w2 * t.cos() * c.grad).tolist()
    assert sorted(steps["worker2"], key=lambda step: step[1]) == [("Recv", 0, None), ("Recv", 1, pytest.approx(part))]


# --- how many messages ---


def double(x: Tensor) -> Tensor:
    return x * 2


def along(workers: list[str], x: Tensor) -> Tensor:
    return x * 2 if not workers else rpc.rpc_sync(workers[0], along, (workers[1:], x * 3)) * 5


def counted(workers: list[str], context_id: int, loss: Tensor) -> dict[tuple[str, str], int]:
    """The requests that a pass takes, by who asked whom."""
    await_only(len(workers), context_id)  # the end of another context is told by requests as well
    before = {worker: outside(worker, requests_sent) for worker in workers}
    autograd.backward(context_id, [loss])
    after = {worker: outside(worker, requests_sent) for worker in workers}
    asked = {(a, b): n - before[a].get(b, 0) for a in workers for b, n in after[a].items()}
    own = {("worker0", worker): 1 for worker in workers}  # the question itself, about what was asked before
    return {pair: n - own.get(pair, 0) for pair, n in asked.items() if n - own.get(pair, 0)}


def contexts_here() -> list[int]:
    return [int(context.context_id) for context in registry().contexts()]


def await_only(workers: int, context_id: int) -> None:
    for worker in range(workers):
        wait_until(lambda name=f"worker{worker}": set(outside(name, contexts_here)) <= {context_id})


def test_two_workers_need_one_round_trip(four: Cluster) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", double, (x,)).sum()
        # One request, answered when all is done; the gradient of `x` comes with the answer.
        assert counted(["worker0", "worker1"], context_id, loss) == {("worker0", "worker1"): 1}
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0]


def test_a_chain_costs_each_hop_once(four: Cluster) -> None:
    """worker0 -> 1 -> 2 -> 3: gradients pass each link once each way; the root invites 2 and 3, and hears from each."""
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", along, (["worker2", "worker3"], x)).sum()
        asked = counted(["worker0", "worker1", "worker2", "worker3"], context_id, loss)
        assert asked == {
            ("worker0", "worker1"): 1,
            ("worker0", "worker2"): 1,
            ("worker0", "worker3"): 1,
            ("worker1", "worker2"): 1,
            ("worker2", "worker3"): 1,
            ("worker3", "worker2"): 1,
            ("worker2", "worker1"): 1,  # and worker1's for the root go with its answer
        }
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0 * 3 * 3 * 5 * 5] * 2
