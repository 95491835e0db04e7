"""Values on their way between two workers: the codec, told who sends and who receives.

References (a layer above) are counted when they are sent, so the code that pickles one must know where it goes, and the
code that rebuilds one where it came from. Both are noted here for the time of one message.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from telegrad.errors import CallRefused, SerializationError
from telegrad.rpc.layer import Layers
from telegrad.rpc.workers import Member
from telegrad.wire.codec import NOT_FLAT, Packed, pack_flat, pack_object, pack_plain, unpack, unpack_flat

log = logging.getLogger("telegrad.rpc")


class Crossing:
    """One message being packed or unpacked: between which workers, and what layers above noted about it."""

    __slots__ = ("kept", "layers", "notes", "peer", "undo")

    def __init__(self, layers: Layers, peer: Member, kept: list[Any] | None = None) -> None:
        self.layers = layers  # those of the worker that packs or unpacks
        self.peer = peer
        self.kept = kept  # of a call being packed: what has to live until it has been answered
        self.notes: dict[Any, Any] = {}  # by what was counted: what it became
        self.undo: list[Callable[[], None]] = []  # what to do if the message is never sent


class Kept:
    """What has to live until a call is answered, and what to do if the call never arrives."""

    __slots__ = ("_undo", "things")

    def __init__(self, things: Sequence[Any], undo: Sequence[Callable[[], None]]) -> None:
        self.things = things
        self._undo = undo

    def unsent(self) -> None:
        """Count nothing of it any longer. Once: the sender may have said so already."""
        undo, self._undo = self._undo, ()
        for each in undo:
            each()


class Counted(Packed, frozen=True):
    """A packed value with something in it that was counted as sent."""

    def unsent(self) -> None:
        """Count it no longer."""
        self.kept.unsent()


class _Local(threading.local):
    crossing: Crossing | None = None


local = _Local()


def pack_for(layers: Layers, peer: Member, value: Any, main_by_value: bool) -> Packed:
    """Pack a value that will be sent to `peer`."""
    flat = pack_flat(value)
    return pack_counted(layers, peer, value, main_by_value) if flat is None else flat


def pack_counted(
    layers: Layers, peer: Member, value: Any, main_by_value: bool, kept: list[Any] | None = None
) -> Packed:
    """The same for one that is not tensors and numbers alone: there may be something in it that is counted. With a call
    a list, for what has to live until that has been answered."""
    if layers.plain:
        return pack_plain(value)
    crossing = Crossing(layers, peer, kept)
    before, local.crossing = local.crossing, crossing
    try:
        packed = pack_object(value, main_by_value=main_by_value)
    except BaseException as error:
        for undo in crossing.undo:
            undo()
        if kept is None and type(error) is SerializationError:
            error.of_result = True
        raise
    finally:
        local.crossing = before
    if crossing.undo or kept:
        return Counted(packed.payload, packed.tensors, Kept(kept or (), crossing.undo))
    return packed


def unpack_from(layers: Layers, peer: Member, payload: Any, tensors: list[torch.Tensor]) -> Any:
    """Unpack a value that came from `peer`."""
    value = unpack_flat(payload, tensors)
    if value is not NOT_FLAT:
        return value
    if layers.plain:
        raise CallRefused("rule 'no pickle': a value came pickled; it was not read")
    crossing = Crossing(layers, peer)
    before, local.crossing = local.crossing, crossing
    try:
        return unpack(payload, tensors)
    except BaseException:
        _discard(crossing, payload, tensors)
        raise
    finally:
        local.crossing = before


def discard(layers: Layers, peer: Member, payload: Any, tensors: list[torch.Tensor]) -> None:
    """A value that came from `peer` will not be unpacked: what was counted in it is given back."""
    crossing = Crossing(layers, peer)
    before, local.crossing = local.crossing, crossing
    try:
        _discard(crossing, payload, tensors)
    finally:
        local.crossing = before


def _discard(crossing: Crossing, payload: Any, tensors: list[torch.Tensor]) -> None:
    if crossing.layers.plain:
        return  # nothing pickled is ever read, and plain data has nothing that was counted
    for layer in crossing.layers:
        try:
            layer.on_discard(payload, tensors)
        except Exception:
            log.exception("giving back what came from %s and cannot be used failed", crossing.peer.name)
