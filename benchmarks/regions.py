"""What a worker's pass costs beside torch's own backward over the same graph, on one worker and without calls.

    python -m benchmarks.regions

- `one send, 3 nodes`: what each pass pays at least; beside a bare `torch.autograd.grad`.
- `independent`: 50 Sends, each over a graph of its own down to shared leaves, heard one after the other.
- `nested`: 50 Sends along one chain, heard from its end; each region leads to the next and waits for it.
- `nested, with Recvs`: the same, with a Recv in each region, so each runs at once. A peer, here another thread, is
  told by the Recv and answers with the gradient of the next Send, for which the engine call waits.
- `the same, peer is late`: its answer always comes later than that, so each region is cut off from the next.
"""

import gc
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from telegrad.autograd.functions import RecvNode, attach_recv, running_in
from telegrad.engine.local.local_pass import LocalPass
from telegrad.engine.passes import Roots
from telegrad.ids import MessageId, WorkerId

NODES, SENDS = 10_000, 50
Graph = tuple[list[Tensor], list[RecvNode], list[Tensor]]  # what is sent, the Recvs, the leaves


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'graph':24}{'torch':>12}{'telegrad':>12}{'more':>9}")
    torch_us, our_us = small_pass()
    print(f"{'one send, 3 nodes':24}{torch_us:9.1f} us{our_us:9.1f} us{our_us - torch_us:6.1f} us")
    with_recvs = partial(nested, with_recvs=True)
    cases: dict[str, tuple[Callable[[], Graph], Callable[[Graph], None]]] = {
        "independent": (independent, in_local_pass),
        "nested": (nested, in_local_pass),
        "nested, with Recvs": (with_recvs, with_peer),
        "the same, peer is late": (with_recvs, in_local_pass),
    }
    for name, (make, run) in cases.items():
        torch_ms = median_ms(make, in_torch)
        our_ms = median_ms(make, run)
        print(f"{name:24}{torch_ms:9.1f} ms{our_ms:9.1f} ms{our_ms / torch_ms - 1:8.0%}")


def small_pass(repeats: int = 5000) -> tuple[float, float]:
    leaves = [torch.ones(2, 2, requires_grad=True) for _ in range(2)]
    root = get_gradient_edge((leaves[0] * leaves[1]).exp().sum())
    inputs = [get_gradient_edge(leaf) for leaf in leaves]
    one = torch.ones(())

    def ours() -> None:
        pass_ = LocalHalf(retain_graph=True)
        pass_.start({0: Roots((root,), [])}, {})
        pass_.hear(0, [one])
        pass_.run()

    def theirs() -> None:
        torch.autograd.grad([root], inputs, [one], retain_graph=True)

    def microseconds(call: Callable[[], None]) -> float:
        rounds = []
        for _ in range(7):
            begin = time.perf_counter()
            for _ in range(repeats // 7):
                call()
            rounds.append((time.perf_counter() - begin) / (repeats // 7))
        return statistics.median(rounds) * 1e6

    return microseconds(theirs), microseconds(ours)


def independent() -> Graph:
    leaves = [torch.ones(8, requires_grad=True) for _ in range(4)]
    return [chain(leaves[0] * 1, leaves, NODES // SENDS) for _ in range(SENDS)], [], leaves


def nested(with_recvs: bool = False) -> Graph:
    leaves = [torch.ones(8, requires_grad=True) for _ in range(4)]
    sent, recvs = [], []
    tensor = leaves[0] * 1
    for number in range(SENDS):
        tensor = chain(tensor, leaves, NODES // SENDS)
        if with_recvs:
            (received,), recv = attach_recv([torch.ones(8)], MessageId(number), WorkerId(1))
            recvs.append(recv)
            tensor = tensor * received
        sent.append(tensor)
    return sent[::-1], recvs, leaves


def chain(tensor: Tensor, leaves: Sequence[Tensor], length: int) -> Tensor:
    for step in range(length):
        tensor = tensor * leaves[step % len(leaves)] if step % 4 == 0 else torch.tanh(tensor)
    return tensor


def in_torch(graph: Graph) -> None:
    sent, _, _ = graph
    with running_in(no_gradient):
        torch.autograd.backward(sent, [torch.ones(8) for _ in sent])


def in_local_pass(graph: Graph) -> None:
    sent, recvs, _ = graph
    edges = {number: Roots((get_gradient_edge(tensor),), []) for number, tensor in enumerate(sent)}
    pass_ = LocalHalf(retain_graph=False)
    pass_.start(edges, {recv.node: recv for recv in recvs})
    for number in edges:
        pass_.hear(number, [torch.ones(8)])
        pass_.run()
    assert pass_.done


def with_peer(graph: Graph) -> None:
    """As `in_local_pass`, but each Send is heard when the Recv in front of it has told a peer."""
    sent, recvs, _ = graph
    told: SimpleQueue[object] = SimpleQueue()

    class ToPeer(LocalPass[int]):
        def deliver(self, recv: RecvNode, gradients: object) -> None:
            told.put(recv)

    pass_ = ToPeer(retain_graph=False)

    def answer() -> None:
        for number in range(1, len(sent)):
            told.get()
            pass_.hear(number, [torch.ones(8)])
            pass_.run()

    peer = threading.Thread(target=answer)
    peer.start()
    pass_.start(
        {number: Roots((get_gradient_edge(tensor),), []) for number, tensor in enumerate(sent)},
        {recv.node: recv for recv in recvs},
    )
    pass_.hear(0, [torch.ones(8)])
    pass_.run()
    peer.join()
    assert pass_.done


class LocalHalf(LocalPass[int]):
    """A pass whose Recvs tell nobody."""

    def deliver(self, recv: RecvNode, gradients: object) -> None:
        """Where a gradient would leave."""


def no_gradient(node: object, gradients: object) -> None:
    """Where a gradient would leave."""


def median_ms(make: Callable[[], Graph], run: Callable[[Graph], None], rounds: int = 9) -> float:
    times = []
    for _ in range(rounds):
        graph = make()
        gc.collect()
        begin = time.perf_counter()
        run(graph)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    main()
