"""The local half of a pass without other workers: what its Recvs are told goes to a function."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from torch.autograd.graph import GradientEdge

from telegrad.autograd.functions import Gradients, RecvNode
from telegrad.engine.local.local_pass import LocalPass
from telegrad.engine.passes import Roots

K = TypeVar("K", bound=Hashable)


class Alone(LocalPass[K]):
    """Sends and Recvs have keys of the test's own, and `deliver(key, gradients)` hears of the latter."""

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

    def walk(self) -> None:
        """Start with the Sends and Recvs given, and keep none of them."""
        sends, self.sends = self.sends, {}
        recvs, self.recvs = self.recvs, {}
        by_node = {recv.node: recv for recv in recvs.values()}
        self.start({key: Roots(tuple(edges), []) for key, edges in sends.items()}, by_node)
