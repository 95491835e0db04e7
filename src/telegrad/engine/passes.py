"""One worker's part in a distributed backward pass: when it begins, whom it tells, and when it is over.

    begin        the nodes of the context at this moment; what arrives later is no part of the pass
    hear, run    the local half (`local/local_pass.py`)
    deliver      a Recv tells the Send of its peer, exactly once: gradients, or that none will come
    end          all Sends are heard and all has run: the root is answered; or the first error, which it gets instead

On the worker that called `backward` the part is a `RootPass`, which waits for the others (`root_pass.py`).
"""

import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd.context import Context, Snapshot
from telegrad.autograd.functions import Gradients, RecvNode, SendNode
from telegrad.engine.local.local_pass import LocalPass
from telegrad.errors import AutogradError, WorkerDied
from telegrad.ids import MessageId, PassId, WorkerId
from telegrad.rpc.client.link import Link
from telegrad.rpc.client.pending import Slot
from telegrad.rpc.request import Request
from telegrad.rpc.threads.wakeup import Wakeup
from telegrad.rpc.threads.yield_turn import blocking
from telegrad.wire.codec import Packed
from telegrad.wire.messages import AnyMessage

if TYPE_CHECKING:
    from telegrad.engine.service import PassService

Heard = tuple[MessageId, list[Tensor | None] | None]  # a Send and what it heard
_peer = attrgetter("peer")
_FEW_NODES = 64  # a graph so small is done before a message about it could be sent
_FEW_BYTES = 32 * 1024
MOST_NAMED = 32  # workers in a message about a pass, or about the end of a context

Carried = tuple[MessageId, Gradients | None]  # gradients for a Send of the root

ROOT = MessageId(-1)  # the roots of `backward` are heard like a Send


class Roots(msgspec.Struct, eq=False):
    """The roots of `backward`, and the gradients to start from."""

    edges: Sequence[GradientEdge]
    gradients: list[Tensor | None]  # none is None
    at_leaves: bool = False  # not worth asking


class Pass(LocalPass[MessageId]):
    """A backward pass as one worker sees it. Messages may come from any thread and in any order."""

    error: BaseException | None = None
    finished = False  # done or given up
    to_invite: set[WorkerId] = set()  # noqa: RUF012 - replaced: of `known`, those this worker has yet to tell
    _ended = False  # whether the root has been answered
    _named: tuple[WorkerId, ...] = ()  # what `named` returns, until more workers
    _known_then = 0  # than so many are known

    def __init__(
        self,
        service: "PassService",
        context: Context,
        pass_id: PassId,
        root: WorkerId,
        retain_graph: bool,
        known: Iterable[WorkerId] = (),
        to_answer: tuple[Request, ...] = (),
    ) -> None:
        self.service = service
        self.context = context
        self.pass_id = pass_id
        self.root = root
        self.retain_graph = retain_graph
        self.known = {service.here, root, *known}  # workers that have been told of this pass, as far as we know
        self._lock = threading.Lock()
        self._to_answer = to_answer  # requests of the root, whose reply says that this part is over
        self._for_root: list[Carried] = []  # gradients that go with that reply

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.finished else "running"
        return f"<Pass {self.pass_id} of context {self.context.context_id}: {state}, waiting for {self.waiting_for()}>"

    def waiting_for(self) -> list[str]:
        """The Sends that have not been heard, by the worker they wait for, in words."""
        if not self.finished and self._graph is None:
            return ["its own start"]
        return [f"worker {self.service.name_of(peer)!r} (message {key})" for key, peer in self.waits()]

    def waits(self) -> list[tuple[MessageId, WorkerId]]:
        """The Sends that have not been heard, and the worker each waits for."""
        with self._lock:
            unheard = [] if self.finished else list(self._unheard.items())
        return [(key, send.peer) for key, send in unheard if isinstance(send, SendNode)]

    def progress(self) -> tuple[Hashable, ...]:
        """All that decides what this part does next, as one value: by it a test that goes through every order of events
        knows where it has been before."""
        early, for_root = [key for key, _ in self._early], [key for key, _ in self._for_root]
        told = frozenset(self.known), frozenset(self.to_invite)
        waits = tuple(self.waits())
        return self.pass_id, self.finished, waits, tuple(early), tuple(for_root), *told, len(self._to_answer)

    # --- beginning ---

    def begin(self, heard: Heard | None = None, roots: Roots | None = None) -> None:
        """Start, with what the first word of the pass brought for a Send of this worker; on the root, from what
        `backward` was given."""
        try:
            if self.finished:
                return  # given up before it could start
            context = self.context
            found = context.snapshot(self.pass_id, self._late)
            sends: dict[MessageId, Any] = found.sends
            newcomers = context.participants - self.known
            if newcomers:  # nobody else is known to tell them
                self.known |= newcomers
                self.to_invite = newcomers
                if not newcomers <= {*map(_peer, found.recvs.values())}:
                    self._invite_unheard(found)
            if found.orphans or found.alone:
                self._settle(found)
            if roots is not None:
                sends[ROOT] = roots
                heard = ROOT, roots.gradients
            if context.profile is not None:
                context.profile.run(partial(self._start, heard, sends, found.recvs))
            elif heard is not None:
                walked = None if context.ahead is None else context.walked_from(heard[0])
                self.start_heard(*heard, sends, found.recvs, walked)
            else:
                self.start(sends, found.recvs)
            if self.to_invite:
                self._invite_rest()
        except Exception as error:
            self.fail(error)

    def _start(self, heard: Heard | None, sends: dict[MessageId, Any], recvs: dict[Node, RecvNode]) -> None:
        if heard is None:
            self.start(sends, recvs)
        else:
            self.start_heard(*heard, sends, recvs)

    def _settle(self, found: Snapshot) -> None:
        """Messages whose other half will never be part of the pass: on either side, no gradient comes."""
        for key in found.alone:
            self.hear(key, None)
        for message_id, peer in found.orphans.items():
            self.service.tell(self, peer, message_id, None)

    def _invite_unheard(self, found: Snapshot) -> None:
        """Bring in the participants that will get no message of a Recv, either."""
        will_hear = {*map(_peer, found.recvs.values()), *found.orphans.values()}
        for worker in self.to_invite - will_hear:
            self.to_invite.discard(worker)
            self.service.invite(self, worker)

    def _invite_rest(self) -> None:
        """What could run has run. A Recv that waits may wait for the very worker it would tell of the pass."""
        while self.to_invite and not self.finished:
            self.service.invite(self, self.to_invite.pop())

    def _late(self, message_id: MessageId, sender: WorkerId) -> None:
        """A message came that is no part of this pass. Even if this worker is done, its sender may wait for it."""
        if self.error is None:
            try:
                self.service.tell_too_late(self, sender, message_id)
            except Exception as error:
                self.fail(error)

    # --- hearing and telling ---

    def wait_for_more(self, more: Wakeup, seconds: float) -> bool:
        """Sleep until more is heard, inside an engine call: another thread serves this one's link meanwhile."""
        if self.to_invite:  # what is awaited may wait for these
            self._invite_rest()
        with blocking():
            more.wait(seconds)
        return True

    def hear_and_run(self, key: MessageId, gradients: Gradients | None) -> None:
        """A Send of this worker has its gradients, which fit it (`PassService.check`), or none will come: `hear` and
        `run` in one."""
        with self._lock:
            graph = self._graph
            if graph is None:
                if not self.over and not self.done:
                    self._early += ((key, gradients),)
                return
            self._enter(key, gradients)
            # Usually there is more to hear, and nothing above the leaves is left to run meanwhile.
            taken = None if self._running or (self._inner_taken and self._unheard) else self._take(graph)
        if taken is not None:
            try:
                if self.context.profile is None:
                    self._run(graph, taken)
                else:
                    self.context.profile.run(partial(self._run, graph, taken))
            except Exception as error:
                self.fail(error)

    def _refuse(self, key: MessageId, gradients: Gradients | None) -> None:
        if gradients is not None:  # else it may be a notice that it came too late for this pass, which is known here
            raise AutogradError(
                f"message {key} was sent after the pass had begun, or was heard before; its gradients were not used"
            )

    def _unexpected(self, node: Any) -> AutogradError:
        if self._graph is None or node not in self._graph.edges or node in self.context.recvs:
            return LocalPass._unexpected(self, node)
        others = [other.context_id for other in self.service.registry.contexts() if node in other.recvs]
        where = f"context {others[0]}" if others else "a context that has ended"
        return AutogradError(
            f"the backward pass of context {self.context.context_id} came to tensors that were received from worker "
            f"{self.service.name_of(node.peer)!r} in {where}: a pass stays within its context. Detach what one step "
            "hands on to the next (`h = h.detach()`), or open one context around both"
        )

    def _all_has_run(self, gradients: Mapping[Tensor, Tensor]) -> None:
        if gradients and not self.over:
            self.context.accumulate(gradients)
        with self._lock:
            self._running = False
            self._release()
            if self.over:
                return
            self.done = self.finished = self._ended = True
        self._end()

    def deliver(self, recv: RecvNode, gradients: Gradients | None) -> None:
        """A Recv has its gradients. They leave at once, unless they can go with the answer to the root very soon."""
        if recv.peer == self.root and self._is_nearly_done(gradients):
            self._for_root.append((recv.message_id, gradients))
        else:
            self.service.tell(self, recv.peer, recv.message_id, gradients)

    def _is_nearly_done(self, gradients: Gradients | None) -> bool:
        graph = self._graph
        if graph is None or self._unheard or len(graph.edges) > _FEW_NODES:
            return False
        # Not by `nbytes`, which a sparse gradient does not have.
        return not self._untold or sum(g.numel() * g.itemsize for g in gradients or () if g is not None) <= _FEW_BYTES

    def ask(self, link: Link, message: AnyMessage, packed: Packed) -> None:
        """Send a request of this pass; its reply says that the message was taken."""
        agent = self.service.agent

        def taken(slot: Slot) -> None:
            try:
                agent.reply_frame(slot)
            except Exception as error:
                self.service.refused(self, error)

        link.send(message, packed, timeout=0.0, what=self.what, complete=taken, prompt=True)

    def named(self) -> tuple[WorkerId, ...]:
        """Workers that know of this pass, for a message about it: who hears of it need not tell them. Of many only the
        root is named, or the bytes of a pass would grow with the square of its workers; being told twice is no harm."""
        known = self.known
        if len(known) != self._known_then:
            self._named, self._known_then = (*known,) if len(known) <= MOST_NAMED else (self.root,), len(known)
        return self._named

    def what(self) -> str:
        """What others are asked to do, in words."""
        return f"its part in the backward pass of context {self.context.context_id}"

    # --- ending ---

    def fail(self, error: BaseException) -> None:
        """Give up. The first error counts."""
        with self._lock:
            if self.finished:
                return
            self._give_up(error)
        self._given_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Under the lock."""
        self.finished = self._ended = True
        self.error = error

    def _given_up(self, error: BaseException) -> None:
        if isinstance(error, WorkerDied):
            self.context.lose(error)
        self.abort()
        self._for_root = []
        self._end()

    def answer_at_end(self, request: Request) -> None:
        """A request of the root: answer it when this worker's part is over; now, if it is."""
        with self._lock:
            if not self._ended:
                self._to_answer += (request,)
                return
        self.service.answer(request, self, [])

    def _end(self) -> None:
        """It is over, and nobody adds to what is to be answered any more: answer the root."""
        requests, carried = self._to_answer, self._for_root
        self._to_answer, self._for_root = (), []
        if carried and not requests:  # no answer that they could go with
            for message_id, gradients in carried:
                self.service.tell(self, self.root, message_id, gradients)
        for request in requests:
            self.service.answer(request, self, carried)  # the first takes all of it
