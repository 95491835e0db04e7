"""The roll of a pass, kept by its root: which workers were asked to take part, and which of them are done.

Each was asked by a request whose reply says that it is done, names participants the root did not know, or carries the
error that ended the pass there. The first error ends the pass everywhere.
"""

import threading
import time

from torch import Tensor

from telegrad.engine.passes import Pass
from telegrad.engine.service import Service
from telegrad.errors import AutogradError, RpcTimeout, TelegradError
from telegrad.ids import WorkerId
from telegrad.rpc.client.pending import FOREVER, Slot
from telegrad.rpc.threads.wakeup import Wakeup
from telegrad.rpc.threads.yield_turn import blocking
from telegrad.rpc.workers import Member
from telegrad.wire.codec import Packed
from telegrad.wire.messages import AnyMessage, BeginPass, PassDone


class Roll:
    """Who takes part in a pass that began here."""

    def __init__(self, service: Service, timeout: float) -> None:
        self._service = service
        self._agent = service.agent
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout if timeout else FOREVER
        self._lock = threading.Lock()
        self._asked: list[Slot] = []
        self._attended: Slot | None = None  # the one whose answer the root is waiting for in person
        self._open: list[str] = []  # the worker of each request that has no answer yet
        self._waiting = False
        self._named: set[WorkerId] = set()  # participants that others told of
        self._news = Wakeup()  # rung for the root, when something was settled
        self._pass: Pass | None = None
        self._ended = False  # whether this worker's own part is over
        self.error: BaseException | None = None

    def open(self, pass_: Pass) -> None:
        """The pass this is the roll of; before anybody is asked."""
        self._pass = pass_

    def ask(self, member: Member, message: AnyMessage, packed: Packed, what: str) -> None:
        """Send a request that is answered when `member` is done."""
        with self._lock:
            self._open.append(member.name)
        try:
            slot = self._agent.send(
                member,
                message,
                packed,
                timeout=0.0,
                what=lambda: what,
                complete=self._answered,
                attended=True,
            )
        except BaseException:
            with self._lock:
                self._open.remove(member.name)
            raise
        with self._lock:
            # First those that may answer with gradients, so that the root takes these in person.
            self._asked.insert(len(self._asked) if type(message) is BeginPass else 0, slot)
            waiting = self._waiting
        if waiting:  # the root is waiting already and will not come for this reply in person
            slot.link.expect()

    def _answered(self, slot: Slot) -> None:
        """An answer came, or will not: called by the thread that reads, for all who wait for a reply of that worker.

        With gradients hooks of the user may run, which may wait for a reply themselves: never in this thread."""
        if slot.frame is not None and type(slot.frame.message) is PassDone and slot.frame.message.gradients:
            if slot is not self._attended:
                self._agent.io_threads.submit(lambda: self._take_answer(slot))
        else:
            self._take_answer(slot)

    def _take_answer(self, slot: Slot) -> None:
        with self._lock:
            if slot.complete is None:
                return  # another thread was first
            slot.complete = None  # it knows this roll, and the roll knows it: they would keep each other alive
        member: Member = slot.link.member
        named: set[WorkerId] = set()
        unanswered = slot.error is not None
        try:
            reply = self._agent.reply_frame(slot).message
            if type(reply) is PassDone:
                named = set(reply.participants)
                self._hear(member, reply, self._agent.reply_tensors(slot))
        except RpcTimeout as error:  # of this request, or one that the worker's own pass met
            self._give_up(self._too_late() if unanswered else error)
        except BaseException as error:
            self._give_up(error)
        with self._lock:
            self._open.remove(member.name)
            self._named |= named
        self._news.set()

    def _hear(self, sender: Member, reply: PassDone, tensors: list[Tensor]) -> None:
        """Gradients that came with an answer, for Sends of this worker."""
        if sum(sum(present) for _, present in reply.gradients) != len(tensors):
            raise AutogradError(f"{len(tensors)} gradients came with an answer that names others: {reply.gradients}")
        pass_ = self._pass
        tensors.reverse()
        for message_id, present in reply.gradients:
            # Taken out: a leaf keeps a gradient without a copy if nobody else holds it.
            gradients = [tensors.pop() if there else None for there in present] if present else None
            if pass_ is not None:  # else it was given up
                self._service.check(pass_.context, message_id, sender.worker_id, gradients)
                pass_.hear(message_id, gradients)

    def wait(self, pass_: Pass) -> None:
        """Return when all are done; raise the error that ended the pass, or RpcTimeout."""
        pass_.when_ended(self._local_end)
        with self._lock:
            self._waiting = True
        try:
            while True:
                self._await_replies()
                while (self._open or not self._ended) and self.error is None:
                    self._sleep()
                newcomers = self._named - pass_.known - {self._service.here}
                if self.error is not None or not newcomers:
                    break
                pass_.known |= newcomers
                for worker in newcomers:
                    self._service.invite(pass_, worker)
        except BaseException as error:
            self._give_up(error)
        # What was asked knows this roll, and the pass does: they would keep each other alive.
        self._asked.clear()
        if self.error is not None:
            self._abort()
            raise self.error
        self._pass = None

    def _local_end(self, pass_: Pass) -> None:
        self._ended = True
        self._news.set()
        if pass_.error is not None:
            self._give_up(pass_.error)

    def _give_up(self, error: BaseException) -> None:
        """The first error ends the pass everywhere, now: the root may be waiting for one that waits in vain."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
        self._news.set()
        self._agent.io_threads.submit(self._abort)

    def _await_replies(self) -> None:
        """Read replies in this thread, link by link, while the I/O threads looks after the other links."""
        waiting = [slot for slot in self._asked if not slot.done]
        for slot in waiting[1:]:
            slot.link.expect()
        for slot in waiting:
            if self.error is not None:
                return
            slot.deadline = self._deadline
            self._attended = slot
            slot.wait()
            self._take_answer(slot)

    def _sleep(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._too_late()
        with blocking():
            self._news.wait(min(left, 3600.0))

    def _too_late(self) -> RpcTimeout:
        late = sorted(set(self._open))
        waits = [] if self._pass is None else self._pass.waiting_for()
        return RpcTimeout(
            f"RPC ran for more than set timeout ({round(self._timeout * 1000)} ms): the backward pass is not complete. "
            f"Workers {late or 'none'} have not finished their part; this worker waits for {waits or 'nothing'}. "
            "Pass a longer `timeout` to backward if they need it"
        )

    def _abort(self) -> None:
        with self._lock:
            pass_, error, self._pass = self._pass, self.error, None
        if pass_ is None or error is None:
            return  # done by another thread
        pass_.fail(error)
        context = pass_.context
        message = self._service.abort_message(pass_, error)
        for worker in (context.participants | pass_.known | self._named) - {self._service.here}:
            member = self._agent.directory.by_id(worker)
            if member is not None and not self._agent.is_dead(member):
                try:
                    self._agent.notify(member, message)
                except TelegradError:
                    continue  # it will learn of the end of the context by other means
