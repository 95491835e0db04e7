"""The owner's half of a reference's life: it knows every fork of its values, and decides when one may be forgotten.

`lifetime.py` has the protocol. That a fork is gone only its holder may say; the forks of a dead one go when all others
have answered for it.
"""

from collections.abc import Iterable

import msgspec

from telegrad.ids import ForkId, PeerId, RRefId, maker_of
from telegrad.rref.ledger.actions import (
    Action,
    Actions,
    FailValue,
    Forget,
    MarkLost,
    Refuse,
    SendAck,
    SendChildAccept,
    SendFlush,
)
from telegrad.rref.ledger.lifetime import Leak


class _Owned(msgspec.Struct):
    """What keeps one value. Not `created` yet when a shared handle overtook the creation."""

    created: bool
    held_here: int = 0
    forks: dict[ForkId, PeerId] = {}


class OwnerLedger:
    """The values of this worker, and the forks that keep each."""

    def __init__(self, me: PeerId, workers: Iterable[PeerId] = ()) -> None:
        self.me = me
        self._owned: dict[RRefId, _Owned] = {}
        self._others = {worker for worker in workers if worker != me}
        self._dead: set[PeerId] = set()
        self._unsettled: dict[ForkId, RRefId] = {}  # forks held by the dead, until all barriers below are through
        self._awaiting: dict[PeerId, set[PeerId]] = {}  # dead worker -> who has not said `flushed` yet
        self._settled: set[PeerId] = set()  # dead, and no handle of theirs can turn up any more

    # Handles on the owner itself

    def hold(self, rref_id: RRefId) -> Actions:
        """A value made here by its owner: `RRef(value)`, or `remote` to oneself."""
        self._owned[rref_id] = _Owned(created=True, held_here=1)
        return ()

    def receive(self, rref_id: RRefId, fork_id: ForkId) -> Actions:
        """A call brought a handle home. It becomes a local one; the parent need not wait for it."""
        parent = maker_of(fork_id)
        if parent == self.me:  # sent to oneself: `share` has counted it
            return ()
        if parent in self._dead:
            return (MarkLost(rref_id, fork_id, parent),)
        owned, actions = self._named(rref_id)
        owned.held_here += 1
        return (*actions, SendChildAccept(parent, fork_id))

    def come_home(self, rref_id: RRefId, sender: PeerId) -> bool:
        """A call brought the id of a value, of which its sender keeps a confirmed fork until it is answered. Whether
        that became a local handle."""
        owned = None if sender in self._dead else self._owned.get(rref_id)
        if owned is None:
            return False
        owned.held_here += 1
        return True

    def share(self, rref_id: RRefId, child: ForkId, to: PeerId) -> Actions:
        """A local handle leaves in a call. Counted before it is sent: no request or ack is needed for it."""
        owned = self._owned[rref_id]
        if to == self.me:
            owned.held_here += 1
        elif to not in self._dead:
            owned.forks[child] = to
        return ()

    def share_unsent(self, rref_id: RRefId, child: ForkId, to: PeerId) -> Actions:
        """A shared handle never left this worker, because the call could not be encoded or sent."""
        if to == self.me:
            return self.drop(rref_id)
        self._unsettled.pop(child, None)
        return self._remove(rref_id, child)

    def drop(self, rref_id: RRefId) -> Actions:
        """A local handle is gone."""
        owned = self._owned.get(rref_id)
        if owned is None:
            return ()
        owned.held_here -= 1
        return self._forget_if_unnamed(rref_id, owned)

    # What users say

    def on_create(self, sender: PeerId, rref_id: RRefId, fork_id: ForkId) -> Actions:
        """The creation arrived. Called before the function runs; the reply to it is the ack, also when it raises."""
        if sender in self._dead:
            return (Refuse(rref_id),)
        owned = self._owned.get(rref_id)
        if owned is None:
            self._owned[rref_id] = _Owned(created=True, forks={fork_id: sender})
        else:  # a handle shared before this request was delivered is already here
            owned.created = True
            owned.forks[fork_id] = sender
        return ()

    def on_creation_failed(self, sender: PeerId, rref_id: RRefId, fork_id: ForkId) -> Actions:
        """A creation whose value is an error from the start."""
        if sender in self._dead:
            return ()
        owned, _ = self._named(rref_id)
        owned.forks[fork_id] = sender
        ack = SendAck(sender, rref_id, fork_id)
        if owned.created:
            return (ack,)
        owned.created = True
        return (FailValue(rref_id, None), ack)

    def on_fork_request(self, sender: PeerId, rref_id: RRefId, fork_id: ForkId, holder: PeerId) -> Actions:
        """A user has a handle it got from another user, or reports the one it sent to a worker that died since."""
        if sender in self._dead:
            return ()
        ack = SendAck(sender, rref_id, fork_id)
        owned, actions = self._named(rref_id)
        owned.forks[fork_id] = holder
        if holder in self._dead:
            self._unsettled[fork_id] = rref_id
            return (*actions, ack, *self._settle())
        return (*actions, ack)

    def on_delete(self, sender: PeerId, rref_id: RRefId, fork_id: ForkId) -> Actions:
        """A user's fork is gone. Only its holder may say so: a parent must not free the fork of its dead child."""
        owned = self._owned.get(rref_id)
        if owned is None or owned.forks.get(fork_id) != sender or sender in self._dead:
            return ()
        return self._remove(rref_id, fork_id)

    # Deaths

    def worker_joined(self, worker: PeerId) -> Actions:
        """A worker the constructor did not name. It is asked about the dead still being settled, as all others are."""
        if worker == self.me or worker in self._others:
            return ()
        self._others.add(worker)
        for waiting in self._awaiting.values():
            waiting.add(worker)
        return tuple(SendFlush(worker, dead) for dead in self._awaiting)

    def worker_died(self, worker: PeerId) -> Actions:
        """From now on nothing of this worker is taken. What it kept stays until the others have answered."""
        if worker in self._dead:
            return ()
        self._dead.add(worker)
        self._others.discard(worker)
        actions: list[Action] = []
        for rref_id, owned in self._owned.items():
            if not owned.created and maker_of(rref_id) == worker:
                owned.created = True
                actions.append(FailValue(rref_id, worker))
            for fork_id, holder in owned.forks.items():
                if holder == worker:
                    self._unsettled[fork_id] = rref_id
        for waiting in self._awaiting.values():
            waiting.discard(worker)
        return (*actions, *self._settle())

    def on_flushed(self, sender: PeerId, dead: PeerId, forks: Iterable[tuple[RRefId, ForkId]]) -> Actions:
        """`sender` takes nothing more from `dead`. Its unconfirmed forks count as requests, and are acked like them."""
        if sender in self._dead:
            return ()
        actions: list[Action] = []
        for rref_id, fork_id in forks:
            actions += self.on_fork_request(sender, rref_id, fork_id, sender)
        if dead in self._awaiting:
            self._awaiting[dead].discard(sender)
            actions += self._settle()
        return tuple(actions)

    # Inspection

    def __contains__(self, rref_id: RRefId) -> bool:
        """Whether this value is kept."""
        return rref_id in self._owned

    def __len__(self) -> int:
        """How many values are kept."""
        return len(self._owned)

    def counts(self) -> dict[str, int]:
        """Figures for debug information."""
        return {
            "owners": len(self._owned),
            "forks": sum(len(owned.forks) for owned in self._owned.values()),
            "not_created": sum(not owned.created for owned in self._owned.values()),
            "unsettled": len(self._unsettled),
            "awaiting": sum(map(len, self._awaiting.values())),
        }

    def leaks(self) -> list[Leak]:
        """Every value still kept, and by whom."""
        return [Leak(rref_id, owned.held_here, dict(owned.forks)) for rref_id, owned in self._owned.items()]

    # Decisions

    def _named(self, rref_id: RRefId) -> tuple[_Owned, Actions]:
        """What keeps this value. A handle may overtake the creation, which never comes if the creator is dead."""
        owned = self._owned.get(rref_id)
        if owned is not None:
            return owned, ()
        creator = maker_of(rref_id)
        orphan = creator in self._dead
        owned = self._owned[rref_id] = _Owned(created=orphan)
        return owned, (FailValue(rref_id, creator),) if orphan else ()

    def _remove(self, rref_id: RRefId, fork_id: ForkId) -> Actions:
        owned = self._owned.get(rref_id)
        if owned is None or owned.forks.pop(fork_id, None) is None:
            return ()
        return self._forget_if_unnamed(rref_id, owned)

    def _forget_if_unnamed(self, rref_id: RRefId, owned: _Owned) -> Actions:
        if owned.forks or owned.held_here:
            return ()
        del self._owned[rref_id]
        return (Forget(rref_id),)

    def _settle(self) -> Actions:
        """Ask about the dead if a fork depends on it; drop what they held once all have answered about all of them.

        All of them together: a handle may have passed through several dead workers, and only the first is known here.
        """
        if not self._unsettled and not self._awaiting:
            return ()
        actions: list[Action] = []
        for dead in self._dead - self._settled - self._awaiting.keys():
            self._awaiting[dead] = set(self._others)
            actions += [SendFlush(other, dead) for other in self._others]
        if any(self._awaiting.values()):
            return tuple(actions)
        self._settled.update(self._awaiting)
        self._awaiting.clear()
        unsettled, self._unsettled = self._unsettled, {}
        for fork_id, rref_id in unsettled.items():
            actions += self._remove(rref_id, fork_id)
        return tuple(actions)
