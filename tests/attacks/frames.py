"""Frames for the fuzzer: each message with fields that might be real, and then with one thing wrong.

Random bytes end at the first check. These pass the header, the head and often the message itself, and are wrong where
only the layer that serves them can tell: an id that names nothing, a tensor that does not fit, a count that is a lie.
"""

import random
import struct
import types
import typing
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from telegrad.rpc.trust.exports import definition_of
from telegrad.wire import plain
from telegrad.wire.block_notices import BlockNotice
from telegrad.wire.codec import EMPTY_CALL, pack
from telegrad.wire.frames import HEADER, INLINE, LENGTHS, FrameKind, SegmentSpec, encode_prefix, encode_whole
from telegrad.wire.messages import AnyMessage, Goodbye
from telegrad.wire.tensor.specs import TensorSpec

MESSAGES: tuple[type, ...] = typing.get_args(AnyMessage)
OTHERS = [cls for cls in MESSAGES if not issubclass(cls, BlockNotice | Goodbye)]
_HINTS = {cls: typing.get_type_hints(cls) for cls in MESSAGES}
_FUNCTIONS = (len, abs, torch.neg, torch.add)
_EDGES = (0, 1, 2, 3, -1, 7, 255, 2**31, 2**32, 2**48, 2**62, 2**63 - 1, -(2**63))


class Frames:
    """A source of frames for one connection after the other."""

    def __init__(self, seed: int, incarnation: int, own: int = 5) -> None:
        """`own` is the id of the worker that sends them, for references and contexts of its own."""
        self.random = random.Random(seed)
        self.incarnation = incarnation
        self._number = 0
        self._ids = [(worker << 48) + local for worker in (0, own) for local in (0, 1, 2, 3)]

    def next(self) -> tuple[bytes, type]:
        """One frame, and what it was made from."""
        source = self.random
        # A goodbye, or a word about blocks where there are none, ends the connection: seldom, or little else is seen.
        cls = source.choice(MESSAGES if source.random() < 0.02 else OTHERS)
        message = self._message(cls)
        specs, segments, data = self._tensors() if source.random() < 0.3 else ((), (), b"")
        payload = self._payload()
        self._number += 1
        kind = source.choice((FrameKind.REQUEST, FrameKind.REQUEST, FrameKind.REQUEST, FrameKind.NOTICE))
        if source.random() < 0.02:
            kind = source.choice((FrameKind.REPLY, FrameKind.FAILURE))
        number = self._number if source.random() < 0.95 else source.choice((0, 1, 2**64 - 1, self._number + 5))
        ack = source.choice((0, 0, 0, max(0, self._number - 5), self._number))
        try:
            if segments or source.random() < 0.3:
                raw = encode_prefix(kind, number, ack, message, specs, segments, len(payload), len(data))
                frame, header = raw + payload + data, HEADER.size + LENGTHS.size
            else:
                frame = raw = encode_whole(kind, number, ack, message, payload, specs, data)
                header = HEADER.size
        except (OverflowError, struct.error):
            return self.next()
        chance = source.random()
        if chance < 0.005:
            return self._with_flipped_bytes(frame, header, len(raw)), cls
        if chance < 0.006:
            return self._with_flipped_bytes(frame, 0, header), cls
        if chance < 0.007:
            return frame[: source.randrange(len(frame))], cls
        return frame, cls

    def _with_flipped_bytes(self, frame: bytes, start: int, end: int) -> bytes:
        changed = bytearray(frame)
        for _ in range(self.random.randint(1, 4)):
            changed[self.random.randrange(start, end)] = self.random.randrange(256)
        return bytes(changed)

    # --- what a message is made of ---

    def _message(self, cls: type) -> Any:
        return cls(*[self._value(name, hint) for name, hint in _HINTS[cls].items()])

    def _value(self, name: str, hint: Any) -> Any:
        source = self.random
        if name == "definition":
            return source.choice((b"", definition_of("double"), pack(source.choice(_FUNCTIONS)).payload, b"\x07\x00"))
        if name in ("incarnation", "dead") and hint in (int, str):
            return self.incarnation if hint is int else source.choice(("", "fuzz"))
        while hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            return self._value(name, source.choice(inner))
        if origin is tuple:
            if len(inner) == 2 and inner[1] is Ellipsis:
                return tuple(self._value("", inner[0]) for _ in range(source.choice((0, 1, 2, 5))))
            return tuple(self._value("", each) for each in inner)
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            hints = _HINTS.get(hint) or typing.get_type_hints(hint)
            return hint(*[self._value(field, each) for field, each in hints.items()])
        makers: dict[Any, Any] = {
            int: lambda: source.choice(self._ids) if source.random() < 0.7 else source.choice(_EDGES),
            bool: lambda: source.random() < 0.5,
            float: lambda: source.choice((0.0, 0.001, 0.5, -1.0, 1e308)),
            bytes: lambda: source.randbytes(source.choice((0, 1, 16, 200))),
            str: lambda: source.choice(("", "fuzz", "worker", "shutdown/0", "\x00", "x" * 300, "a/1")),
        }
        return makers[hint]()

    def _payload(self) -> bytes:
        source = self.random
        chance = source.random()
        if chance < 0.3:
            return EMPTY_CALL.payload
        if chance < 0.5:
            return pack(((1, 2.5, "text"), {})).payload
        if chance < 0.6:
            return b"\x07" + plain.encode([1, {"a": (2, None)}])[0]
        if chance < 0.8:
            raw = bytearray(pack(((1, torch.zeros(2), "text"), {})).payload)
            raw[source.randrange(1, len(raw))] = source.randrange(256)
            return bytes(raw)
        if chance < 0.9:
            return bytes([source.choice((0, 1, 2, 3, 4, 7, 8, 9, 255))]) + source.randbytes(source.randrange(60))
        return b""

    def _tensors(self) -> tuple[Sequence[TensorSpec], Sequence[SegmentSpec], bytes]:
        source = self.random
        if source.random() < 0.5:  # small ones need no segments: their bytes follow
            shape = source.choice(((), (1,), (2, 3), (0,)))
            count = 1
            for size in shape:
                count *= size
            return (TensorSpec(0, 0, shape, (), 0, 0, source.choice((0, 1, 2, 3))),), (), bytes(4 * count)
        specs = [
            TensorSpec(
                source.choice((0, 0, 0, 1, 2, 6, 7, 8, 9, 99)),
                source.choice((0, 0, 4, 9, 13, 16, 23, 45, 99)),
                tuple(source.choice((0, 1, 2, 3, 2**40, -1)) for _ in range(source.randrange(4))),
                tuple(source.choice((0, 1, 2, 2**40, -1)) for _ in range(source.choice((0, 0, 1, 2)))),
                source.choice((0, 0, 0, 1, -1, 2**40)),
                source.choice((0, 0, -1, 1, 5)),
                source.choice((0, 1, 2, 31, 64)),
                source.choice(("", "", "cpu", "meta", "cuda:0", "nonsense")),
                tuple(source.choice((1, 2, 0, 7)) for _ in range(source.choice((0, 0, 2, 3)))),
                tuple(source.choice((0.0, 1.5, -1.0)) for _ in range(source.choice((0, 0, 1, 2)))),
            )
            for _ in range(source.choice((1, 1, 2, 3)))
        ]
        # What is wrong with a segment ends the connection at once: seldom, or little else would be seen.
        sizes, blocks = ((-1, 2**40, 64), (1, -2, INLINE)) if source.random() < 0.03 else ((64, 24, 0), (INLINE,))
        segments = [
            SegmentSpec(source.choice(sizes), source.choice(blocks), 0) for _ in range(source.choice((1, 1, 2)))
        ]
        return specs, segments, bytes(64)
