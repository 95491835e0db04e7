"""How long an owner keeps a value that others name: the protocol that the two ledgers follow, and why it is safe.

Every handle outside the owner is a *fork* with an id of its own, and the owner keeps a value while it knows a fork of
it (or holds it itself). The whole protocol serves one rule: a fork leaves the owner's table only when nobody can still
turn up with a handle that came from it. Three habits keep that rule when messages are late, reordered or repeated and
workers die (`docs/guarantees.md` draws them):

1. A parent waits for its children. A user that shares its handle keeps its own fork until the owner knows the child's.
   A call to the owner has no child: the handle in it is kept until the call is answered.
2. An ack nobody waits for is answered with a delete. A stale `RRefForkRequest` can bring a deleted fork back at the
   owner, but its ack finds no such fork at the user, and the answer removes it. So no side remembers what is gone.
3. A dead worker's forks stay until every other worker has said that it takes nothing more from the dead one, and which
   of its own forks the owner may not know yet. The owner alone decides; a parent hands its dead child's fork to it.

`OwnerLedger` is a worker's part as an owner, `UserLedger` its part as a user. They decide and send nothing: both are
fed under the caller's lock, hold no values, locks or clocks, and return actions to perform after the lock is released.
A fork id carries the worker that made it, so `maker_of(fork_id)` is the parent. What the caller promises: a call that
carries a handle, and the request that creates a value, are delivered at most once (all other messages may be repeated);
the reply to a creation reaches `on_ack` however late it is; a worker that is started again has another `PeerId`.
"""

from collections.abc import Mapping

import msgspec

from telegrad.ids import ForkId, PeerId, RRefId


class Leak(msgspec.Struct, frozen=True):
    """A value still named: how many handles the owner itself holds, and which worker holds each fork."""

    rref_id: RRefId
    held_here: int
    forks: Mapping[ForkId, PeerId]
