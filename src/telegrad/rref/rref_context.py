"""The references of one agent: feeds the ledgers under one lock, and performs what they decide after releasing it.

What leaves is queued and sent by I/O threads, so a reference may appear or vanish in any thread at any time. A handle
that is garbage collected only notes its id: `__del__` may run in the middle of anything, even under the lock below.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from telegrad.errors import RRefError, TelegradError, TooManyCalls, WorkerDied
from telegrad.ids import ForkId, PeerId, RRefId, ids_of, maker_of, show_id, worker_id_of
from telegrad.rpc.agent import Agent
from telegrad.rpc.client.pending import Slot
from telegrad.rpc.threads.yield_turn import blocking
from telegrad.rpc.trust.guard import ReferenceHolder
from telegrad.rpc.workers import Member, peer_of
from telegrad.rref.creation import Deadlines
from telegrad.rref.ledger import actions as act
from telegrad.rref.ledger.owner import OwnerLedger
from telegrad.rref.ledger.user import UserLedger
from telegrad.rref.outcome import Outcome
from telegrad.wire import messages as msg

log = logging.getLogger("telegrad.rref")

T = TypeVar("T")

_SOON = 0.010  # seconds that what is not urgent may wait, to be sent together with others
_AGAIN = 0.100  # seconds before a message that could not be sent is tried again
_REFUSED = 1.0  # the same after one was refused because its receiver was told too much in a second
_MOST_EARLY = 1024  # values that one worker may ask for before they are made
_MOST_FORKS = 4096  # in one message

_LAZY = (act.SendDelete, act.SendChildAccept)

_AS_MESSAGE: dict[type[act.Send], Callable[[Any], msg.AnyMessage]] = {
    act.SendForkRequest: lambda a: msg.RRefForkRequest(a.rref_id, a.fork_id, a.holder),
    act.SendAck: lambda a: msg.RRefAck(a.rref_id, a.fork_id),
    act.SendCreationFailed: lambda a: msg.RRefCreationFailed(a.rref_id, a.fork_id),
    act.SendFlush: lambda a: msg.RRefFlush(a.dead),
    act.SendFlushed: lambda a: msg.RRefFlushed(a.dead, a.forks),
}


class RRefContext(ReferenceHolder):
    """One worker's part in all references: the values it owns and the handles it has."""

    ignore_leaks = True  # if False, a graceful shutdown raises when values are still named at its end

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.me = peer_of(agent.member)
        self.owned = OwnerLedger(self.me)
        self.used = UserLedger(self.me)
        self.values: dict[RRefId, Outcome] = {}
        self._early: dict[PeerId, int] = {}  # how many values that are not made yet each worker has asked for
        self.lost: dict[ForkId, PeerId] = {}  # handles of no more use, and whose death made them so
        self.closed = False
        self.deadlines = Deadlines(agent)
        self._ids: Iterator[int] = ids_of(self.me)
        self._dead: dict[PeerId, Member] = {}
        self._changed = threading.Condition(threading.Lock())
        self._waiting = 0  # threads that wait for a change
        self._gone: deque[tuple[RRefId, ForkId | None]] = deque()
        self._outbox: deque[act.Send] = deque()
        self._refused: deque[tuple[PeerId, msg.AnyMessage]] = deque()  # to be said again in a while
        self._sweep_due = False
        self._sweep_now = False
        self._refused_due = False

    def __repr__(self) -> str:
        return f"<RRefContext of {self.agent.info.name!r}: {len(self.owned)} owned, {len(self.used)} used>"

    def keeps(self, rref_id: int) -> bool:
        """Whether the value of a reference is kept here."""
        return RRefId(rref_id) in self.owned

    def new_id(self) -> int:
        """An id for a reference or a fork made here."""
        return next(self._ids)

    # --- who ---

    def member(self, peer: PeerId) -> Member | None:
        """The worker that a peer is; None if it is not known, or another was started in its place."""
        directory, worker_id = self.agent.directory, worker_id_of(peer)
        member = directory.by_id(worker_id)
        if member is None or peer_of(member) != peer:
            self.agent.peers.look_for_news(worker_id)
            member = directory.by_id(worker_id)
        return member if member is not None and peer_of(member) == peer else None

    def is_gone(self, peer: PeerId) -> bool:
        """Whether a peer has left, died or been replaced, as far as is known here; the ledgers may hear it later."""
        member = self.agent.directory.by_id(worker_id_of(peer))
        return member is None or peer_of(member) != peer or self.agent.is_dead(member)

    def death_of(self, peer: PeerId, what: str, member: Member | None = None) -> WorkerDied:
        """The error for something that was lost with a worker; `member` is that one, where it is known."""
        member = member or self._known(peer)
        name, incarnation = (str(worker_id_of(peer)), 0) if member is None else (member.name, member.incarnation)
        text = f"worker {name!r} is gone, and {what}. Create it again on a living worker"
        return WorkerDied(text, worker=name, incarnation=incarnation)

    def name_of(self, peer: PeerId) -> str:
        """The name of a worker, alive or dead."""
        member = self._known(peer)
        return str(worker_id_of(peer)) if member is None else member.name

    def _known(self, peer: PeerId) -> Member | None:
        """A worker, alive or dead, as far as it was known here."""
        member = self._dead.get(peer) or self.agent.directory.by_id(worker_id_of(peer))
        return member if member is not None and peer_of(member) == peer else None

    # --- deciding ---

    def feed(self, event: Callable[..., act.Actions], *args: Any) -> None:
        """Tell a ledger what happened, and perform what follows."""
        self.perform(self.decide(event, *args))

    def decide(self, event: Callable[..., act.Actions], *args: Any) -> act.Actions:
        """Tell a ledger what happened. What concerns the tables here is done at once, under the same lock."""
        released = []  # destroyed after the lock is released: a value's destructor may do anything
        with self._changed:
            actions = event(*args)
            for action in actions:
                if type(action) is act.Forget:
                    released.append(self.values.pop(action.rref_id, None))
                elif type(action) is act.MarkLost:
                    self.lost[action.fork_id] = action.died
                elif type(action) is act.FailValue:
                    self.values.setdefault(action.rref_id, Outcome())
            if self._waiting:
                self._changed.notify_all()
        return actions

    def value_of(self, rref_id: RRefId) -> Outcome:
        """The slot of a value that this worker owns, even if what creates it has not arrived yet."""
        outcome = self.values.get(rref_id)
        if outcome is not None:
            return outcome
        with self._changed:
            return self.values.setdefault(rref_id, Outcome())

    def come_home(self, rref_id: RRefId, sender: PeerId) -> Outcome | None:
        """The slot of a value that a call brought home, from now on with a local handle more; None if it is lost. What
        creates it may not have arrived yet: the sender can have the reference from who creates it."""
        with self._changed:
            return self.values.setdefault(rref_id, Outcome()) if self.owned.come_home(rref_id, sender) else None

    def value_for(self, rref_id: RRefId, asker: PeerId) -> Outcome:
        """The same for a worker that asks for it. It may ask before the value is made, but not for any number."""
        with self._changed:
            outcome = self.values.get(rref_id)
            if outcome is not None:
                return outcome
            if self._early.get(asker, 0) >= _MOST_EARLY:
                raise RRefError(
                    f"worker {self.name_of(asker)!r} asks for {_MOST_EARLY} references that do not exist here; "
                    f"{show_id(rref_id)} is one too many"
                )
            self._early[asker] = self._early.get(asker, 0) + 1
            outcome = self.values[rref_id] = Outcome()
        outcome.when_done(partial(self._came, asker))
        return outcome

    def _came(self, asker: PeerId) -> None:
        with self._changed:
            left = self._early.get(asker, 0) - 1
            if left > 0:
                self._early[asker] = left
            else:
                self._early.pop(asker, None)

    def look(self, at: Callable[[], T]) -> T:
        """What `at` finds in the tables, while they stand still."""
        with self._changed:
            return at()

    def wait_until(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        """Wait until `condition` of the tables holds; False if it does not within `seconds` (None: for ever)."""
        with blocking(), self._changed:
            self._waiting += 1
            try:
                return self._changed.wait_for(condition, seconds)
            finally:
                self._waiting -= 1

    # --- performing ---

    def perform(self, actions: Iterable[act.Action]) -> None:
        """Do what a ledger decided."""
        for action in actions:
            if isinstance(action, act.Send):
                self._outbox.append(action)
                self._schedule(urgent=not isinstance(action, _LAZY))
            elif type(action) is act.FailValue:
                value = self.values.get(action.rref_id, Outcome())  # if it is forgotten already, nobody will ask
                value.fail(partial(self._never_made, action.rref_id, action.died))

    def _never_made(self, rref_id: RRefId, died: PeerId | None) -> BaseException:
        what = f"the value of reference {show_id(rref_id)} was never made"
        if died is not None:
            return self.death_of(died, what)
        return RRefError(f"{what}: worker {self.name_of(maker_of(rref_id))!r} could not send the call that makes it")

    def handle_gone(self, rref_id: RRefId, fork_id: ForkId | None) -> None:
        """A handle was garbage collected. Takes no lock: see the top of this file."""
        if not self.closed:
            self._gone.append((rref_id, fork_id))
            self._schedule(urgent=False)

    def _schedule(self, urgent: bool) -> None:
        if urgent:
            if not self._sweep_now:
                self._sweep_now = True
                self.agent.io_threads.submit(self.sweep)
        elif not self._sweep_due:
            self._sweep_due = True
            self.agent.io_threads.submit(self._sweep_soon)

    def _sweep_soon(self) -> None:
        self.agent.timer.at(time.monotonic() + _SOON, lambda: self.agent.io_threads.submit(self.sweep))

    def sweep(self) -> None:
        """Take in the handles that are gone, and send all that waits to be sent."""
        self._sweep_due = self._sweep_now = False  # first: what comes from here on schedules the next sweep
        for rref_id, fork_id in _drain(self._gone):
            for action in self.decide(self._drop, rref_id, fork_id):
                if isinstance(action, act.Send):
                    self._outbox.append(action)
        deletes: dict[PeerId, list[tuple[RRefId, ForkId]]] = {}
        accepts: dict[PeerId, list[ForkId]] = {}
        for action in _drain(self._outbox):
            if type(action) is act.SendDelete:
                deletes.setdefault(action.to, []).append((action.rref_id, action.fork_id))
            elif type(action) is act.SendChildAccept:
                accepts.setdefault(action.to, []).append(action.fork_id)
            else:
                self.tell(action.to, _AS_MESSAGE[type(action)](action))
        for owner, gone in deletes.items():
            for start in range(0, len(gone), _MOST_FORKS):
                self.tell(owner, msg.RRefUserDelete(tuple(gone[start : start + _MOST_FORKS])))
        for parent, known in accepts.items():
            for start in range(0, len(known), _MOST_FORKS):
                self.tell(parent, msg.RRefChildAccept(tuple(known[start : start + _MOST_FORKS])))

    def _drop(self, rref_id: RRefId, fork_id: ForkId | None) -> act.Actions:
        if fork_id is None:
            return self.owned.drop(rref_id)
        self.lost.pop(fork_id, None)
        return self.used.drop(fork_id)

    def tell(self, peer: PeerId, message: msg.AnyMessage) -> None:
        """Send a message of the protocol. It arrives, however long that takes, unless the peer is dead."""
        agent, member = self.agent, self.member(peer)
        if member is None or agent.is_dead(member) or agent.closing:
            return
        try:
            agent.send(
                member,
                message,
                timeout=0,
                what=lambda: f"{type(message).__name__} to worker {member.name!r}",
                complete=partial(self._told, peer, message),
            )
        except (OSError, TelegradError) as error:
            log.debug("a %s to %s could not be sent: %s", type(message).__name__, member.name, error)
            agent.link_lost(agent.link(member))  # find out whether it lives
            again = partial(agent.io_threads.submit, partial(self.tell, peer, message))
            agent.timer.at(time.monotonic() + _AGAIN, again)

    def _told(self, peer: PeerId, message: msg.AnyMessage, slot: Slot) -> None:
        try:
            reply = self.agent.reply_frame(slot).message
        except TooManyCalls:
            self._refused.append((peer, message))
            if not self._refused_due:
                self._refused_due = True
                again = partial(self.agent.io_threads.submit, self._tell_again)
                self.agent.timer.at(time.monotonic() + _REFUSED, again)
            return
        except Exception as error:  # a death, of which the ledgers hear by themselves
            log.debug("%s: %s", slot.what(), error)
            return
        if type(reply) is msg.RRefAck:
            self.feed(self.used.on_ack, peer, reply.rref_id, reply.fork_id)

    def _tell_again(self) -> None:
        """Say what was refused once more, deletes together: each message counts."""
        self._refused_due = False
        for peer, message in _drain(self._refused):
            if type(message) is msg.RRefUserDelete:
                self._outbox.extend(act.SendDelete(peer, *fork) for fork in message.forks)
            else:
                self.tell(peer, message)
        self.sweep()

    def on_close(self) -> None:
        """The agent ends; what is left of the handles is of no more use."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    # --- deaths ---

    def on_death(self, member: Member) -> None:
        """An incarnation of a worker is gone for good."""
        self._dead[peer_of(member)] = member
        if not self.agent.closing:
            self.agent.io_threads.submit(partial(self._settle_death, member))

    def _settle_death(self, member: Member) -> None:
        # Whoever joined before the death may have handles from the dead, so all must be known before it is settled.
        # In a large job they are asked for only if there is something here that they could have a handle of.
        if self.owned or self.agent.directory.look_up is None:
            self.agent.peers.look_for_news()
        dead = peer_of(member)
        for other in self.agent.directory.members():
            if not self.agent.is_dead(other):
                self.feed(self.owned.worker_joined, peer_of(other))
        self.feed(self.owned.worker_died, dead)
        self.feed(self.used.worker_died, dead)
        with self._changed:
            orphans = [r for r, v in self.values.items() if maker_of(r) == dead and not v.done and r not in self.owned]
            failed = [(r, self.values.pop(r)) for r in orphans]  # asked for, but what creates them never came
        for rref_id, value in failed:
            value.fail(partial(self._never_made, rref_id, dead))

    def probe(self, peer: PeerId) -> None:
        """Another worker says that this one is dead: find out, since only a death noticed here counts here."""
        if self.member(peer) is None:
            self.feed(self.used.worker_died, peer)  # it was never met, or has been replaced
        else:
            self.tell(peer, msg.RRefUserDelete(()))


def _drain(queue: deque[T]) -> Iterable[T]:
    while queue:
        try:
            yield queue.popleft()
        except IndexError:  # another thread was faster
            return


def rrefs_of(agent: Agent) -> RRefContext:
    """The references of an agent."""
    return agent.layer(RRefContext)
