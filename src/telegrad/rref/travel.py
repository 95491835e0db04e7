"""A reference on its way: leaves as three ids, arrives as a handle of its own.

Every crossing makes a new fork, counted here before the message is sent and taken back if it never is. A reference that
occurs several times in one message makes one. A message that cannot be put together again, or is no longer wanted, is
read for its references alone, which are let go: otherwise their owners would keep the values for them.

A call that brings a reference home, to the owner of its value, needs none of that. The handle it was made of lives
until the call is answered, so the owner has the value when it comes: the id of the value is enough.
"""

from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from telegrad.errors import RRefError, SerializationError, WorkerDied
from telegrad.ids import ForkId, PeerId, RRefId, show_id
from telegrad.rpc.packing import Crossing, discard, local
from telegrad.rpc.workers import peer_of
from telegrad.rref.handles import Handle, OwnerHandle, UserHandle
from telegrad.rref.outcome import Outcome
from telegrad.rref.rref import RRef
from telegrad.rref.rref_context import RRefContext
from telegrad.rref.value_on_owner import receiver
from telegrad.wire.codec import unpack
from telegrad.wire.frames import Frame, FrameKind


class UnsendableReference(RRefError, SerializationError):
    """A reference that cannot be sent on: its value was never made, or is lost."""


class LostReference(WorkerDied, UnsendableReference):
    """The same because a worker has died. It names the one, as all that is lost with a worker does."""


def reduce_reference(rref: RRef[Any]) -> tuple[Any, ...]:
    """What a reference is reduced to while a message is packed."""
    crossing, handle = local.crossing, rref._handle
    if crossing is None:
        _check_sendable(handle)
        raise UnsendableReference("Can not pickle rref in python pickler, rref can only be pickled when using RPC")
    if (
        crossing.kept is not None
        and handle.owner is crossing.peer
        and type(handle) is UserHandle
        and handle.is_known()
        and handle.rrefs.agent.layers is crossing.layers
    ):
        _check_sendable(handle)
        crossing.kept.append(handle)
        return come_home, (handle.rref_id,)
    fork_id = crossing.notes.get(handle)
    if fork_id is None:
        fork_id = crossing.notes[handle] = _fork(handle, crossing)
    return arrive, (handle.rref_id, fork_id, peer_of(handle.owner))


def _check_sendable(handle: Handle) -> None:
    try:
        handle.check_usable("fork an UserRRef")
    except WorkerDied as error:
        raise LostReference(str(error), worker=error.worker, incarnation=error.incarnation) from error
    except RuntimeError as error:
        raise UnsendableReference(str(error)) from error


def _fork(handle: Handle, crossing: Crossing) -> ForkId:
    rrefs = handle.rrefs
    if rrefs.agent.layers is not crossing.layers:
        raise UnsendableReference(f"{handle} belongs to another agent of this process, {rrefs.agent.info.name!r}")
    _check_sendable(handle)
    child, to = ForkId(rrefs.new_id()), peer_of(crossing.peer)
    if isinstance(handle, OwnerHandle):
        rrefs.feed(rrefs.owned.share, handle.rref_id, child, to)
        crossing.undo.append(partial(rrefs.feed, rrefs.owned.share_unsent, handle.rref_id, child, to))
    else:
        rrefs.feed(rrefs.used.share, handle.fork_id, child, to)
        crossing.undo.append(partial(rrefs.feed, rrefs.used.share_unsent, child))
    return child


def arrive(rref_id: RRefId, fork_id: ForkId, owner: PeerId) -> RRef[Any]:
    """What a reference is rebuilt by while a message is unpacked."""
    rrefs = receiver()
    if local.crossing is not None:
        local.crossing.notes[fork_id] = "arrived"
    if owner == rrefs.me:
        actions = rrefs.decide(rrefs.owned.receive, rref_id, fork_id)
        counted = fork_id not in rrefs.lost
        value = rrefs.value_of(rref_id) if counted else _lost(rrefs, rref_id, fork_id)
        handle: Handle = OwnerHandle(rrefs, rref_id, value, counted=counted)
    else:
        member = rrefs.member(owner)
        if member is None:
            raise rrefs.death_of(owner, f"reference {show_id(rref_id)} to its value came too late")
        actions = rrefs.decide(rrefs.used.receive, rref_id, fork_id, owner)
        handle = UserHandle(rrefs, rref_id, fork_id, member)
    rrefs.perform(actions)
    return RRef._of(handle)


def come_home(rref_id: RRefId) -> RRef[Any]:
    """What a reference is rebuilt by on the owner of its value, whose sender keeps its own meanwhile."""
    rrefs, sender = receiver(), local.crossing.peer  # type: ignore[union-attr] # `receiver` has looked
    value = rrefs.come_home(rref_id, peer_of(sender))
    if value is None:
        raise RRefError(
            f"worker {rrefs.agent.info.name!r} keeps no value {show_id(rref_id)} for worker {sender.name!r} any more: "
            "that worker is gone, or never had the reference it sent"
        )
    return RRef._of(OwnerHandle(rrefs, rref_id, value))


def _lost(rrefs: RRefContext, rref_id: RRefId, fork_id: ForkId) -> Outcome:
    """The slot of a value whose handle came back to its owner after its sender's death: it may be forgotten already."""
    died = rrefs.lost.pop(fork_id)
    outcome = Outcome()
    outcome.fail(partial(rrefs.death_of, died, f"reference {show_id(rref_id)} came from it too late"))
    return outcome


class _Idle(type):
    def __setitem__(cls, key: object, value: object) -> None: ...


class _Anything(metaclass=_Idle):
    """Stands for all classes and functions, and all they would make, in a message that is read for its references."""

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        return cls

    @classmethod
    def _ignore(cls, *args: object) -> None: ...

    __setstate__ = append = extend = add = update = _ignore


def _arrive_and_go(rref_id: RRefId, fork_id: ForkId, owner: PeerId) -> None:
    if local.crossing is not None and fork_id not in local.crossing.notes:
        with suppress(WorkerDied):  # an owner that is gone keeps nothing
            arrive(rref_id, fork_id, owner)


def let_go_unread(payload: Any, tensors: list[Tensor]) -> None:
    """A message cannot be unpacked, or was in part: receive the references in it that have not arrived, and let go."""
    if __name__.encode() in bytes(payload):
        unpack(payload, tensors, find_class=_only_references)


def _only_references(module: str, name: str) -> Any:
    return _arrive_and_go if (module, name) == (__name__, arrive.__name__) else _Anything


def settle_late_reply(rrefs: RRefContext, frame: Frame, sender: int) -> None:
    """A reply came that nobody waits for. References in it were counted for this worker: receive them and let go."""
    agent, member = rrefs.agent, rrefs.agent.directory.by_id(sender)
    if frame.kind == FrameKind.REPLY and member is not None and len(frame.payload):
        tensors = frame.take_tensors()
        agent.io_threads.submit(partial(discard, agent.layers, member, frame.payload, tensors))
