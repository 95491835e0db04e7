"""One worker's part of one distributed backward pass: when it begins, what it hears, and when it is done.

`LocalPass` runs the graph; this ties it to other workers. A pass begins here with the first message about it; what
arrives later is no part of it. Each Recv tells its peer's Send exactly once, gradients or none; each Send here
hears exactly once. The root is answered when all that has happened, or with the error that ended it.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from telegrad.autograd.context import Context
from telegrad.autograd.functions import Gradients, SendNode
from telegrad.cuda import order
from telegrad.engine.local_pass import LocalPass
from telegrad.errors import AutogradError, WorkerDied
from telegrad.ids import MessageId, PassId, WorkerId

if TYPE_CHECKING:
    from telegrad.engine.roll import Roll
    from telegrad.engine.service import Service

log = logging.getLogger("telegrad.engine")

_FEW_NODES = 64  # a graph so small is done before a message about it could be sent
_FEW_BYTES = 32 * 1024

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
        roll: "Roll | None",
    ) -> None:
        self.service = service
        self.context = context
        self.pass_id = pass_id
        self.root = root
        self.retain_graph = retain_graph
        self.known: set[WorkerId] = set(known)  # workers that have been told of this pass, as far as we know
        self.to_invite: set[WorkerId] = set()  # among those, the ones that this worker has yet to tell
        self.roll = roll  # on the root: who was asked, and who is done
        self.error: BaseException | None = None
        self.finished = False
        if roll is not None:
            roll.open(self)
        self._lock = threading.Lock()
        self._local: LocalPass[MessageId] | None = None
        self._sends: dict[MessageId, SendNode] = {}
        self._early: list[tuple[MessageId, Gradients | None]] = []  # heard before the pass could start
        self._on_end: list[Callable[[Pass], None]] = []
        self._for_root: list[tuple[MessageId, Gradients | None]] = []  # to go with the answer, if that comes soon
        # With CUDA tensors: the streams of this pass, whichever threads run its parts.
        self.lane: order.Lane | None = order.take() if order.active else None

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.finished else "running"
        return f"<Pass {self.pass_id} of context {self.context.context_id}: {state}, waiting for {self.waiting_for()}>"

    def waiting_for(self) -> list[str]:
        """The Sends that have not been heard, by the worker they wait for."""
        if not self.finished and self._local is None:
            return ["its own start"]
        return [f"worker {self.service.name_of(peer)!r} (message {key})" for key, peer in self.unheard()]

    def unheard(self) -> list[tuple[MessageId, WorkerId]]:
        """The Sends that have not been heard, and the worker each waits for."""
        local, sends = self._local, self._sends
        if self.finished or local is None:
            return []
        return [(key, sends[key].peer) for key in local.waiting_for if key in sends]

    # --- beginning ---

    def begin(self, roots: list[tuple[Any, Tensor]] | None = None) -> None:
        """Start. `roots` are edges and gradients, on the root only."""
        try:
            if self.lane is None:
                self._start(roots)
            else:
                order.hand_over([gradient for _, gradient in roots or ()], self.lane)
                with order.on(self.lane):
                    self._start(roots)
        except Exception as error:
            self.fail(error)

    def _start(self, roots: list[tuple[Any, Tensor]] | None) -> None:
        if self.finished:
            return  # given up before it could start
        context = self.context
        sends, recvs, orphans, alone = context.snapshot(self.pass_id, self._late)
        self._sends = sends
        self.service.spread(self, {recv.peer for recv in recvs.values()} | set(orphans.values()))
        edges: dict[MessageId, Any] = {key: send.edges for key, send in sends.items()}
        if roots is not None:
            edges[ROOT] = [edge for edge, _ in roots]
        local: LocalPass[MessageId] = LocalPass(
            edges,
            recvs,
            retain_graph=self.retain_graph,
            deliver=lambda key, gradients: self._deliver(recvs[key].peer, key, gradients),
            lane=self.lane,
        )
        if roots is not None:
            local.hear(ROOT, [gradient for _, gradient in roots])
        for key in alone & sends.keys():
            local.hear(key, None)
        local.start()
        for message_id, peer in orphans.items():
            self._deliver(peer, message_id, None)
        with self._lock:
            given_up = self.finished
            if not given_up:
                early, self._early = self._early, []
                self._local = local  # from here on what is heard goes there
        if given_up:  # meanwhile, by another thread
            local.abort()
            return
        for key, gradients in early:
            self._hear(local, key, gradients)
        self._run(local)
        self.service.invite_rest(self)

    def _deliver(self, peer: WorkerId, key: MessageId, gradients: Gradients | None) -> None:
        """A Recv has its gradients. They leave at once, unless they can go with the answer to the root very soon."""
        if peer == self.root and self.roll is None and self._is_nearly_done(gradients):
            if self.lane is not None:
                order.hand_over(gradients or (), self.lane)
            self._for_root.append((key, gradients))
        else:
            self.service.tell(self, peer, key, gradients)

    def _is_nearly_done(self, gradients: Gradients | None) -> bool:
        local = self._local
        if local is None or local.size > _FEW_NODES:
            return False
        # Not by `nbytes`, which a sparse gradient does not have.
        return local.all_told or sum(g.numel() * g.itemsize for g in gradients or () if g is not None) <= _FEW_BYTES

    def take_for_root(self) -> list[tuple[MessageId, Gradients | None]]:
        """What the answer to the root should carry."""
        with self._lock:
            taken, self._for_root = self._for_root, []
        return taken

    def _late(self, message_id: MessageId, sender: WorkerId) -> None:
        """A message came that is no part of this pass. Even if this worker is done, its sender may wait for it."""
        if self.error is None:
            try:
                self.service.tell_too_late(self, sender, message_id)
            except Exception as error:
                self.fail(error)

    # --- hearing ---

    def hear(self, key: MessageId, gradients: Gradients | None) -> None:
        """A Send of this worker has its gradients, which fit it (`Service.check`), or none will come."""
        if self.lane is not None:
            order.hand_over(gradients or (), self.lane)
        with self._lock:
            if self.finished:
                return
            local = self._local
            if local is None:
                self._early.append((key, gradients))
                return
        self._hear(local, key, gradients)
        try:
            if self.lane is None:
                self._run(local)
            else:
                with order.on(self.lane):
                    self._run(local)
        except Exception as error:
            self.fail(error)

    def _hear(self, local: LocalPass[MessageId], key: MessageId, gradients: Gradients | None) -> None:
        if key in self._sends:
            if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
                with torch.autograd.profiler.record_function(self.context.sends[key].name()):
                    local.hear(key, gradients)
            else:
                local.hear(key, gradients)
            if isinstance(gradients, list):
                gradients.clear()  # from here on the pass alone holds them, so that a leaf can keep one without a copy
        elif gradients is not None:
            raise AutogradError(f"message {key} was sent after the pass had begun; its gradients were not used")

    def _run(self, local: LocalPass[MessageId]) -> None:
        local.run()
        if local.done:
            with self._lock:
                if self.finished:
                    return
                self.finished = True
                answers = bool(self._on_end)
            self.context.accumulate(local.gradients)
            if not answers:
                self._send_for_root()
            self._end()
        else:
            self._send_for_root()  # there is more to wait for: let the root go on meanwhile

    def _send_for_root(self) -> None:
        for key, gradients in self.take_for_root():
            self.service.tell(self, self.root, key, gradients)

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
            self.context.failure = error.again()
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
            self._early = []
            if self.error is not None:
                self._for_root = []
        if self.lane is None:
            for action in actions:
                action(self)
            return
        order.end(self.lane)
        try:
            for action in actions:
                action(self)
        finally:
            order.give_back(self.lane)
