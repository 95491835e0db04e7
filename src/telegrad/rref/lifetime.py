"""`lifetime.py` decides how long an owner keeps a value that others name. It sends nothing; it returns what to send.

Every handle outside the owner is a *fork* with an id of its own, and the owner keeps a value while it knows a fork of
it (or holds it itself). The whole protocol serves one rule: a fork leaves the owner's table only when nobody can still
turn up with a handle that came from it. Three habits keep that rule when messages are late, reordered or repeated and
workers die (`docs/guarantees.md` draws them):

1. A parent waits for its children. A user that shares its handle keeps its own fork until the owner knows the child's.
2. An ack nobody waits for is answered with a delete. A stale `RRefForkRequest` can bring a deleted fork back at the
   owner, but its ack finds no such fork at the user, and the answer removes it. So no side remembers what is gone.
3. A dead worker's forks stay until every other worker has said that it takes nothing more from the dead one, and which
   of its own forks the owner may not know yet. The owner alone decides; a parent hands its dead child's fork to it.

`OwnerLedger` is a worker's part as an owner, `UserLedger` its part as a user. Both are fed under the caller's lock,
hold no values, locks or clocks, and return actions to perform after the lock is released. A fork id carries the worker
that made it, so `maker_of(fork_id)` is the parent. What the caller promises: a call that carries a handle, and the
request that creates a value, are delivered at most once (all other messages may be repeated); the reply to a creation
reaches `on_ack` however late it is; a worker that is started again has another `PeerId`.
"""

from collections.abc import Iterable, Mapping

import msgspec

from telegrad.ids import ForkId, RRefId
from telegrad.rref.actions import (
    Action,
    Actions,
    FailValue,
    Forget,
    MarkLost,
    Refuse,
    SendAck,
    SendChildAccept,
    SendCreationFailed,
    SendDelete,
    SendFlush,
    SendFlushed,
    SendForkRequest,
)
from telegrad.rref.peers import PeerId, maker_of


class Leak(msgspec.Struct, frozen=True):
    """A value still named: how many handles the owner itself holds, and which worker holds each fork."""

    rref_id: RRefId
    held_here: int
    forks: Mapping[ForkId, PeerId]


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

    def share(self, rref_id: RRefId, child: ForkId, to: PeerId) -> Actions:
        """A local handle leaves in a call. Counted before it is sent: no request or ack is needed for it."""
        owned = self._owned[rref_id]
        if to == self.me:
            owned.held_here += 1
        elif to not in self._dead:
            owned.forks[child] = to
        return ()

    def take_back(self, rref_id: RRefId, child: ForkId, to: PeerId) -> Actions:
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


class _Used(msgspec.Struct):
    """One fork of mine. It ends when it is confirmed, dropped, and no child waits for the owner to know it."""

    rref_id: RRefId
    owner: PeerId
    confirmed: bool
    dropped: bool = False
    children: set[ForkId] = set()


class UserLedger:
    """The forks this worker holds of other workers' values."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self._used: dict[ForkId, _Used] = {}
        # Children sent and not yet accepted: child -> (the fork that waits for it, where it went). A handle sent to
        # oneself stays a child for as long as it lives, so it costs no message and names nothing new at the owner.
        self._children: dict[ForkId, tuple[ForkId, PeerId]] = {}
        self._dead: set[PeerId] = set()
        self._asked: dict[PeerId, set[PeerId]] = {}  # not yet known here to be dead -> owners that want to hear

    # My handles

    def create(self, rref_id: RRefId, fork_id: ForkId, owner: PeerId) -> Actions:
        """`remote` was called. Recorded before the request is sent: the reply may come first."""
        if owner in self._dead:
            return (MarkLost(rref_id, fork_id, owner),)
        self._used[fork_id] = _Used(rref_id, owner, confirmed=False)
        return ()

    def creation_failed(self, fork_id: ForkId) -> Actions:
        """The request never left this worker. The owner is told, so that whoever got the handle meanwhile hears of it.

        Not for a request that timed out: it may still be running, and its ack settles the fork whenever it comes.
        """
        used = self._used.get(fork_id)
        return () if used is None else (SendCreationFailed(used.owner, used.rref_id, fork_id),)

    def receive(self, rref_id: RRefId, fork_id: ForkId, owner: PeerId) -> Actions:
        """A call brought a handle of another worker's value."""
        parent = maker_of(fork_id)
        for worker in (owner, parent):
            if worker in self._dead:
                return (MarkLost(rref_id, fork_id, worker),)
        if parent == self.me:  # sent to oneself: it stays the child that `share` recorded
            return ()
        known = parent == owner  # the owner counted it before sending
        self._used[fork_id] = _Used(rref_id, owner, confirmed=known)
        return () if known else (SendForkRequest(owner, rref_id, fork_id, self.me),)

    def share(self, fork_id: ForkId, child: ForkId, to: PeerId) -> Actions:
        """One of my handles leaves in a call. Recorded before the call is sent: the accept may come first."""
        root = self._root(fork_id)
        used = self._used.get(root)
        if used is not None and to not in self._dead:
            used.children.add(child)
            self._children[child] = (root, to)
        return ()

    def take_back(self, child: ForkId) -> Actions:
        """A shared handle never left this worker, because the call could not be encoded or sent."""
        return self._release(child)

    def drop(self, fork_id: ForkId) -> Actions:
        """One of my handles is gone."""
        used = self._used.get(fork_id)
        if used is not None:
            used.dropped = True
            return self._delete_if_done(fork_id, used)
        if self._children.get(fork_id, (fork_id, None))[1] == self.me:
            return self._release(fork_id)
        return ()  # lost with its owner

    def held(self) -> list[tuple[RRefId, ForkId, PeerId]]:
        """Every handle that is not dropped: the value it names, itself, and the owner."""
        mine = [(used.rref_id, fork_id, used.owner) for fork_id, used in self._used.items() if not used.dropped]
        for child, (root, to) in self._children.items():
            if to == self.me:
                mine.append((self._used[root].rref_id, child, self._used[root].owner))
        return mine

    def confirmed(self, fork_id: ForkId) -> bool:
        """Whether the owner is known to keep the value for this handle."""
        used = self._used.get(self._root(fork_id))
        return used is not None and used.confirmed

    # What owners and children say

    def on_ack(self, owner: PeerId, rref_id: RRefId, fork_id: ForkId) -> Actions:
        """The owner has this fork in its table."""
        if owner in self._dead:
            return ()
        used = self._used.get(fork_id)
        if used is None:
            if fork_id in self._children:  # a dead child's, now the owner's to settle
                return self._release(fork_id)
            return (SendDelete(owner, rref_id, fork_id),)
        if used.confirmed:
            return ()
        used.confirmed = True
        parent = maker_of(fork_id)
        actions = self._delete_if_done(fork_id, used)
        if parent == self.me or parent in self._dead:
            return actions
        return (SendChildAccept(parent, fork_id), *actions)

    def on_child_accept(self, fork_id: ForkId) -> Actions:
        """The owner knows the handle I sent."""
        return self._release(fork_id)

    # Deaths

    def worker_died(self, worker: PeerId) -> Actions:
        """Handles of its values are lost; children it had are handed to their owners; owners that asked hear now."""
        if worker in self._dead:
            return ()
        self._dead.add(worker)
        actions: list[Action] = []
        for fork_id in [fork_id for fork_id, used in self._used.items() if used.owner == worker]:
            used = self._used.pop(fork_id)
            if not used.dropped:
                actions.append(MarkLost(used.rref_id, fork_id, worker))
            for child in used.children:
                _, to = self._children.pop(child)
                if to == self.me:
                    actions.append(MarkLost(used.rref_id, child, worker))
        for child, (root, to) in self._children.items():
            if to == worker:
                used = self._used[root]
                actions.append(SendForkRequest(used.owner, used.rref_id, child, worker))
        actions += [self._flushed(owner, worker) for owner in self._asked.pop(worker, ())]
        for owners in self._asked.values():
            owners.discard(worker)
        return tuple(actions)

    def on_flush(self, owner: PeerId, dead: PeerId) -> Actions:
        """An owner wants to hear when nothing more is taken from `dead` here; that is when its death is known here."""
        if owner in self._dead:
            return ()
        if dead in self._dead:
            return (self._flushed(owner, dead),)
        self._asked.setdefault(dead, set()).add(owner)
        return ()

    # Inspection

    def __len__(self) -> int:
        """How many forks this worker has, dropped ones that still wait included."""
        return len(self._used)

    def counts(self) -> dict[str, int]:
        """Figures for debug information."""
        return {
            "users": len(self._used),
            "pending": sum(not used.confirmed for used in self._used.values()),
            "children": len(self._children),
            "asked": sum(map(len, self._asked.values())),
        }

    def leaks(self) -> list[Leak]:
        """Every value this worker still names: its forks of it, and the workers its unaccepted children went to."""
        return [
            Leak(used.rref_id, int(not used.dropped), {child: self._children[child][1] for child in used.children})
            for used in self._used.values()
        ]

    # Decisions

    def _root(self, fork_id: ForkId) -> ForkId:
        """The fork the owner knows behind this handle: another one if the handle was sent to oneself."""
        return fork_id if fork_id in self._used else self._children.get(fork_id, (fork_id,))[0]

    def _release(self, child: ForkId) -> Actions:
        root, _ = self._children.pop(child, (None, None))
        if root is None:
            return ()
        used = self._used[root]
        used.children.discard(child)
        return self._delete_if_done(root, used)

    def _delete_if_done(self, fork_id: ForkId, used: _Used) -> Actions:
        if not used.dropped or not used.confirmed or used.children:
            return ()
        del self._used[fork_id]
        return (SendDelete(used.owner, used.rref_id, fork_id),)

    def _flushed(self, owner: PeerId, dead: PeerId) -> SendFlushed:
        """All unconfirmed forks at once: which of them came from the dead does not matter to the owner."""
        forks = [(used.rref_id, f) for f, used in self._used.items() if used.owner == owner and not used.confirmed]
        return SendFlushed(owner, dead, tuple(forks))
