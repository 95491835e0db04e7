"""Values as plain data, for workers that do not trust each other's code: reading one calls nothing the sender names.

Tensors go into the table; None, booleans, numbers, text, bytes, lists, tuples, sets and dicts travel as they are, and
so do dataclasses that both sides have registered under one name, whose fields are checked against their types. In
msgpack: a scalar is itself, everything else an array that begins with its tag.
"""

import dataclasses
import threading
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor
from torch.nn import Parameter

from telegrad.errors import ProtocolError, SerializationError

LIST, TUPLE, DICT, SET, FROZENSET, TENSOR, DATACLASS, BIG, COMPLEX, SIZE = range(10)
MAX_DEPTH = 32
_MAX_DIGITS = 4096
MOST_VALUES = 1 << 20  # in one message: each may take 64 bytes here and one on its way. Large data travels as tensors
# Keys of a dict, and members of a set, whose hashes its sender chooses. Any number may have the same hash, and each is
# compared with all the others then; of numbers of 64 bits only a few do, and the hashes of text are not to be foreseen.
MOST_CHOSEN_KEYS = 1024
_SAFE_KEYS = frozenset({str, bytes, float, bool, type(None)})
_SCALARS = frozenset({type(None), bool, float, str, bytes})
_SEQUENCES: dict[type, int] = {list: LIST, tuple: TUPLE, set: SET, frozenset: FROZENSET, torch.Size: SIZE}
_MAKERS: dict[int, Callable[[list[Any]], Any]] = {
    LIST: list,
    TUPLE: tuple,
    SET: set,
    FROZENSET: frozenset,
    SIZE: torch.Size,
}

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_decode_array = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode

C = TypeVar("C", bound=type)


class _Registered(typing.NamedTuple):
    cls: type
    name: str
    fields: tuple[str, ...]
    types: dict[str, Any]


_by_class: dict[type, _Registered] = {}
_by_name: dict[str, _Registered] = {}
_lock = threading.Lock()


def register_dataclass(cls: C, name: str | None = None) -> C:
    """Let objects of a dataclass travel as plain data, under a name that both sides register. May be a decorator.

    Examples:
        >>> @rpc.register_dataclass
        ... @dataclasses.dataclass
        ... class Measurement:
        ...     size: int
    """
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls!r} is not a dataclass; only those can be registered to travel as plain data")
    name = cls.__qualname__ if name is None else name
    fields = tuple(field.name for field in dataclasses.fields(cls) if field.init)
    entry = _Registered(cls, name, fields, typing.get_type_hints(cls))
    with _lock:
        if _by_name.get(name, entry).cls is not cls:
            raise ValueError(f"a dataclass is registered as {name!r} already: {_by_name[name].cls!r}")
        _by_class[cls] = _by_name[name] = entry
    return cls


def encode(value: Any) -> tuple[bytes, list[Tensor]]:
    """A value as bytes and its tensors. SerializationError names what cannot travel as plain data."""
    tensors: list[Tensor] = []
    raw = _encode(_reduce(value, tensors, 0))
    if len(raw) > MOST_VALUES and not are_few(raw):
        raise SerializationError(f"more than {MOST_VALUES} values in one message; send numbers as a tensor")
    return raw, tensors


def _reduce(value: Any, tensors: list[Tensor], depth: int) -> Any:
    cls = type(value)
    if cls in _SCALARS:
        return value
    if cls is int:
        return value if -(2**63) <= value < 2**63 else _big(value)
    if depth >= MAX_DEPTH:
        raise SerializationError(f"plain data may be {MAX_DEPTH} deep at most")
    if cls is Tensor or cls is Parameter:
        tensors.append(value)
        return [TENSOR, len(tensors) - 1]
    if cls in _SEQUENCES:
        return [_SEQUENCES[cls], *[_reduce(item, tensors, depth + 1) for item in value]]
    if cls is dict:
        return [DICT, *[_reduce(part, tensors, depth + 1) for pair in value.items() for part in pair]]
    if cls is complex:
        return [COMPLEX, value.real, value.imag]
    entry = _by_class.get(cls)
    if entry is not None:
        fields = [_reduce(getattr(value, field), tensors, depth + 1) for field in entry.fields]
        return [DATACLASS, entry.name, *fields]
    raise SerializationError(
        f"a {cls.__module__}.{cls.__qualname__} is not plain data, and nothing else travels between workers that do "
        "not trust each other's code: send tensors, numbers, text, containers, or a dataclass registered with "
        "rpc.register_dataclass"
    )


def _big(value: int) -> list[Any]:
    digits = hex(value)
    if len(digits) > _MAX_DIGITS:
        raise SerializationError(f"an integer of {len(digits)} hexadecimal digits is too long to send")
    return [BIG, digits]


def decode(raw: Any, tensors: Sequence[Tensor]) -> Any:
    """Put a value together again. ProtocolError if it is not one."""
    try:
        if len(raw) > MOST_VALUES and not are_few(raw):
            raise ProtocolError(f"more than {MOST_VALUES} values came in one message")
        return _build(_decode(raw), tensors, 0)
    except ProtocolError:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError, KeyError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"what came is not plain data: {error}") from error


def are_few(raw: Any) -> bool:
    """Whether there are no more values in it than may be, looked at array by array before memory is taken for them."""
    left, todo = MOST_VALUES, [memoryview(raw)]
    while todo:
        part = todo.pop()
        first = part[0] if part else 0
        if 0x90 <= first <= 0x9F:
            left -= first & 0x0F
        elif first in (0xDC, 0xDD):
            left -= int.from_bytes(part[1 : 3 if first == 0xDC else 5], "big")
        elif 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
            raise ProtocolError("a map is not plain data")
        else:
            continue
        if left < 0:
            return False
        try:
            todo += [memoryview(each) for each in _decode_array(part)]
        except msgspec.DecodeError as error:
            raise ProtocolError(f"what came is not plain data: {error}") from error
    return True


def _check_keys(keys: Sequence[Any]) -> None:
    if len(keys) > MOST_CHOSEN_KEYS:
        chosen = sum(type(key) not in _SAFE_KEYS and not _is_short(key) for key in keys)
        if chosen > MOST_CHOSEN_KEYS:
            raise ProtocolError(f"{chosen} keys that are not text, bytes or short numbers; at most {MOST_CHOSEN_KEYS}")


def _is_short(key: Any) -> bool:
    return type(key) is int and -(2**63) <= key < 2**64


def _build(found: Any, tensors: Sequence[Tensor], depth: int) -> Any:
    if type(found) is not list:
        if type(found) in _SCALARS or type(found) is int:
            return found
        raise ProtocolError(f"a {type(found).__name__} is not plain data")
    if depth >= MAX_DEPTH or not found or type(found[0]) is not int:
        raise ProtocolError("what came as plain data is too deep, or begins with no tag")
    tag, parts = found[0], found[1:]
    if tag in _MAKERS:
        built = [_build(part, tensors, depth + 1) for part in parts]
        if tag in (SET, FROZENSET):
            _check_keys(built)
        return _MAKERS[tag](built)
    if tag == DICT:
        built = [_build(part, tensors, depth + 1) for part in parts]
        _check_keys(built[::2])
        return dict(zip(built[::2], built[1::2], strict=True))
    if tag == TENSOR:
        (index,) = parts
        if type(index) is not int or not 0 <= index < len(tensors):
            raise ProtocolError(f"there is no tensor {index!r} among {len(tensors)}")
        return tensors[index]
    if tag == COMPLEX:
        return complex(*map(float, parts))
    if tag == BIG:
        (digits,) = parts
        if type(digits) is not str or len(digits) > _MAX_DIGITS:
            raise ProtocolError("an integer is malformed")
        return int(digits, 16)
    if tag == DATACLASS:
        return _build_dataclass(parts, tensors, depth)
    raise ProtocolError(f"{tag} is not a tag of plain data")


def _build_dataclass(parts: list[Any], tensors: Sequence[Tensor], depth: int) -> Any:
    name, *fields = parts
    entry = _by_name.get(name) if type(name) is str else None
    if entry is None:
        raise ProtocolError(f"no dataclass is registered here as {name!r}")
    if len(fields) != len(entry.fields):
        raise ProtocolError(f"{len(fields)} fields came for {name!r}, which has {len(entry.fields)}")
    values = {}
    for field, part in zip(entry.fields, fields, strict=True):
        value = _build(part, tensors, depth + 1)
        try:
            values[field] = msgspec.convert(
                value, entry.types[field], strict=True, from_attributes=True, dec_hook=_as_it_is
            )
        except msgspec.ValidationError as error:
            raise ProtocolError(f"field {field!r} of {name!r}: {error}") from error
    return entry.cls(**values)


def _as_it_is(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"expected a {kind.__name__}, got a {type(value).__name__}")
    return value
