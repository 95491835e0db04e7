"""Putting together what was pickled: the names in a pickle get their meaning here, tensors come from the table.

Only for payloads of workers that have proved who they are.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.storage import TypedStorage

from telegrad.errors import ProtocolError, SerializationError, TelegradError
from telegrad.wire.tensor.segments import Segment, segment_view

FindClass = Callable[[str, str], Any]

PICKLE, PICKLE_AND_BUFFERS = 5, 6  # forms of a payload; the others are in `codec.py`
BUFFER_COUNT = struct.Struct("<I")

_OURS = f"{__name__.partition('.')[0]}."
_ours: dict[tuple[str, str], Any] = {}  # what was found in modules of Telegrad itself, which stay as they are


# What a pickled payload names in this module, and the reader that gives those names their meaning.


def tensor_at(index: int) -> Tensor:
    raise ProtocolError(f"tensor {index} of a payload was read without its table")  # `_Unpickler` puts the table here


def storage_of(tensor: Tensor) -> UntypedStorage:
    return tensor.untyped_storage()


def typed_storage_of(storage: UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call] # torch's own, without types


def compiled(function: Any, backend: str) -> Any:
    return torch.compile(function, backend=backend)


def cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def as_subclass(tensor: Tensor, cls: type[Tensor]) -> Tensor:
    if tensor.requires_grad and tensor.is_leaf:  # stays a leaf
        return tensor.detach().as_subclass(cls).requires_grad_()
    return tensor.as_subclass(cls)


def set_attributes(tensor: Tensor, attributes: dict[str, Any]) -> None:
    tensor.__dict__.update(attributes)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, tensors: Sequence[Tensor], buffers: list[memoryview], find_class: FindClass | None
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._tensors = tensors
        self._find = find_class or _import_by_name

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__:
            return self._tensors.__getitem__ if name == "tensor_at" else getattr(sys.modules[__name__], name)
        return self._find("__main__" if module == "__mp_main__" else module, name)


def load(payload: Any, tensors: Sequence[Tensor], find_class: FindClass | None) -> Any:
    """The value of a payload of one of the two forms."""
    buffers: list[memoryview] = []
    if payload[0] == PICKLE_AND_BUFFERS:
        count = BUFFER_COUNT.unpack(payload[-BUFFER_COUNT.size :])[0] if len(payload) > BUFFER_COUNT.size else 0
        if not 0 < count <= len(tensors):
            raise ProtocolError(f"a payload names {count} buffers in a table of {len(tensors)}")
        for tensor in tensors[-count:]:
            if tensor.dtype is not torch.uint8 or not tensor.is_cpu or not tensor.is_contiguous():
                raise ProtocolError(f"a buffer of a payload is not bytes in host memory, but {tensor.dtype}")
            buffers.append(segment_view(Segment(tensor.data_ptr(), tensor.nbytes, tensor)))
        tensors = tensors[:-count]
    file = io.BytesIO(payload)
    file.seek(1)
    try:
        return _Unpickler(file, tensors, buffers, find_class).load()
    except TelegradError:
        raise  # a value that knows why it cannot be rebuilt here, such as a reference to one that is not there yet
    except Exception as error:
        raise SerializationError(
            f"a received value cannot be rebuilt here: {type(error).__name__}: {error}; "
            "see that both workers run the same version of the code that defines it"
        ) from error


def _import_by_name(module: str, name: str) -> Any:
    found: Any = _ours.get((module, name))
    if found is not None:
        return found
    try:
        # Not from `sys.modules`: another thread may be half-way through importing it.
        found = importlib.import_module(module)
    except ImportError as error:
        raise SerializationError(
            f"{module}.{name} was sent by name, but module {module!r} cannot be imported on the receiving worker "
            f"({error}); install it there, or put it on that worker's PYTHONPATH"
        ) from error
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise SerializationError(
            f"{name!r} was sent by name (the RPC pickler does not serialize the code of what both sides can import), "
            f"but module {module!r} of the receiving worker has no such attribute; "
            + (
                "define it in a module that both import; or, where both run one script, before init_rpc: a worker can "
                "be called as soon as it has joined"
                if module == "__main__"
                else "see that both workers have the same version of it, and that importing the module defines it"
            )
        ) from error
    if module.startswith(_OURS) and "." not in name:  # of which there are no more than it has
        _ours[module, name] = found
    return found
