"""How many bytes a value holds that is kept for a peer: of its tensors, and of text and bytes in it."""

import dataclasses
from typing import Any

import torch


def held_by(value: Any) -> dict[int, int]:
    """Bytes by the storage that has them, so that what several values share can be counted once; text and bytes are
    under the value itself. Looks into containers and dataclasses; other objects are the worker's own."""
    held: dict[int, int] = {}
    text, seen, todo = 0, {id(value)}, [value]
    while todo:
        each = todo.pop()
        inner: Any = ()
        if isinstance(each, torch.Tensor):
            key, nbytes = _storage_of(each)
            held[key] = nbytes
        elif isinstance(each, str | bytes | bytearray):
            text += len(each)
        elif isinstance(each, dict):
            inner = [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            inner = each
        elif dataclasses.is_dataclass(each) and not isinstance(each, type):
            inner = [getattr(each, field.name, None) for field in dataclasses.fields(each)]
        for one in inner:
            if id(one) not in seen:
                seen.add(id(one))
                todo.append(one)
    if text:
        held[id(value)] = text
    return held


def _storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """What tells its storage from others as long as it lives, and the bytes of that."""
    try:
        storage = tensor.untyped_storage()
        return storage._cdata, storage.nbytes()
    except (NotImplementedError, RuntimeError):  # a sparse one: as much as if it were written out
        return id(tensor), tensor.numel() * tensor.element_size()
