"""Taking apart what pickle can: plain pickle first, and cloudpickle for lambdas, closures and local classes.

Tensors, storages and large buffers are put aside into a table, numbered in the order in which the pickler meets them;
the pickle names their places. `unpickler.py` is the other half.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import sys
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import cloudpickle
import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.storage import TypedStorage

from telegrad.errors import SerializationError
from telegrad.wire.pickling import unpickler
from telegrad.wire.pickling.blame import blame
from telegrad.wire.pickling.main_module import (
    Gone,
    finish_function,
    function_of,
    keep_class,
    origin_of,
    versions_of,
    with_gone,
)
from telegrad.wire.pickling.subclasses import put_together, take_apart
from telegrad.wire.pickling.unpickler import BUFFER_COUNT, PICKLE, PICKLE_AND_BUFFERS
from telegrad.wire.pickling.watch import Key, Taken

Reduce = Callable[[Any], tuple[Any, ...]]
Pickled = tuple[bytes, list[Tensor]]  # a payload, and its table

# Below this a buffer costs less inside the pickle than as an entry of the table.
_SMALLEST_BUFFER = 1024
_WITH_SETTER = 6  # the length of a reduction that names what gives an object its state
# A process started by multiprocessing knows its main module by the second name as well.
_MAIN_MODULES = ("__main__", "__mp_main__")

_Cached: Any = type(functools.lru_cache(len))  # a class that has no name of its own
_data: dict[Key, tuple[int, bool]] = {}  # by global of a script: a version, and whether that is data alone
_reducers: dict[type, Reduce] = {}
_recording: Callable[[], bool] = lambda: False  # noqa: E731 - replaced by `set_recording`
# Classes whose objects, subclasses included, do not take pickle's own way.
_special: tuple[type, ...] = (Tensor, UntypedStorage, TypedStorage)


def register_reducer(cls: type, reduce: Reduce) -> Callable[[], None]:
    """Send objects of `cls` and its subclasses as `reduce(obj)` says, in the form of `object.__reduce__`.

    Returns what undoes that."""
    before = _reducers.get(cls)
    _set_reducer(cls, reduce)
    return functools.partial(_set_reducer, cls, before)


def _set_reducer(cls: type, reduce: Reduce | None) -> None:
    global _special  # noqa: PLW0603 - replaced whole, so that a pickler in another thread sees the old or the new one
    if reduce is not None:
        _reducers[cls] = reduce
        _special = (*_special, cls)
    else:
        _special = tuple([each for each in _special if each is not cls])
        _reducers.pop(cls, None)


def set_recording(recording: Callable[[], bool]) -> None:
    """Let the layer above say whether calls made now are recorded for a backward pass."""
    global _recording  # noqa: PLW0603 - set once, by the layer that knows
    _recording = recording


def dump(value: Any, main_by_value: bool, taken: Taken | None = None) -> Pickled:
    """Take a value apart; SerializationError says what in it cannot be. What of scripts it takes along is noted in
    `taken`, and data among it that the receiver has got is left out."""
    try:
        return _dump(_Pickler, value, main_by_value)
    except SerializationError:
        raise
    except Exception:  # pickle says "cannot" in many classes, and reducers of users raise anything
        return _pack_with_cloudpickle(value, main_by_value, taken)


class _SendByValue(Exception):
    """Something of `__main__` is to be sent whole, which takes cloudpickle."""


class _Table:
    """What a pickler puts aside: tensors, then the buffers of other array libraries."""

    def __init__(self, main_by_value: bool, taken: Taken | None = None) -> None:
        self.main_by_value = main_by_value
        self.taken = taken
        self.tensors: list[Tensor] = []
        self.buffers: list[Tensor] = []

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """A `buffer_callback`: true leaves the buffer in the pickle."""
        raw = buffer.raw()
        if raw.nbytes < _SMALLEST_BUFFER:
            return True
        # torch has no read-only tensors, so such a buffer is copied; pickle notes that it was read-only.
        self.buffers.append(torch.frombuffer(bytearray(raw) if raw.readonly else raw, dtype=torch.uint8))
        return False

    def reduce(self, obj: Any, cls: type) -> Any:
        """The reduction of an object of one of the special classes."""
        for base in cls.__mro__:
            if base in _reducers:
                return _reducers[base](obj)
        if issubclass(cls, Tensor):
            return self.reduce_tensor(obj, cls)
        if issubclass(cls, UntypedStorage):
            # Its bytes as a tensor: so a storage and the tensors that lie in it stay together.
            return unpickler.storage_of, (torch.empty(0, dtype=torch.uint8, device=obj.device).set_(obj),)
        return unpickler.typed_storage_of, (obj._untyped_storage, obj.dtype)

    def reduce_tensor(self, tensor: Any, cls: type) -> Any:
        attributes = tensor.__dict__
        made: tuple[Any, tuple[Any, ...]]
        if cls is Tensor or cls is Parameter:
            self.tensors.append(tensor)
            made = (unpickler.tensor_at, (len(self.tensors) - 1,))
        elif cls.__name__ in _BOUND_TO_PROCESS and cls.__module__.startswith("torch."):
            raise SerializationError(f"a {cls.__name__} cannot be sent: {_BOUND_TO_PROCESS[cls.__name__]}")
        elif hasattr(cls, "__tensor_flatten__") and (tensor.requires_grad or cls.__reduce_ex__ in _PLAIN_REDUCTIONS):
            return put_together, take_apart(tensor)
        elif cls.__reduce_ex__ not in _PLAIN_REDUCTIONS:
            if tensor.requires_grad and _recording():
                if is_lazy(tensor):
                    raise SerializationError(
                        f"a {cls.__name__} cannot be sent within a context: it has no shape yet, so it can have no "
                        "gradient; run its module once, or materialize() it, and send it then"
                    )
                raise SerializationError(
                    f"a {cls.__qualname__} that requires grad cannot be sent within a context: it pickles itself "
                    "(__reduce_ex__), and its gradient would be lost. Give its class __tensor_flatten__ and "
                    "__tensor_unflatten__, or send it detached"
                )
            return NotImplemented  # the class knows how to pickle itself; its inner tensors come by here again
        else:
            with torch._C.DisableTorchFunctionSubclass():
                made = (unpickler.as_subclass, (tensor.as_subclass(Tensor), cls))
        return (*made, dict(attributes), None, None, unpickler.set_attributes) if attributes else made


# Classes of torch that have a form to pickle, but none that means anything in another process.
_BOUND_TO_PROCESS = {
    "DTensor": "it belongs to this process's device mesh; send its own part with to_local()",
    "FakeTensor": "it has no data; send a tensor on the meta device instead",
    "FunctionalTensor": "it exists only while torch traces; make the call outside of the traced function",
    "MaskedTensor": "send get_data() and get_mask(), and make it of them there",
}
_PLAIN_REDUCTIONS: tuple[Any, ...] = (Tensor.__reduce_ex__, Parameter.__reduce_ex__)


class _Pickler(pickle.Pickler):
    """Plain pickle with the tensors put aside."""

    def __init__(self, file: io.BytesIO, table: _Table) -> None:
        super().__init__(file, 5, buffer_callback=table.take_buffer)
        self._table = table

    def reducer_override(self, obj: Any) -> Any:
        cls = type(obj)
        if issubclass(cls, _special):
            return self._table.reduce(obj, cls)
        if self._table.main_by_value and _is_of_main(obj):
            raise _SendByValue
        return NotImplemented


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle ships no types
    """Cloudpickle with the tensors put aside, and with `__main__` sent by name unless asked otherwise."""

    def __init__(self, file: io.BytesIO, table: _Table) -> None:
        super().__init__(file, 5, buffer_callback=table.take_buffer)
        self._table = table

    def reducer_override(self, obj: Any) -> Any:
        cls = type(obj)
        if issubclass(cls, _special):
            return self._table.reduce(obj, cls)
        if not self._table.main_by_value and _is_of_main(obj) and _is_found_by_name(obj):
            return NotImplemented
        if isinstance(obj, io.IOBase) and not isinstance(obj, (io.BytesIO, io.StringIO)):
            raise TypeError("an open file belongs to its process")  # cloudpickle would send what it contains
        if isinstance(obj, torch.jit.ScriptModule):
            raise SerializationError(
                "a scripted module cannot be sent: load it on the worker with torch.jit.load, or send the bytes that "
                "torch.jit.save writes"
            )
        if cls is _Cached and (_is_of_main(obj) or not _is_found_by_name(obj)):
            return unpickler.cached, (obj.__wrapped__, obj.cache_parameters())
        if cls is FunctionType and getattr(obj, "_torchdynamo_wrapper_id", None) == id(obj):
            return unpickler.compiled, (obj._torchdynamo_orig_callable, _backend_of(obj))
        reduced = super().reducer_override(obj)
        taken = self._table.taken
        if taken is not None and taken.renewal and isinstance(obj, type) and type(reduced) is tuple:
            return (*reduced[:-1], keep_class) if len(reduced) == _WITH_SETTER else reduced
        return reduced

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        reduced = super()._dynamic_function_reduce(func)
        origin = origin_of(func) if self._table.main_by_value else None
        if origin is None:
            return reduced
        code, _, _, _, closure = reduced[1]
        attributes, slots = reduced[2]
        used = cloudpickle.cloudpickle._extract_code_globals(func.__code__)
        names = with_gone(origin, used, slots["__globals__"])
        versions = versions_of(origin, names)
        if self._table.taken is not None:
            names = _choose(self._table.taken, origin, used, names, versions)
        rest = (attributes, {**slots, "__globals__": {}})
        state = (rest, names, versions)
        return function_of, (origin, code, closure), state, None, None, finish_function


def _choose(
    taken: Taken, origin: str, used: Iterable[str], names: dict[str, Any], versions: dict[str, int]
) -> dict[str, Any]:
    """The globals that go along with a function: all but data which the receiver has got."""
    left_out = set()
    for name in used:
        key, version = (origin, name), versions.get(name, 0)
        taken.note(key, names.get(name, Gone), version)
        if 0 <= version <= taken.sent.get(key, -1) and name in names and _is_data(key, version, names[name]):
            left_out.add(name)
            taken.in_part = True
    return {name: value for name, value in names.items() if name not in left_out} if left_out else names


def _is_data(key: Key, version: int, value: Any) -> bool:
    """Whether no function or class of a script is in a value, which would have to be looked through."""
    known, is_data = _data.get(key, (-1, False))
    if known != version:
        try:
            _Pickler(_Nowhere(), _Table(True)).dump(value)  # type: ignore[arg-type] # of a file it only writes
            is_data = True
        except Exception:
            is_data = False
        _data[key] = (version, is_data)
    return is_data


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


def _dump(
    pickler: type[_Pickler | _CloudPickler], value: Any, main_by_value: bool, taken: Taken | None = None
) -> Pickled:
    table = _Table(main_by_value, taken)
    file = io.BytesIO()
    file.write(b"\0")
    pickler(file, table).dump(value)
    form = PICKLE
    if table.buffers:
        form = PICKLE_AND_BUFFERS
        file.write(BUFFER_COUNT.pack(len(table.buffers)))
    file.seek(0)
    file.write(bytes((form,)))
    return file.getvalue(), table.tensors + table.buffers


def _pack_with_cloudpickle(value: Any, main_by_value: bool, taken: Taken | None) -> Pickled:
    if main_by_value and "__mp_main__" in sys.modules:
        cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])  # as cloudpickle itself does with `__main__`
    try:
        return _dump(_CloudPickler, value, main_by_value, taken)
    except SerializationError:
        raise
    except Exception as error:
        reason = blame(value, lambda part: _dump(_CloudPickler, part, main_by_value))
        raise SerializationError(reason) from error


def _is_of_main(obj: Any) -> bool:
    return isinstance(obj, (FunctionType, type, _Cached)) and obj.__module__ in _MAIN_MODULES


def _is_found_by_name(obj: Any) -> bool:
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def _backend_of(compiled: Any) -> str:
    """What a function was compiled with, by name."""
    context = inspect.getclosurevars(compiled).nonlocals.get("self")
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_name", "inductor")
