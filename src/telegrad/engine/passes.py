"""One worker's part of one distributed backward pass: when it begins, what it hears, and when it is done.

`LocalPass` runs the graph; this ties it to other workers. A pass begins here with the first message about it, once no
call of its context is under way. Each Recv then tells its peer's Send exactly once, gradients or none; each Send here
hears exactly once. The root is answered when all that has happened, or with the error that ended it.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from telegrad.autograd.context import Context
from telegrad.autograd.functions import Gradients, SendNode
from telegrad.engine.local_pass import LocalPass
from telegrad.errors import AutogradError, WorkerDied
from telegrad.ids import MessageId, PassId, WorkerId

if TYPE_CHECKING:
    from telegrad.engine.roll import Roll
    from telegrad.engine.service import Service

log = logging.getLogger("telegrad.engine")

ROOT = MessageId(-1)  # the roots of `backward` are heard like a Send


class Pass:
    """A backward pass as one worker sees it. Messages may come from any thread and in any order."""

    def __init__(
        self,
        service: "Service",
        context: Context,
        pass_id: PassId,
        root: WorkerId,
        retain_graph: bool,
        known: Iterable[WorkerId],
    ) -> None:
        self.service = service
        self.context = context
        self.pass_id = pass_id
        self.root = root
        self.retain_graph = retain_graph
        self.known: set[WorkerId] = set(known)  # workers that have been told of this pass, as far as we know
        self.roll: Roll | None = None  # on the root: who was asked, and who is done
        self.error: BaseException | None = None
        self.finished = False
        self._lock = threading.Lock()
        self._local: LocalPass[MessageId] | None = None
        self._sends: dict[MessageId, SendNode] = {}
        self._early: list[tuple[MessageId, Gradients | None]] = []  # heard before the pass could start
        self._on_end: list[Callable[[Pass], None]] = []

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.finished else "running"
        return f"<Pass {self.pass_id} of context {self.context.context_id}: {state}, waiting for {self.waiting_for()}>"

    def waiting_for(self) -> list[str]:
        """The Sends that have not been heard, by the worker they wait for."""
        local = self._local
        if self.finished:
            return []
        if local is None:
            return ["calls still under way in this context"]
        name = self.service.name_of
        return [
            f"worker {name(self._sends[key].peer)!r} (message {key})" for key in local.waiting_for if key in self._sends
        ]

    # --- beginning ---

    def begin(self, roots: list[tuple[Any, Tensor]] | None = None) -> None:
        """Start as soon as no call of the context is under way. `roots` are edges and gradients, on the root only."""

        def start() -> None:
            self.service.guard(self, lambda: self._start(roots))

        if self.context.when_quiet(start):
            start()

    def _start(self, roots: list[tuple[Any, Tensor]] | None) -> None:
        context = self.context
        sends, recvs, orphans = context.snapshot()
        self._sends = sends
        self.service.spread(self, {recv.peer for recv in recvs.values()} | set(orphans.values()))
        edges: dict[MessageId, Any] = {key: send.edges for key, send in sends.items()}
        if roots is not None:
            edges[ROOT] = [edge for edge, _ in roots]
        local: LocalPass[MessageId] = LocalPass(
            edges,
            recvs,
            retain_graph=self.retain_graph,
            deliver=lambda key, gradients: self.service.tell(self, recvs[key].peer, key, gradients),
        )
        if roots is not None:
            local.hear(ROOT, [gradient for _, gradient in roots])
        local.start()
        for message_id, peer in orphans.items():
            self.service.tell(self, peer, message_id, None)
        with self._lock:
            early, self._early = self._early, []
            self._local = local
        for key, gradients in early:
            self._hear(local, key, gradients)
        self._run(local)

    # --- hearing ---

    def hear(self, key: MessageId, gradients: Gradients | None) -> None:
        """A Send of this worker has its gradients, or none will come. Raises for gradients that do not fit it."""
        send = self.context.sends.get(key)
        if send is None:
            raise AutogradError(
                f"gradients came for message {key} of context {self.context.context_id}, which this worker never sent"
            )
        if gradients is not None:
            send.check(gradients)
        with self._lock:
            local = self._local
            if local is None:
                self._early.append((key, gradients))
                return
        self._hear(local, key, gradients)
        self.service.guard(self, lambda: self._run(local))

    def _hear(self, local: LocalPass[MessageId], key: MessageId, gradients: Gradients | None) -> None:
        if key not in self._sends:
            raise AutogradError(f"message {key} was sent after the pass had begun; its gradients were not used")
        local.hear(key, gradients)

    def _run(self, local: LocalPass[MessageId]) -> None:
        local.run()
        if local.done:
            with self._lock:
                if self.finished:
                    return
                self.finished = True
            self.context.accumulate(local.gradients)
            self._end()

    # --- ending ---

    def fail(self, error: BaseException) -> None:
        """Give up. The first error counts."""
        with self._lock:
            if self.finished:
                return
            self.finished = True
            self.error = error
            local = self._local
        if isinstance(error, WorkerDied):
            self.context.failure = str(error)
        if local is not None:
            local.abort()
        self._end()

    def when_ended(self, action: "Callable[[Pass], None]") -> None:
        """Call `action` when this worker's part is over; now, if it is."""
        with self._lock:
            if not self._is_over():
                self._on_end.append(action)
                return
        action(self)

    def _is_over(self) -> bool:
        return self.finished and self._local is None

    def _end(self) -> None:
        with self._lock:
            actions, self._on_end = self._on_end, []
            self._local = None  # with it every node and tensor of the pass
            self._sends = {}
        for action in actions:
            action(self)
