"""A worker's part in a pass beyond the first order, and the root's."""

import contextlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import Node

from telegrad.autograd.context import Context
from telegrad.autograd.functions import Gradients, RecvNode, Taker
from telegrad.autograd.walking import Walked
from telegrad.engine.higher.graph import RecordedGraph
from telegrad.engine.local.graph import Entered, Graph
from telegrad.engine.local.local_pass import Sends, Taken
from telegrad.engine.local.regions import Apart, Plan
from telegrad.engine.passes import Heard, Pass, Roots
from telegrad.engine.root_pass import RootPass
from telegrad.ids import MessageId, PassId, WorkerId
from telegrad.rpc.client.pending import Slot
from telegrad.wire.messages import PassDoneWithInputs

if TYPE_CHECKING:
    from telegrad.engine.higher.service import RecordingService


class Recorded(Pass):
    """What differs from a plain pass."""

    service: "RecordingService"
    create_graph = False
    inputs: Mapping[WorkerId, int] | None = None  # of `grad`: of how many tensors each worker has to find the gradient
    _higher: RecordedGraph | None = None
    _recv_nodes: Collection[Node] = ()

    def of_kind(self, create_graph: bool, inputs: Mapping[WorkerId, int] | None) -> None:
        """What kind of pass this is; before it begins."""
        self.create_graph = create_graph
        self.inputs = inputs
        self.captured: dict[int, Tensor] = {}
        # Messages of this very pass, which are no part of it: those that brought gradients with a graph.
        self.own_messages: set[MessageId] = set()

    @property
    def has_inputs(self) -> int:
        """How many tensors of this worker the gradients are asked of."""
        return 0 if self.inputs is None else self.inputs.get(self.service.here, 0)

    def begin(self, heard: Heard | None = None, roots: Roots | None = None) -> None:
        """Start, unless the root has yet to say of which tensors: then its last word on that does."""
        if self.service.may_begin(self):
            super().begin(heard, roots)

    def start(self, sends: Sends[MessageId], recvs: dict[Node, RecvNode]) -> None:
        """Walk the graph. What came in this very pass is no part of it."""
        recvs = {node: recv for node, recv in recvs.items() if recv.message_id not in self.own_messages}
        self._recv_nodes = {*recvs}
        super().start(sends, recvs)

    def start_heard(
        self,
        key: MessageId,
        gradients: list[Tensor | None] | None,
        sends: dict[MessageId, Entered],
        recvs: dict[Node, RecvNode],
        walked: Walked | None = None,
    ) -> None:
        """The same, when a first Send has been heard."""
        self.hear(key, gradients)
        self.start(sends, recvs)

    def _make_graph(self, sends: Mapping[MessageId, Entered], taker: Taker, retain_graph: bool) -> Graph:
        wanted = None if self.inputs is None else self.service.wanted(self)
        self._higher = RecordedGraph(
            sends, taker, retain_graph, create_graph=self.create_graph, inputs=wanted, recvs=self._recv_nodes
        )
        return self._higher

    def _make_plan(self, graph: Graph) -> Apart[MessageId, Node] | Plan[MessageId, Node]:
        if graph.parts is not None or self.inputs is None:
            return super()._make_plan(graph)
        inside = {key: [e.node for e in send.edges if e.node in graph.edges] for key, send in graph.inner.items()}
        plan = Plan(graph.edges, inside, self._untold)
        for key in graph.inner:
            if key not in self._unheard:
                plan.heard(key)
        return plan

    def _run(self, graph: Graph, taken: Taken | None) -> None:
        with torch.enable_grad() if self.create_graph else contextlib.nullcontext():  # sums are recorded, too
            super()._run(graph, taken)

    def _is_nearly_done(self, gradients: Gradients | None) -> bool:
        return False  # each message with gradients is recorded by itself, so none goes with the answer

    def _release(self) -> None:
        if self._higher is not None:
            self.captured = self._higher.captured
            self._higher.close()
            self._higher = None
        super()._release()

    def _end(self) -> None:
        if self.inputs is not None:
            self.service.settle(self)
        super()._end()


class RecordedPass(Recorded):
    """A participant's part."""


class RecordedRootPass(Recorded, RootPass):
    """The root's part."""

    def __init__(
        self, service: "RecordingService", context: Context, pass_id: PassId, retain_graph: bool, timeout: float
    ) -> None:
        super().__init__(service, context, pass_id, retain_graph, timeout)
        self.found: set[int] = set()  # the inputs elsewhere that have a gradient, by their position

    def _look_at_leaves(self) -> None:
        """Such a pass gives leaves nothing, or gradients that have a graph."""

    def _take_answer(self, slot: Slot) -> None:
        frame = slot.frame
        if frame is not None and type(frame.message) is PassDoneWithInputs:
            self.found.update(frame.message.found)
            frame.message = frame.message.done
        super()._take_answer(slot)
