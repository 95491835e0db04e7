"""A cut that goes on: one engine call runs region after region, as their Sends are heard while it waits."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from telegrad.autograd.functions import Gradients, attach_recv
from telegrad.ids import MessageId, WorkerId
from tests.engine.alone import Alone

LENGTH = 5
Key = int
Answer = Callable[["Chain", Key], list[Tensor | None] | None]


def ones(chain: "Chain", key: Key) -> list[Tensor | None] | None:
    return [torch.ones(2)]


class Chain:
    """What a loop of calls leaves on the caller: `h = h + work(h) * call(h)`, each h sent, and a Recv for each result.

    The last h is heard first. Then its Recv is told, and so on towards the first: `answer` is what each Send hears.
    """

    def __init__(self, answer: Answer = ones) -> None:
        self.answer = answer
        self.weight = torch.tensor([0.5, -0.5], requires_grad=True)
        self.told: list[tuple[Key, Gradients | None]] = []
        self.calls: dict[Key, int] = {}  # by which engine call the gradient of each h was seen
        self.hidden = [self.weight.exp()]
        self.recvs = {}
        for number in range(1, LENGTH):
            (result,), recv = attach_recv([torch.tensor([0.3, 0.1 * number])], MessageId(number), WorkerId(1))
            self.recvs[number] = recv
            self.hidden.append(self.hidden[-1] + torch.tanh(self.hidden[-1] * self.weight) * result)
        for number, hidden in enumerate(self.hidden):
            hidden.register_hook(lambda _, number=number: self.seen(number))
        edges = {number: [get_gradient_edge(hidden)] for number, hidden in enumerate(self.hidden)}
        self.pass_: Alone[Key] = Alone(edges, self.recvs, retain_graph=False, deliver=self.deliver)
        self.left = list(range(LENGTH))[::-1]

    def deliver(self, key: Key, gradients: Gradients | None) -> None:
        self.told.append((key, gradients))

    def seen(self, number: Key) -> None:
        self.calls[number] = torch._C._current_graph_task_id()

    def hear_next(self, _: object = None) -> bool:
        key = self.left.pop(0)
        self.pass_.hear(key, self.answer(self, key))
        return True

    def run(self, while_waiting: Callable[[Any], bool] | None = None) -> "Chain":
        self.pass_.while_waiting(while_waiting or self.hear_next)
        self.pass_.walk()
        while self.left and not self.pass_.over:
            self.hear_next()
            self.pass_.run()
        return self

    def found(self) -> list[float]:
        """The leaf's gradient, and what left at each Recv."""
        numbers = self.pass_.gradients[self.weight].tolist()
        for key, gradients in self.told:
            numbers += [key, *[value for g in gradients or () if g is not None for value in g.tolist()]]
        return numbers


def heard_one_by_one(answer: Answer = ones) -> Any:
    chain = Chain(answer)
    chain.pass_.stages_from = None
    chain.pass_.walk()
    while chain.left:
        chain.hear_next()
        chain.pass_.run()
    assert chain.pass_.waits == 0
    return pytest.approx(chain.found(), rel=1e-5)


def test_one_engine_call_runs_what_follows() -> None:
    chain = Chain().run()
    assert chain.pass_.done
    assert chain.pass_.waits == LENGTH - 2  # the last one that is missing ends it: then all is heard
    assert len({chain.calls[number] for number in range(1, LENGTH)}) == 1
    assert chain.calls[0] != chain.calls[1]
    assert chain.found() == heard_one_by_one()


def test_what_was_heard_out_of_turn_is_not_waited_for() -> None:
    chain = Chain()
    for key in (2, 1):
        chain.left.remove(key)
        chain.pass_.hear(key, [torch.ones(2)])
    chain.run()
    assert chain.pass_.done
    assert chain.pass_.waits == 1
    assert chain.found() == heard_one_by_one()


def test_a_call_that_waited_in_vain_ends_and_the_pass_waits_no_more() -> None:
    answers = [True, False]

    def once(chain: Any) -> bool:
        return answers.pop(0) and chain_.hear_next()

    chain_ = Chain()
    chain_.run(once)
    assert answers == []
    assert chain_.pass_.done
    assert len({chain_.calls[number] for number in range(1, LENGTH)}) > 1
    assert chain_.found() == heard_one_by_one()


def test_a_result_that_nobody_used() -> None:
    def none(chain: Chain, key: Key) -> list[Tensor | None] | None:
        return None if key in (1, 3) else [torch.ones(2)]

    chain = Chain(none).run()
    assert chain.pass_.done
    assert chain.found() == heard_one_by_one(none)


def test_a_sum_that_is_not_dense_ends_the_call() -> None:
    def sparse(chain: Chain, key: Key) -> list[Tensor | None] | None:
        return [torch.ones(2).to_sparse() if key == 2 else torch.ones(2)]

    chain = Chain(sparse).run()
    assert chain.pass_.done
    assert chain.calls[2] != chain.calls[3]
    assert chain.found() == heard_one_by_one()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_grad_mode_does_not_matter(mode: Callable[[], Any]) -> None:
    chain = Chain()
    with mode():
        chain.run()
    assert chain.pass_.done
    assert chain.pass_.waits == LENGTH - 2
    assert chain.found() == heard_one_by_one()


def test_hooks_and_kept_gradients_see_the_whole_sum() -> None:
    seen: list[list[float]] = []
    chain = Chain()
    chain.hidden[2].retain_grad()
    chain.hidden[2].register_hook(lambda gradient: seen.append(gradient.tolist()))
    chain.run()
    one = Chain()
    one.hidden[2].retain_grad()
    one.pass_.stages_from = None
    one.pass_.walk()
    for key in (0, 1, 2, 3, 4):  # the last that is heard leads to all: one call
        one.pass_.hear(key, [torch.ones(2)])
    one.pass_.run()
    assert chain.hidden[2].grad is not None
    assert one.hidden[2].grad is not None
    assert torch.allclose(chain.hidden[2].grad, one.hidden[2].grad)
    assert seen == [chain.hidden[2].grad.tolist()]


def test_a_pass_given_up_while_it_waits_ends_there() -> None:
    chain = Chain()

    def give_up(_: Any) -> bool:
        thread = threading.Thread(target=chain.pass_.abort)
        thread.start()
        thread.join()
        return True

    chain.run(give_up)
    assert chain.pass_.over
    assert not chain.pass_.done
    assert chain.pass_.waits == 1
    assert [key for key, _ in chain.told] == [4]


def test_another_thread_wakes_the_call_that_waits() -> None:
    """A peer in a thread of its own, and the sleep of a real pass, with no end but what it waits for."""
    chain = Chain()
    more = threading.Semaphore(0)
    chain.deliver = lambda key, gradients: (chain.told.append((key, gradients)), more.release())  # type: ignore[method-assign, assignment] # for the peer
    chain.pass_._of_test = chain.deliver
    chain.pass_.stages_from, chain.pass_.patience = 0, 60.0

    def peer() -> None:
        while chain.left:
            more.acquire()
            chain.hear_next()
        chain.pass_.run()

    thread = threading.Thread(target=peer)
    chain.pass_.walk()
    chain.hear_next()
    thread.start()
    chain.pass_.run()
    thread.join()
    assert chain.pass_.done
    assert len({chain.calls[number] for number in range(1, LENGTH)}) == 1
    assert chain.found() == heard_one_by_one()


def test_the_order_of_the_nodes_is_given_back_and_the_graph_released() -> None:
    gc.collect()
    gc.disable()
    try:
        chain = Chain()
        numbers = {hidden: hidden.grad_fn._sequence_nr() for hidden in chain.hidden}  # type: ignore[union-attr] # torch's own
        chain.run()
        assert numbers == {hidden: hidden.grad_fn._sequence_nr() for hidden in chain.hidden}  # type: ignore[union-attr] # same
        numbers.clear()
        alive = [weakref.ref(hidden) for hidden in chain.hidden]
        chain.hidden.clear()
        assert [ref() for ref in alive] == [None] * LENGTH
    finally:
        gc.enable()


def test_a_pass_beyond_the_first_order_or_with_a_gpu_has_no_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telegrad.engine.local.graph.Graph.may_wait", False)
    chain = Chain().run()
    assert chain.pass_.waits == 0
    assert chain.found() == heard_one_by_one()
