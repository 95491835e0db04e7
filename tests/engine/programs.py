"""Random programs of one worker: leaves, received tensors, operations, and tensors it sends. Built as often as needed.

`build` makes the same graph each time, with hooks everywhere that log what they see. One copy goes through `LocalPass`,
another through one `torch.autograd.backward` over the same roots: the oracle.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from telegrad.autograd.functions import Gradients, RecvNode, attach_recv, running_in, taker
from telegrad.ids import MessageId, WorkerId
from tests.engine.alone import Alone


class Swap(torch.autograd.Function):
    """Two outputs, and zeros where one of them has no gradient."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return right * 3, left * 2

    @staticmethod
    def backward(ctx: Any, right: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        return left * 2, right * 3


class Forget(torch.autograd.Function):
    """Has no gradient for its second input, whose node is visited all the same."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, forgotten: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return kept * 5 + forgotten

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return None if gradient is None else gradient * 5, None


OPERATIONS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "add": lambda a, b: (a + b,),
    "mul": lambda a, b: (a * b,),
    "tanh": lambda a, b: (torch.tanh(a),),
    "in place": lambda a, b: ((a * 2).mul_(b),),
    "split": lambda a, b: tuple(torch.cat([a, b]).split(2)),
    "view": lambda a, b: (a.flip(0).view(1, 2).squeeze(0),),
    "swap": Swap.apply,
    "forget": lambda a, b: (Forget.apply(a, b),),
}


@dataclass
class Program:
    leaves: int
    received: list[int]  # for each message, how many tensors
    operations: list[tuple[str, int, int]]  # its inputs are numbers among all tensors so far
    sends: list[list[int]]
    heard: list[list[bool] | None]  # for each send, which tensors have a gradient
    order: list[int]
    run_after: list[bool]  # for each hear, whether it runs at once or the next one does
    doubling_hooks: bool


@dataclass
class Built:
    """A program's graph. `log` has all that its hooks saw."""

    leaves: list[Tensor] = field(default_factory=list)
    recvs: list[RecvNode] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    log: list[tuple[str, Any]] = field(default_factory=list)
    alive: list[Any] = field(default_factory=list)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Inputs and sends are drawn among the latest tensors, so that graphs grow deep and several sends share them."""

    def recent(count: int, reach: int = 5) -> int:
        return max(0, count - 1 - draw(st.integers(0, reach)))

    least = draw(st.sampled_from([0, 2]))  # left to itself, hypothesis draws mostly graphs too small to be cut
    leaves = draw(st.integers(1, 3))
    received = draw(st.lists(st.integers(1, 2), min_size=least, max_size=3))
    count = leaves + sum(received)
    operations = []
    for name in draw(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=4 * least, max_size=14)):
        operations.append((name, recent(count), recent(count)))
        count += 2 if name in {"split", "swap"} else 1
    sends = [
        [recent(count, 9) for _ in range(size)]
        for size in draw(st.lists(st.integers(1, 2), min_size=1 + least, max_size=5))
    ]
    hears = st.sampled_from([[True, True], [True, True], [True, True], [True, False], [False, True], None])
    heard = [chosen and chosen[: len(send)] for send, chosen in ((send, draw(hears)) for send in sends)]
    order = draw(st.permutations(range(len(sends))))
    run_after = [draw(st.sampled_from([True, True, False])) for _ in sends]
    return Program(leaves, received, operations, sends, heard, order, run_after, draw(st.booleans()))


@st.composite
def chains(draw: st.DrawFn) -> Program:
    """Sends that mostly lie one behind the other, with a Recv between them, heard mostly from the last: what a peer
    does that is called in a loop. Now and then one of them is elsewhere, sends two tensors, or is heard out of turn."""
    often, mostly = st.sampled_from([True, True, False]), st.sampled_from([True] * 6 + [False])
    leaves, length = draw(st.integers(1, 2)), draw(st.integers(3, 6))
    received = [draw(st.integers(1, 2)) for _ in range(length)]
    first = [leaves + sum(received[:number]) for number in range(length)]
    count = leaves + sum(received)
    end = 0
    operations: list[tuple[str, int, int]] = []
    sends = []
    for number in range(length):
        here = [end, first[number], draw(st.integers(0, leaves - 1))]
        for name in draw(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=4)):
            left = here[-1] if draw(often) else draw(st.sampled_from(here))
            operations.append((name, left, draw(st.sampled_from(here))))
            here += range(count, count + (2 if name in {"split", "swap"} else 1))
            count = here[-1] + 1
        if draw(mostly):  # lead on
            operations.append((draw(st.sampled_from(["add", "mul"])), here[-1], end))
            here.append(count)
            count += 1
        if draw(mostly):
            operations.append((draw(st.sampled_from(["add", "mul", "swap"])), here[-1], first[number]))
            here += range(count, count + (2 if operations[-1][0] == "swap" else 1))
            count = here[-1] + 1
        end = here[-1]
        sends.append([end] if draw(mostly) else [draw(st.sampled_from(here)), end])
    hears = st.sampled_from([[True, True]] * 8 + [[True, False], [False, True], None])
    heard = [chosen and chosen[: len(send)] for send, chosen in ((send, draw(hears)) for send in sends)]
    order = list(range(length))[::-1] if draw(often) else draw(st.permutations(range(length)))
    run_after = [draw(mostly) for _ in sends]
    return Program(leaves, received, operations, sends, heard, order, run_after, draw(st.booleans()))


def build(program: Program) -> Built:
    built = Built()
    for number in range(program.leaves):
        leaf = torch.tensor([0.3 + number, 0.7 - number], dtype=torch.float64, requires_grad=True)
        built.leaves.append(leaf)
        built.tensors.append(leaf)
        node = get_gradient_edge(leaf).node
        built.alive.append(node)
        log_leaf(built, f"leaf {number}", leaf, node)
    for number, count in enumerate(program.received):
        values = [torch.tensor([0.5, -0.25 * (number + i)], dtype=torch.float64) for i in range(count)]
        tensors, recv = attach_recv(values, MessageId(number), WorkerId(1))
        built.recvs.append(recv)
        built.tensors += tensors
        log_node(built, f"recv {number}", recv.node)
    for number, (name, left, right) in enumerate(program.operations):
        outputs = OPERATIONS[name](built.tensors[left], built.tensors[right])
        log_node(built, f"{name} {number}", outputs[0].grad_fn)
        for position, output in enumerate(outputs):
            output.register_hook(tensor_hook(built, f"{name} {number}.{position}", program.doubling_hooks))
        built.tensors += outputs
    return built


def tensor_hook(built: Built, name: str, doubling: bool) -> Callable[[Tensor], Tensor | None]:
    def hook(gradient: Tensor | None) -> Tensor | None:
        # A None that crossed a cut enters as zeros, which a hook on that very tensor can see: the one known difference.
        seen = gradient is not None and bool(gradient.any())
        built.log.append((f"hook on {name}", values(gradient) if seen else None))
        return gradient * 2 if doubling and seen and gradient is not None else None

    return hook


def log_leaf(built: Built, name: str, leaf: Tensor, node: Any) -> None:
    leaf.register_hook(lambda gradient: built.log.append((f"hook on {name}", values(gradient))))
    leaf.register_post_accumulate_grad_hook(lambda t: built.log.append((f"accumulated {name}", values(t.grad))))
    node.register_prehook(lambda gradients: built.log.append((f"before {name}", [values(g) for g in gradients])))
    node.register_hook(lambda _, gradients: built.log.append((f"after {name}", [values(g) for g in gradients])))


def log_node(built: Built, name: str, node: Any) -> None:
    def hook(leaving: Gradients, arrived: Gradients) -> None:
        built.log.append((f"ran {name}", ([values(g) for g in arrived], [values(g) for g in leaving])))

    node.register_hook(hook)


def values(gradient: Tensor | None) -> list[float] | None:
    """Rounded to nine digits and six decimals: one process adds in another order."""
    if gradient is None:
        return None
    return [round(float(f"{value:.9g}"), 6) + 0.0 for value in gradient.detach().flatten().tolist()]


def gradients_for(program: Program, built: Built, send: int) -> list[Tensor | None] | None:
    chosen = program.heard[send]
    if chosen is None:
        return None
    return [
        torch.full_like(built.tensors[tensor], 1 + send + position / 4) if there else None
        for position, (tensor, there) in enumerate(zip(program.sends[send], chosen, strict=True))
    ]


Outcome = tuple[list[Any], dict[int, Any], list[tuple[str, Any]]]


def in_one_call(program: Program, built: Built, retain_graph: bool = False) -> Outcome:
    """The oracle: gradients of the leaves, what left at each Recv, and the hooks' log, sorted."""
    left: dict[int, Any] = dict.fromkeys(range(len(built.recvs)))
    numbers = {recv.node: number for number, recv in enumerate(built.recvs)}

    def take(node: Any, gradients: Gradients) -> None:
        left[numbers[node]] = [values(g) for g in gradients]

    roots = [
        (get_gradient_edge(built.tensors[tensor]), gradient)
        for send, tensors in enumerate(program.sends)
        for tensor, gradient in zip(tensors, gradients_for(program, built, send) or [None] * len(tensors), strict=True)
        if gradient is not None
    ]
    if roots:
        with running_in(take):
            torch.autograd.backward([edge for edge, _ in roots], [g for _, g in roots], retain_graph=retain_graph)
    grads = [values(leaf.grad) for leaf in built.leaves]
    for leaf in built.leaves:
        leaf.grad = None
    return grads, {number: nothing_is_none(gradients) for number, gradients in left.items()}, sorted_log(built)


def in_local_pass(program: Program, built: Built, retain_graph: bool = False, waits: bool = False) -> Outcome:
    """The same through `LocalPass`, heard in the program's order; the first perhaps with the start. If it `waits`, what
    is next is heard while an engine call waits for it, unless the program does not run after it: then it waits in
    vain."""
    left: dict[int, Any] = {}

    def deliver(key: int, gradients: Gradients | None) -> None:
        assert key not in left, "each Recv is told once"
        left[key] = None if gradients is None else [values(g) for g in gradients]

    edges = {
        send: [get_gradient_edge(built.tensors[tensor]) for tensor in tensors]
        for send, tensors in enumerate(program.sends)
    }
    order = list(zip(program.order, program.run_after, strict=True))

    def hear_next(pass_: Alone[int]) -> bool:
        if not order or not order[0][1]:
            return False
        send, _ = order.pop(0)
        pass_.hear(send, gradients_for(program, built, send))
        return True

    pass_: Alone[int] = Alone(edges, dict(enumerate(built.recvs)), retain_graph=retain_graph, deliver=deliver)
    if waits:
        pass_.while_waiting(hear_next)
    if order and order[0][1]:  # as a pass does that begins with gradients
        first, _ = order.pop(0)
        pass_.walk((first, gradients_for(program, built, first)))
    else:
        pass_.walk()
    while order:
        send, run = order.pop(0)
        pass_.hear(send, gradients_for(program, built, send))
        if run:
            pass_.run()
    pass_.run()
    assert pass_.done
    assert pass_.unheard == ()
    assert all(leaf.grad is None for leaf in built.leaves)
    assert taker() is None
    grads = [values(pass_.gradients.get(leaf)) for leaf in built.leaves]
    return grads, dict(sorted(left.items())), sorted_log(built)


def nothing_is_none(gradients: list[Any] | None) -> list[Any] | None:
    return gradients if gradients is not None and any(g is not None for g in gradients) else None


def sorted_log(built: Built) -> list[tuple[str, Any]]:
    log = sorted(built.log, key=repr)
    built.log.clear()
    return log
