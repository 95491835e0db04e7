"""The local half of a pass without other workers: what its Recvs are told goes to a function."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd.graph import GradientEdge

from telegrad.autograd.functions import Gradients, RecvNode
from telegrad.engine.local.graph import Entered
from telegrad.engine.local.local_pass import LocalPass
from telegrad.engine.passes import Roots
from telegrad.rpc.threads.wakeup import Wakeup

K = TypeVar("K", bound=Hashable)


class Alone(LocalPass[K]):
    """Sends and Recvs have keys of the test's own, and `deliver(key, gradients)` hears of the latter."""

    waits = 0  # inside an engine call, for what follows
    _hear_more: Callable[["Alone[K]"], bool] | None = None

    def __init__(
        self,
        sends: Mapping[K, Sequence[GradientEdge]],
        recvs: Mapping[Any, RecvNode],
        *,
        retain_graph: bool,
        deliver: Callable[[Any, Gradients | None], object],
    ) -> None:
        super().__init__(retain_graph)
        self.sends = sends
        self._of_test = deliver
        self.recvs = recvs
        self._keys = {id(recv): key for key, recv in recvs.items()}

    def deliver(self, recv: RecvNode, gradients: Gradients | None) -> None:
        self._of_test(self._keys[id(recv)], gradients)

    def while_waiting(self, more: Callable[["Alone[K]"], bool]) -> None:
        """Let an engine call wait before each stage that may follow, as long as `more` has something heard."""
        self._hear_more = more
        self.stages_from = 0
        self.patience = 60.0

    def wait_for_more(self, more: Wakeup, seconds: float) -> bool:
        self.waits += 1
        return super().wait_for_more(more, seconds) if self._hear_more is None else self._hear_more(self)

    def walk(self, heard: tuple[K, list[Tensor | None]] | None = None) -> None:
        """Start with the Sends and Recvs given, and keep none of them."""
        given, self.sends = self.sends, {}
        recvs, self.recvs = self.recvs, {}
        sends: dict[K, Entered] = {key: Roots(edges, [], _at_leaves(edges)) for key, edges in given.items()}
        by_node = {recv.node: recv for recv in recvs.values()}
        if heard is None:
            self.start(sends, by_node)
        else:
            self.start_heard(*heard, sends, by_node)


def _at_leaves(edges: Sequence[GradientEdge]) -> bool:
    return not any(edge.node.next_functions for edge in edges)
