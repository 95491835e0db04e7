"""The user's half of a reference's life: it decides when an owner has to hear of a handle, and when of its end.

`lifetime.py` has the protocol. A fork outlives its handle until the owner knows it, and knows all that was shared from
it.
"""

import msgspec

from telegrad.ids import ForkId, PeerId, RRefId, maker_of
from telegrad.rref.ledger.actions import (
    Action,
    Actions,
    MarkLost,
    SendChildAccept,
    SendCreationFailed,
    SendDelete,
    SendFlushed,
    SendForkRequest,
)
from telegrad.rref.ledger.lifetime import Leak


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

    @property
    def deaths(self) -> int:
        """How many dead workers are remembered, or asked about."""
        return len(self._dead) + len(self._asked)

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

    def creation_refused(self, fork_id: ForkId) -> Actions:
        """The owner has answered that it will not make the value: it keeps nothing, and need not hear of an end. Only
        if the handle was passed on it is told as of a creation that failed, for those who may ask it."""
        used = self._used.get(fork_id)
        if used is None or used.children:
            return self.creation_failed(fork_id)
        del self._used[fork_id]
        return ()

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

    def share_unsent(self, child: ForkId) -> Actions:
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
        if used.confirmed or used.owner != owner:
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
