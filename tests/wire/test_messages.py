"""Every record of `wire.messages` comes back equal, and nothing that is not exactly such a record comes back at all."""

import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.errors import ProtocolError
from telegrad.wire import block_notices, messages
from telegrad.wire.frames import Frame, decode_record

RECORDS: tuple[type[Any], ...] = typing.get_args(messages.AnyMessage)
FEW = settings(max_examples=settings().max_examples // 5)  # each of some forty records draws these
INT64 = st.integers(0, 2**64 - 1)


def _values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, typing.NewType):
        return _values(kind.__supertype__)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(_values, args))
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return st.lists(_values(args[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(_values, args))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _records(kind)
    plain = {
        int: INT64,
        bool: st.booleans(),
        str: st.text(max_size=20),
        bytes: st.binary(max_size=20),
        float: st.floats(allow_nan=False),
    }
    return plain[kind]


def _records(record: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(record)
    return st.builds(record, *(_values(hints[name]) for name in record.__struct_fields__))


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode((1, 7, 0, message))


def decode(raw: bytes) -> Any:
    return decode_record(raw).message


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.__name__)
@FEW
@given(data=st.data())
def test_round_trip(record: type[Any], data: st.DataObject) -> None:
    message = data.draw(_records(record))
    back = decode(encode(message))
    assert back == message
    assert type(back) is record


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.__name__)
@FEW
@given(data=st.data())
def test_wrong_counts_and_types(record: type[Any], data: st.DataObject) -> None:
    fields = list(msgspec.to_builtins(data.draw(_records(record)), builtin_types=(bytes,)))
    assert fields[0] == msgspec.inspect.type_info(record).tag
    with pytest.raises(ProtocolError, match="malformed"):
        decode(encode([*fields, 1]))
    if len(fields) > 1:
        with pytest.raises(ProtocolError, match="malformed"):
            decode(encode(fields[:-1]))
        place = data.draw(st.integers(1, len(fields) - 1))
        wrong = {"a": "map"}  # no field of any record is a map
        with pytest.raises(ProtocolError, match="malformed"):
            decode(encode([*fields[:place], wrong, *fields[place + 1 :]]))


def test_tags_are_unique_and_every_record_is_listed() -> None:
    tags = [msgspec.inspect.type_info(r).tag for r in RECORDS]
    assert len(set(tags)) == len(tags)
    tagged = [
        c
        for c in [*vars(messages).values(), *vars(block_notices).values()]
        if isinstance(c, type)
        and issubclass(c, messages.Message | block_notices.BlockNotice)
        and c.__struct_config__.tag is not None
    ]
    assert set(tagged) == set(RECORDS)


def test_every_record_says_what_it_means_and_cannot_change() -> None:
    for record in RECORDS:
        assert record.__doc__
        assert record.__struct_config__.frozen
        assert record.__struct_config__.forbid_unknown_fields


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(None),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([1, 7, 0, []]),
        msgspec.msgpack.encode([1, 7, 0, [999]]),
        msgspec.msgpack.encode([1, 7, 0, ["PythonCall"]]),
        msgspec.msgpack.encode([1, 7, 0, [5]]) + b"\x00",
        msgspec.msgpack.encode([1, 7, 0]),
        msgspec.msgpack.encode([9, 7, 0, [5]]),
        msgspec.msgpack.encode([1, -7, 0, [5]]),
        msgspec.msgpack.encode([1, 7, "0", [5]]),
        msgspec.msgpack.encode([1, 7, 0, [5], [], b"", None, [], 0.0]),
        msgspec.msgpack.encode([1, 7, 0, [5], [[1]]]),
        msgspec.msgpack.encode([1, 7, 0, [5], [], "payload"]),
        msgspec.msgpack.encode([1, 7, 0, [5], [], b"", "data"]),
        msgspec.msgpack.encode([1, 7, 0, [5], [], b"", None, [[1, 2]]]),
        msgspec.msgpack.encode([1, 7, 0, [5], [], b"", None, [[1, 2, "x"]]]),
        b"\x91" * 100_000,
    ],
    ids=range(19),
)
def test_records_that_are_none(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_record(raw)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_record_or_a_protocol_error(raw: bytes) -> None:
    try:
        assert type(decode_record(raw)) is Frame
    except ProtocolError:
        pass
