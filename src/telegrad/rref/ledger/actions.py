"""What the reference ledgers decide and the shell carries out: messages to send, values to release, handles to mark.

Each `Send` becomes the message of the same name (`SendDelete` an `RRefUserDelete`, and so on) with the same fields.
"""

import msgspec

from telegrad.ids import ForkId, PeerId, RRefId


class Action(msgspec.Struct, frozen=True, gc=False):
    """Something the shell does after it has released its lock."""


class Send(Action, frozen=True, gc=False):
    """A message. Any number of these with the same `to` may travel as one, in any order, with any delay."""

    to: PeerId


class SendForkRequest(Send, frozen=True, gc=False):
    """User to owner: `holder` has this fork; keep the value for it. `holder` is the sender, or its dead child."""

    rref_id: RRefId
    fork_id: ForkId
    holder: PeerId


class SendAck(Send, frozen=True, gc=False):
    """Owner to user: this fork is in my table. The reply to a creation says the same."""

    rref_id: RRefId
    fork_id: ForkId


class SendChildAccept(Send, frozen=True, gc=False):
    """Child to parent: the owner knows my fork, you need not keep yours for it. May ride on the reply of the call."""

    fork_id: ForkId


class SendDelete(Send, frozen=True, gc=False):
    """User to owner: this fork is gone, and so are all its children that you do not know."""

    rref_id: RRefId
    fork_id: ForkId


class SendCreationFailed(Send, frozen=True, gc=False):
    """User to owner: the request that creates this value will never come; store its error as the value."""

    rref_id: RRefId
    fork_id: ForkId


class SendFlush(Send, frozen=True, gc=False):
    """Owner to everyone: answer once you take nothing more from `dead`."""

    dead: PeerId


class SendFlushed(Send, frozen=True, gc=False):
    """The answer: nothing of `dead` will be taken here any more; these forks of yours I have, unconfirmed."""

    dead: PeerId
    forks: tuple[tuple[RRefId, ForkId], ...]


class Forget(Action, frozen=True, gc=False):
    """Nobody names this value any more: release it."""

    rref_id: RRefId


class FailValue(Action, frozen=True, gc=False):
    """The value will never be made: keep an error in its place. `died`: its creator; None if the request failed."""

    rref_id: RRefId
    died: PeerId | None


class Refuse(Action, frozen=True, gc=False):
    """Do not run this creation: whoever asked for it is dead, and its forks are already being settled."""

    rref_id: RRefId


class MarkLost(Action, frozen=True, gc=False):
    """This handle can never be used: `died` is its owner, or the sender of a handle that came after its death."""

    rref_id: RRefId
    fork_id: ForkId
    died: PeerId


Actions = tuple[Action, ...]
