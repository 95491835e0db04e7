"""The value of a reference as an argument of a call to its owner, where the caller's handle outlives the call.

The owner keeps the value for that handle anyway, so an id is enough: no fork is made, and nothing is counted.
"""

from typing import Any

from telegrad.errors import ProtocolError, RRefError
from telegrad.ids import RRefId, show_id
from telegrad.rpc.current import require_agent
from telegrad.rpc.packing import local
from telegrad.rref.outcome import Outcome
from telegrad.rref.rref_context import RRefContext


class ValueOnOwner:
    """Arrives on the owner as the `Outcome` of the value."""

    method_follows = True  # where it is an argument, for `wire/pickling/blame.py`

    def __init__(self, rref_id: RRefId) -> None:
        self._rref_id = rref_id

    def __reduce__(self) -> tuple[Any, ...]:
        return value_here, (self._rref_id,)


def value_here(rref_id: RRefId) -> Outcome:
    """What unpickling calls on the owner."""
    return receiver().value_of(rref_id)


def id_for_owner(rref: Any) -> RRefId | None:
    """The id of a reference, for `value_kept_here` on its owner; None if the value is lost, or was never made."""
    try:
        rref._handle.check_usable("a method on it")
    except Exception:  # whatever its creation failed with
        return None
    rref_id: RRefId = rref._handle.rref_id
    return rref_id


def value_kept_here(rref_id: int) -> Any:
    """The same by its id alone, which takes no pickling, for a function that was called with it."""
    rrefs = require_agent().layers.layer(RRefContext)
    outcome = rrefs.values.get(RRefId(rref_id))
    if outcome is None or not outcome.done:
        raise RRefError(f"worker {rrefs.agent.info.name!r} keeps no value {show_id(RRefId(rref_id))} any more")
    return outcome.get()


def receiver() -> RRefContext:
    """The references of the agent that is unpacking a message."""
    crossing = local.crossing
    if crossing is None:
        raise ProtocolError("a reference can only be unpickled from a message of another worker")
    return crossing.layers.layer(RRefContext)
