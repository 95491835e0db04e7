"""A loan: the value of a reference in a call to its owner, where the caller's handle outlives the call.

The owner keeps the value for that handle anyway, so a loan is just an id: nothing is counted, and nothing to give back.
"""

from typing import Any

from telegrad.errors import ProtocolError
from telegrad.ids import RRefId
from telegrad.rpc.packing import local
from telegrad.rref.outcome import Outcome
from telegrad.rref.references import References


class Loan:
    """Arrives on the owner as the `Outcome` of the value."""

    def __init__(self, rref_id: RRefId) -> None:
        self._rref_id = rref_id

    def __reduce__(self) -> tuple[Any, ...]:
        return lend, (self._rref_id,)


def lend(rref_id: RRefId) -> Outcome:
    """What a loan is rebuilt by."""
    return receiver().value_of(rref_id)


def receiver() -> References:
    """The references of the agent that is unpacking a message."""
    crossing = local.crossing
    if crossing is None:
        raise ProtocolError("a reference can only be unpickled from a message of another worker")
    return crossing.layers.layer(References)
