"""Values on their way between two workers: the codec, told who sends and who receives.

References (a layer above) are counted when they are sent, so the code that pickles one must know where it goes, and the
code that rebuilds one where it came from. Both are noted here for the time of one message.
"""

import threading
from typing import TYPE_CHECKING, Any

import torch

from telegrad.wire.codec import Packed, pack, unpack

if TYPE_CHECKING:
    from telegrad.rpc.agent import Agent
    from telegrad.rpc.workers import Member


class Crossing:
    """One message being packed or unpacked: between which workers, and what layers above noted about it."""

    __slots__ = ("agent", "notes", "peer")

    def __init__(self, agent: "Agent", peer: "Member") -> None:
        self.agent = agent
        self.peer = peer
        self.notes: dict[Any, Any] = {}


class _Local(threading.local):
    crossing: Crossing | None = None


local = _Local()


def pack_for(agent: "Agent", peer: "Member", value: Any, main_by_value: bool) -> Packed:
    """Pack a value that will be sent to `peer`."""
    before, local.crossing = local.crossing, Crossing(agent, peer)
    try:
        return pack(value, main_by_value=main_by_value)
    finally:
        local.crossing = before


def unpack_from(agent: "Agent", peer: "Member", payload: Any, tensors: list[torch.Tensor]) -> Any:
    """Unpack a value that came from `peer`."""
    before, local.crossing = local.crossing, Crossing(agent, peer)
    try:
        return unpack(payload, tensors)
    finally:
        local.crossing = before
