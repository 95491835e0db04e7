"""A value is a short payload and a table of tensors. `pack` takes it apart, `unpack` puts it together again.

Tensors, storages and large buffers never pass through pickle: the payload names their place in the table. The first
byte of a payload says how to read the rest. The commonest calls (no arguments; a few tensors and numbers) are not
pickled at all; the rest goes through pickle (`pickling/`). Pickled payloads are only for workers that have proved who
they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from torch import Tensor
from torch.nn import Parameter

from telegrad.errors import ProtocolError
from telegrad.wire import plain
from telegrad.wire.pickling.pickler import dump
from telegrad.wire.pickling.unpickler import PICKLE, PICKLE_AND_BUFFERS, FindClass, load

_NONE, _EMPTY_CALL, _TENSOR, _FLAT_TUPLE, _FLAT_CALL = range(5)
_PLAIN = 7
_FLAT_FORMS = frozenset({_NONE, _EMPTY_CALL, _TENSOR, _FLAT_TUPLE, _FLAT_CALL, _PLAIN})  # nothing in them is pickled
_PAYLOAD_NONE, _PAYLOAD_EMPTY_CALL, _PAYLOAD_TENSOR = bytes([_NONE]), bytes([_EMPTY_CALL]), bytes([_TENSOR])
_MAX_FLAT = 255
_SCALARS = frozenset({int, float, str, bool, bytes, type(None)})
_encode_scalars = msgspec.msgpack.Encoder().encode
_decode_scalars = msgspec.msgpack.Decoder(list[Any]).decode


class Packed(msgspec.Struct, frozen=True):
    """A value taken apart. `tensors` is its table, in the order in which `unpack` wants it."""

    payload: bytes
    tensors: list[Tensor]

    def unsent(self) -> None:
        """It will not be sent after all: what was counted as sent with it is no longer."""


def pack(value: Any, *, main_by_value: bool = False) -> Packed:
    """Take a value apart. A call is packed as the pair (args, kwargs).

    Functions and classes of `__main__` are sent by name, to be found in the receiver's own program; with
    `main_by_value`, for receivers that run another program, they are sent whole.
    """
    flat = pack_flat(value)
    return pack_object(value, main_by_value=main_by_value) if flat is None else flat


def pack_object(value: Any, *, main_by_value: bool = False) -> Packed:
    """The same for a value that is not flat."""
    return Packed(*dump(value, main_by_value))


def pack_plain(value: Any) -> Packed:
    """Take a value apart without pickling anything; SerializationError for what needs it."""
    flat = pack_flat(value)
    if flat is not None:
        return flat
    raw, tensors = plain.encode(value)
    return Packed(bytes((_PLAIN,)) + raw, tensors)


EMPTY_CALL = Packed(_PAYLOAD_EMPTY_CALL, [])  # of a function without arguments


def pack_flat(value: Any) -> Packed | None:
    """Take apart what needs no pickling: None, a tensor, a tuple or a call of tensors and plain scalars."""
    if value is None:
        return Packed(_PAYLOAD_NONE, [])
    cls = type(value)
    if cls is tuple:
        if len(value) == 2 and type(value[0]) is tuple and type(value[1]) is dict and not value[1]:
            return _pack_tuple(_FLAT_CALL, value[0]) if value[0] else EMPTY_CALL
        return _pack_tuple(_FLAT_TUPLE, value)
    if cls is Tensor and not value.__dict__:
        return Packed(_PAYLOAD_TENSOR, [value])
    return None


def is_flat(payload: Any) -> bool:
    """Whether nothing in a payload is pickled."""
    return len(payload) > 0 and payload[0] in _FLAT_FORMS


def unpack(payload: Any, tensors: Sequence[Tensor], *, find_class: FindClass | None = None) -> Any:
    """Put a value together again. `find_class(module, name)` replaces the import of what the payload names."""
    form = payload[0] if len(payload) else -1
    if form == _EMPTY_CALL:
        return (), {}
    if form == _NONE:
        return None
    if form in (_FLAT_CALL, _FLAT_TUPLE):
        values = _unpack_tuple(payload, tensors)
        return (values, {}) if form == _FLAT_CALL else values
    if form == _TENSOR:
        if len(tensors) != 1:
            raise ProtocolError(f"a payload of one tensor came with {len(tensors)}")
        return tensors[0]
    if form == _PLAIN:
        return plain.decode(payload[1:], tensors)
    if form in (PICKLE, PICKLE_AND_BUFFERS):
        return load(payload, tensors, find_class)
    raise ProtocolError(f"unknown payload form {form}" if len(payload) else "a payload of no bytes")


# Flat tuples: one byte for each value, its place in the table counted from 1, or 0 for the next of the scalars.


def _pack_tuple(form: int, values: tuple[Any, ...]) -> Packed | None:
    if len(values) > _MAX_FLAT:
        return None
    head = bytearray((form, len(values)))
    tensors: list[Tensor] = []
    places: dict[int, int] = {}
    scalars: list[Any] = []
    for value in values:
        cls = type(value)
        if (cls is Tensor or cls is Parameter) and not value.__dict__:
            place = places.setdefault(id(value), len(tensors) + 1)
            if place > len(tensors):
                tensors.append(value)
            head.append(place)
        elif cls in _SCALARS:
            head.append(0)
            scalars.append(value)
        else:
            return None
    if scalars:
        try:
            head += _encode_scalars(scalars)
        except (OverflowError, UnicodeEncodeError):  # an int beyond 64 bits, a lone surrogate: pickle can
            return None
    return Packed(bytes(head), tensors)


def _unpack_tuple(payload: Any, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    try:
        end = 2 + payload[1]
        places = payload[2:end]
        if 0 not in places:
            return tuple([tensors[place - 1] for place in places])
        scalars = iter(_decode_scalars(payload[end:]))
        return tuple([tensors[place - 1] if place else next(scalars) for place in places])
    except (IndexError, StopIteration, msgspec.MsgspecError) as error:
        raise ProtocolError(f"a flat payload does not fit its table of {len(tensors)} tensors: {error}") from error
