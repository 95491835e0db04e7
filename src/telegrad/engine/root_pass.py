"""The part of the worker that called `backward`: it asks the others, waits for them, and gives up for all.

Each is asked by a request whose reply says that it is done, names participants the root did not know, or carries the
error that ended the pass there. The first error ends the pass everywhere.
"""

import time
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from telegrad import trace
from telegrad.autograd.context import Context
from telegrad.autograd.functions import Gradients, SendNode
from telegrad.autograd.leaf_nodes import are_taken_as_they_are
from telegrad.engine.gradients import take_present
from telegrad.engine.passes import Pass
from telegrad.errors import AutogradError, RpcTimeout, TelegradError
from telegrad.ids import MessageId, PassId, WorkerId
from telegrad.rpc.client.link import Link
from telegrad.rpc.client.pending import FOREVER, Slot
from telegrad.rpc.threads.wakeup import Wakeup
from telegrad.rpc.threads.yield_turn import blocking
from telegrad.rpc.workers import Member
from telegrad.wire.codec import Packed
from telegrad.wire.messages import AnyMessage, BeginPass, PassDone

if TYPE_CHECKING:
    from telegrad.engine.service import PassService

_LONG = 3600.0
_SOON = 0.002  # seconds: a reply that takes longer may be waiting for something that the root has to hear


class RootPass(Pass):
    """A backward pass on the worker that began it."""

    complete = False  # all are done: nothing can fail any more
    _told_of: frozenset[WorkerId] = frozenset()  # participants that others told of, and this worker did not know
    _waiting = False
    _told_of_error = False
    # Leaves that take their gradients without torch's engine, by their Send, which is the only one left.
    _unobserved: Mapping[MessageId, Sequence[Tensor]] = {}
    _news: Wakeup | None = None  # made by the root before it sleeps; set when something was settled

    def __init__(
        self, service: "PassService", context: Context, pass_id: PassId, retain_graph: bool, timeout: float
    ) -> None:
        Pass.__init__(self, service, context, pass_id, service.here, retain_graph)
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout if timeout else FOREVER
        self._asked: list[Slot] = []
        self._invited: list[Slot] = []
        self._open: list[None] = []  # one for each request without an answer; whoever adds or removes one needs no lock

    def _is_nearly_done(self, gradients: Gradients | None) -> bool:
        return False  # it has nobody to answer: gradients for its own Sends, of calls to itself, are told like others

    def progress(self) -> tuple[Hashable, ...]:
        """The same of the root, which waits for others."""
        asked = [(slot.done, slot.complete is None, slot.link.member.worker_id) for slot in self._asked + self._invited]
        ends = self._ended, self.complete, self._told_of_error, bool(self._open)
        return *Pass.progress(self), *ends, frozenset(self._told_of), tuple(asked)

    # --- asking, and what comes back ---

    def ask(self, link: Link, message: AnyMessage, packed: Packed) -> None:
        """Send a request that is answered when the worker is done."""
        self._open.append(None)
        try:
            slot = link.send(message, packed, timeout=0.0, what=self.what, complete=self._take_answer, attended=True)
        except BaseException:
            self._open.pop()
            raise
        # First those that may answer with gradients, so that the root reads these itself.
        (self._invited if type(message) is BeginPass else self._asked).append(slot)
        if self._waiting:  # the root will not come for this reply itself
            slot.link.expect()

    def _take_answer(self, slot: Slot) -> None:
        """An answer came, or will not: in the thread of the root, or in an I/O thread. With gradients hooks of the user
        may run, and may wait for a reply themselves; neither thread reads a link meanwhile."""
        with self._lock:
            if slot.complete is None:
                return  # another thread was first
            slot.complete = None  # it knows this pass, and the pass knows it: they would keep each other alive
        agent = self.service.agent
        unanswered = slot.error is not None
        try:
            reply = agent.reply_frame(slot).message
            if type(reply) is PassDone:
                if not self.known.issuperset(reply.participants):
                    with self._lock:
                        self._told_of |= frozenset(reply.participants)
                if reply.gradients:
                    self._hear_with_answer(slot.link.member, reply, agent.reply_tensors(slot))
        except RpcTimeout as error:  # of this request, or one that the worker's own pass met
            self.fail(self._too_late(slot) if unanswered else error)
        except BaseException as error:
            self.fail(error)
        self._open.pop()
        if self._news is not None:
            self._news.set()

    def _hear_with_answer(self, sender: Member, reply: PassDone, tensors: list[Any]) -> None:
        """Gradients that came with an answer, for Sends of this worker."""
        for message_id, present in reply.gradients:
            # Taken out: a leaf keeps a gradient without a copy if nobody else holds it.
            gradients: list[Any] | None = tensors
            if present and len(present) == len(tensors) and all(present):
                tensors = []
            else:
                gradients = take_present(present, tensors)
            if not self.finished:  # else it was given up
                self.service.check(self.context, message_id, sender.worker_id, gradients)
                self.hear_and_run(message_id, gradients)
        if tensors:
            raise AutogradError(f"more gradients came with an answer than it names: {reply.gradients}")

    def hear_and_run(self, key: MessageId, gradients: Gradients | None) -> None:
        """A Send of this worker has its gradients, or none will come."""
        if not self._unobserved or gradients is None or not self._end_with(key, gradients):
            Pass.hear_and_run(self, key, gradients)

    def _end_with(self, key: MessageId, gradients: Gradients) -> bool:
        """If all that is left is to give these to leaves that take them as they are, and nobody would notice: do so.
        That is the end of this worker's part."""
        with self._lock:
            leaves = self._unobserved.get(key)
            if (
                leaves is None
                or key not in self._unheard
                or self._running
                or self._roots
                or self._untold
                or self.context.gradients  # to add them to those of an earlier pass takes the streams of this one
                or self.context.profile is not None
                or not are_taken_as_they_are(gradients)
            ):
                return False
            del self._unheard[key]
            self._running = True
        if trace.recorder is not None:
            trace.recorder.span("region (last)", "backward", trace.now())
        try:
            self._all_has_run(dict(zip(leaves, gradients, strict=True)))
        except BaseException as error:
            self._running = False
            self.fail(error)
        return True

    # --- waiting ---

    def wait_for_more(self, more: Wakeup, seconds: float) -> bool:
        """Sleep in the midst of the pass, before `wait` comes for the replies: the I/O threads look after them."""
        if not self._waiting:
            self._waiting = True
            for slot in self._asked + self._invited:
                slot.link.expect()
        return Pass.wait_for_more(self, more, min(seconds, self._deadline - time.monotonic()))

    def wait_on(self, busy: str) -> None:
        """The same of the root, which has the deadline."""
        Pass.wait_on(self, busy)
        if time.monotonic() >= self._deadline:
            raise self._too_late(waits_for=f"leaves that {busy} works on")

    def wait(self) -> None:
        """Return when all are done; raise the error that ended the pass, or RpcTimeout."""
        self._waiting = True
        try:
            while True:
                self._await_replies()
                while (self._open or not self._ended) and self.error is None:
                    self._sleep()
                newcomers = self._told_of and self._told_of - self.known
                if self.error is not None or not newcomers:
                    break
                self.known |= newcomers
                for worker in newcomers:
                    self.service.invite(self, worker)
        except BaseException as error:
            self.fail(error)
        with self._lock:
            self.complete = self.error is None
        self._asked = self._invited = []  # they know this pass: it would be left to the garbage collector
        if self.error is not None:
            self._tell_all()
            raise self.error

    def _await_replies(self) -> None:
        """Read replies in this thread, link by link. It does so alone as long as they come one right after the other:
        to wake another thread for each costs more than to read it. When one does not come, perhaps because it waits for
        what another brings, the I/O threads look after the other links."""
        asked = self._asked + self._invited if self._invited else self._asked
        if not self.retain_graph:
            self._look_at_leaves()
        alone = len(asked) > 1
        for slot in asked:
            if self.error is not None:
                return
            while alone and not slot.done:
                if not slot.link.poll(slot, _SOON):
                    alone = False
                    for other in asked:
                        if not other.done and other is not slot:
                            other.link.expect()
            if not slot.done:
                slot.deadline = self._deadline
                slot.link.wait(slot)
            if slot.complete is not None:  # else it was taken as it came
                self._take_answer(slot)

    def _look_at_leaves(self) -> None:
        """Others work now, so there is time for this: if all that is left to be done here is to give its gradients to
        one Send, see whether that takes the engine."""
        with self._lock:  # of those who hear
            graph = self._graph
            self._unobserved = {}
            if graph is not None and not graph.leaves and not self._at_leaves and len(self._unheard) == 1:
                for key, send in self._unheard.items():
                    if isinstance(send, SendNode) and send.at_leaves and (leaves := send.unobserved_leaves()):
                        self._unobserved = {key: leaves}

    def _sleep(self) -> None:
        if self._news is None:  # whoever settles something from here on sets it; the caller looks again before it waits
            self._news = self.new_wakeup()
            return
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._too_late()
        with blocking():
            self._news.wait(min(left, _LONG))

    def _too_late(self, *expired: Slot, waits_for: str = "") -> RpcTimeout:
        slots = [*expired, *[slot for slot in self._asked + self._invited if slot.complete is not None]]
        late = sorted({slot.link.member.name for slot in slots})
        return RpcTimeout(
            f"RPC ran for more than set timeout ({round(self._timeout * 1000)} ms): the backward pass is not complete. "
            f"Workers {late or 'none'} have not finished their part; this worker waits for "
            f"{waits_for or self.waiting_for() or 'nothing'}. Pass a longer `timeout` to backward if they need it"
        )

    # --- ending ---

    def _end(self) -> None:
        if self._to_answer:  # it has called itself
            Pass._end(self)
        if self._news is not None:
            self._news.set()

    def fail(self, error: BaseException) -> None:
        """Give up, also if this worker's own part is done. The first error ends the pass everywhere, now: the root may
        be waiting for one that waits in vain."""
        with self._lock:
            if self.error is not None or self.complete:
                return
            self._give_up(error)
        self._given_up(error)
        self.service.agent.io_threads.submit(self._tell_all)

    def _tell_all(self) -> None:
        """Tell all participants of the error, once."""
        with self._lock:
            error, told, self._told_of_error = self.error, self._told_of_error, True
        if told or error is None:
            return
        agent = self.service.agent
        message = self.service.abort_message(self, error)
        for worker in (self.context.participants | self.known | self._told_of) - {self.service.here}:
            member = agent.directory.by_id(worker)
            if member is not None and not agent.is_dead(member):
                try:
                    agent.notify(member, message)
                except TelegradError:
                    continue  # it will learn of the end of the context by other means
