"""A value is a short payload and a table of tensors. `pack` takes it apart, `unpack` puts it together again.

Tensors, storages and large buffers never pass through pickle: the payload names their place in the table. The first
byte of a payload says how to read the rest. The commonest calls (no arguments; a few tensors and numbers) are not
pickled at all; the rest goes through pickle (`pickling/`). Pickled payloads are only for workers that have proved who
they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Annotated, Any, NamedTuple

import msgspec
from torch import Tensor
from torch.nn import Parameter

from telegrad.errors import ProtocolError
from telegrad.wire import plain
from telegrad.wire.pickling.pickler import dump
from telegrad.wire.pickling.unpickler import PICKLE, PICKLE_AND_BUFFERS, FindClass, load
from telegrad.wire.pickling.watch import Taken

_NONE, _EMPTY_CALL, _TENSOR, _FLAT_TUPLE, _FLAT_CALL = range(5)
_PLAIN = 7
_FLAT_FORMS = frozenset({_NONE, _EMPTY_CALL, _TENSOR, _FLAT_TUPLE, _FLAT_CALL, _PLAIN})  # nothing in them is pickled
_PAYLOAD_NONE, _PAYLOAD_EMPTY_CALL, _PAYLOAD_TENSOR = bytes([_NONE]), bytes([_EMPTY_CALL]), bytes([_TENSOR])
NOT_FLAT = object()
_MAX_FLAT = 255
_MOST_SHAPES = 4096
_SCALARS = frozenset({int, float, str, bool, bytes, type(None)})
_FLAT_TYPES = _SCALARS | {Tensor, Parameter}
_encode_scalars = msgspec.msgpack.Encoder().encode
_decode_scalars = msgspec.msgpack.Decoder(Annotated[list[Any], msgspec.Meta(max_length=_MAX_FLAT)]).decode


class Packed(msgspec.Struct, frozen=True):
    """A value taken apart. `tensors` is its table, in the order in which `unpack` wants it."""

    payload: bytes
    tensors: list[Tensor]
    kept: Any = None  # what was counted, and what of a call has to live until that has been answered

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


def pack_of_script(value: Any, taken: Taken) -> Packed:
    """The same with `main_by_value` for a function or class; what it takes along of its script is noted in `taken`."""
    return Packed(*dump(value, True, taken))


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


def pack_call(args: tuple[Any, ...]) -> Packed | None:
    """The same for a call without keywords: `pack_flat((args, {}))`."""
    return _pack_tuple(_FLAT_CALL, args) if args else EMPTY_CALL


def is_flat(payload: Any) -> bool:
    """Whether nothing in a payload is pickled."""
    return len(payload) > 0 and payload[0] in _FLAT_FORMS


def is_modest(payload: Any) -> bool:
    """Whether a payload of one who is not trusted has no more values than may be. To be asked before it is unpacked:
    where scalars are expected there may be anything. (What is plain data is checked as it is read.)"""
    if len(payload) <= plain.MOST_VALUES or payload[0] not in (_FLAT_TUPLE, _FLAT_CALL):
        return True
    return plain.are_few(payload[2 + payload[1] :])


def unpack_flat(payload: Any, tensors: Sequence[Tensor]) -> Any:
    """Put a value together again in which nothing is pickled; NOT_FLAT for a payload of another form."""
    form = payload[0] if payload else -1
    if form == PICKLE:
        return NOT_FLAT
    if form == _TENSOR:
        if len(tensors) != 1:
            raise ProtocolError(f"a payload of one tensor came with {len(tensors)}")
        return tensors[0]
    if form == _NONE:
        return None
    if form == _FLAT_TUPLE:
        return _unpack_tuple(payload, tensors)
    if form == _FLAT_CALL:
        return _unpack_tuple(payload, tensors), {}
    if form == _EMPTY_CALL:
        return (), {}
    return plain.decode(payload[1:], tensors) if form == _PLAIN else NOT_FLAT


def unpack_call(payload: Any, tensors: Sequence[Tensor]) -> Any:
    """The same where it is most likely the arguments of a call."""
    form = payload[0] if payload else -1
    if form == _FLAT_CALL:
        return _unpack_tuple(payload, tensors), {}
    return ((), {}) if form == _EMPTY_CALL else unpack_flat(payload, tensors)


def unpack(payload: Any, tensors: Sequence[Tensor], *, find_class: FindClass | None = None) -> Any:
    """Put a value together again. `find_class(module, name)` replaces the import of what the payload names."""
    value = unpack_flat(payload, tensors)
    if value is not NOT_FLAT:
        return value
    form = payload[0] if len(payload) else -1
    if form in (PICKLE, PICKLE_AND_BUFFERS):
        return load(payload, tensors, find_class)
    raise ProtocolError(f"unknown payload form {form}" if len(payload) else "a payload of no bytes")


# Flat tuples: one byte for each value, its place in the table counted from 1, or 0 for the next of the scalars. What
# depends on the types of the values alone is made once, for all calls with arguments of these types.


class _Shape(NamedTuple):
    """What tuples of values of the same types have in common."""

    head: bytes  # the payload up to its scalars
    tensors: Callable[[Any], tuple[Any, ...]] | None  # takes them out of the tuple
    scalars: Callable[[Any], tuple[Any, ...]] | None


_shapes: dict[tuple[Any, ...], _Shape] = {}  # by form and types


def _pack_tuple(form: int, values: tuple[Any, ...]) -> Packed | None:
    if not _FLAT_TYPES.issuperset(map(type, values)):
        return None
    key = (form, *map(type, values))
    shape = _shapes.get(key) or _shape_of(key)
    if shape is None:
        return None
    payload, take_tensors, take_scalars = shape
    tensors: list[Tensor] = []
    if take_tensors is not None:
        tensors = list(take_tensors(values))
        for tensor in tensors:
            if tensor.__dict__:
                return None
        if len(tensors) > 1 and len(set(map(id, tensors))) < len(tensors):
            payload, tensors = _name_once(payload, tensors)
    if take_scalars is not None:
        try:
            payload += _encode_scalars(take_scalars(values))
        except (OverflowError, UnicodeEncodeError):  # an int beyond 64 bits, a lone surrogate: pickle can
            return None
    return Packed(payload, tensors)


def _name_once(payload: bytes, tensors: list[Tensor]) -> tuple[bytes, list[Tensor]]:
    """The same where a tensor comes more than once: it arrives as one."""
    table = list({id(tensor): tensor for tensor in tensors}.values())
    places = {id(tensor): place for place, tensor in enumerate(table, 1)}
    named = [places[id(tensors[place - 1])] if place else 0 for place in payload[2:]]
    return payload[:2] + bytes(named), table


def _shape_of(key: tuple[Any, ...]) -> _Shape | None:
    form, *types = key
    if len(types) > _MAX_FLAT:
        return None
    tensors = [index for index, cls in enumerate(types) if cls not in _SCALARS]
    scalars = [index for index, cls in enumerate(types) if cls in _SCALARS]
    places = [tensors.index(index) + 1 if index in tensors else 0 for index in range(len(types))]
    shape = _Shape(bytes((form, len(types), *places)), _take(tensors), _take(scalars))
    if len(_shapes) < _MOST_SHAPES:
        _shapes[key] = shape
    return shape


def _take(indices: Sequence[int]) -> Callable[[Any], tuple[Any, ...]] | None:
    """What takes the values at these places out of a sequence."""
    if len(indices) == 1:
        return itemgetter(slice(indices[0], indices[0] + 1))
    return itemgetter(*indices) if indices else None


def _unpack_tuple(payload: Any, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    try:
        end = 2 + payload[1]
        order, has_scalars = _order_of(bytes(payload[2:end]), len(tensors))
        return order([*tensors, *_decode_scalars(payload[end:])] if has_scalars else tensors)
    except (IndexError, msgspec.MsgspecError) as error:
        raise ProtocolError(f"a flat payload does not fit its table of {len(tensors)} tensors: {error}") from error


@functools.lru_cache(maxsize=1024)
def _order_of(places: bytes, tensors: int) -> tuple[Callable[[Any], tuple[Any, ...]], bool]:
    """What takes the values of a tuple, in order, out of its tensors and scalars one after the other, and whether there
    are scalars."""
    indices, scalar = [], tensors
    for place in places:
        if place > tensors:
            raise IndexError(f"there is no tensor {place}")
        indices.append(place - 1 if place else scalar)
        scalar += not place
    if len(indices) > 1:
        return itemgetter(*indices), scalar > tensors
    return lambda values: tuple(values[index] for index in indices), scalar > tensors
