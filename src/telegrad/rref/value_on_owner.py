"""The value of a reference as an argument of a call to its owner, where the caller's handle outlives the call.

The owner keeps the value for that handle anyway, so an id is enough: no fork is made, and nothing is counted.
"""

from typing import Any

from telegrad.errors import ProtocolError
from telegrad.ids import RRefId
from telegrad.rpc.packing import local
from telegrad.rref.outcome import Outcome
from telegrad.rref.rref_context import RRefContext


class ValueOnOwner:
    """Arrives on the owner as the `Outcome` of the value."""

    def __init__(self, rref_id: RRefId) -> None:
        self._rref_id = rref_id

    def __reduce__(self) -> tuple[Any, ...]:
        return value_here, (self._rref_id,)


def value_here(rref_id: RRefId) -> Outcome:
    """What unpickling calls on the owner."""
    return receiver().value_of(rref_id)


def receiver() -> RRefContext:
    """The references of the agent that is unpacking a message."""
    crossing = local.crossing
    if crossing is None:
        raise ProtocolError("a reference can only be unpickled from a message of another worker")
    return crossing.layers.layer(RRefContext)
