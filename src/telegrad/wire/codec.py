"""A value is a short payload and a table of tensors. `pack` takes it apart, `unpack` puts it together again.

Tensors, storages and large buffers never pass through pickle: the payload names their place in the table. The first
byte of a payload says how to read the rest. The commonest calls (no arguments; a few tensors and numbers) are not
pickled at all; the rest goes through pickle, and what pickle cannot take (lambdas, closures, local classes) through
cloudpickle. Pickled payloads are only for workers that have proved who they are.
"""

from __future__ import annotations

import importlib
import inspect
import io
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import cloudpickle
import msgspec
import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.storage import TypedStorage

from telegrad.errors import ProtocolError, SerializationError, TelegradError
from telegrad.wire import plain
from telegrad.wire.blame import blame
from telegrad.wire.main_module import finish_function, function_of, origin_of, versions_of
from telegrad.wire.segments import Segment, segment_view
from telegrad.wire.subclasses import put_together, take_apart

Reduce = Callable[[Any], tuple[Any, ...]]
FindClass = Callable[[str, str], Any]

_NONE, _EMPTY_CALL, _TENSOR, _FLAT_TUPLE, _FLAT_CALL, _PICKLE, _PICKLE_AND_BUFFERS, _PLAIN = range(8)
_FLAT_FORMS = frozenset({*range(_PICKLE), _PLAIN})  # those in which nothing is pickled
_PAYLOAD_NONE, _PAYLOAD_EMPTY_CALL, _PAYLOAD_TENSOR = bytes([_NONE]), bytes([_EMPTY_CALL]), bytes([_TENSOR])
_BUFFER_COUNT = struct.Struct("<I")
# Below this a buffer costs less inside the pickle than as an entry of the table.
_SMALLEST_BUFFER = 1024
_MAX_FLAT = 255
_SCALARS = frozenset({int, float, str, bool, bytes, type(None)})
_encode_scalars = msgspec.msgpack.Encoder().encode
_decode_scalars = msgspec.msgpack.Decoder(list[Any]).decode
# A process started by multiprocessing knows its main module by the second name as well.
_MAIN_MODULES = ("__main__", "__mp_main__")

_reducers: dict[type, Reduce] = {}
_recording: Callable[[], bool] = lambda: False  # noqa: E731 - replaced by `set_recording`
# Classes whose objects, subclasses included, do not take pickle's own way.
_special: tuple[type, ...] = (Tensor, UntypedStorage, TypedStorage)


class Packed(msgspec.Struct, frozen=True):
    """A value taken apart. `tensors` is its table, in the order in which `unpack` wants it."""

    payload: bytes
    tensors: list[Tensor]

    def unsent(self) -> None:
        """It will not be sent after all: what was counted as sent with it is no longer."""


def register_reducer(cls: type, reduce: Reduce) -> None:
    """Send objects of `cls` and its subclasses as `reduce(obj)` says, in the form of `object.__reduce__`."""
    global _special  # noqa: PLW0603 - replaced whole, so that a pickler in another thread sees the old or the new one
    _reducers[cls] = reduce
    _special = (*_special, cls)


def set_recording(recording: Callable[[], bool]) -> None:
    """Let the layer above say whether calls made now are recorded for a backward pass."""
    global _recording  # noqa: PLW0603 - set once, by the layer that knows
    _recording = recording


def pack(value: Any, *, main_by_value: bool = False) -> Packed:
    """Take a value apart. A call is packed as the pair (args, kwargs).

    Functions and classes of `__main__` are sent by name, to be found in the receiver's own program; with
    `main_by_value`, for receivers that run another program, they are sent whole.
    """
    flat = pack_flat(value)
    return pack_object(value, main_by_value=main_by_value) if flat is None else flat


def pack_object(value: Any, *, main_by_value: bool = False) -> Packed:
    """The same for a value that is not flat."""
    try:
        return _dump(_Pickler, value, main_by_value)
    except SerializationError:
        raise
    except Exception:  # pickle says "cannot" in many classes, and reducers of users raise anything
        return _pack_with_cloudpickle(value, main_by_value)


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
    if form in (_PICKLE, _PICKLE_AND_BUFFERS):
        return _load(payload, tensors, find_class)
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


# Pickle: the tensors of the object graph are numbered in the order in which the pickler meets them.


class _SendByValue(Exception):
    """Something of `__main__` is to be sent whole, which takes cloudpickle."""


class _Table:
    """What a pickler puts aside: tensors, then the buffers of other array libraries."""

    def __init__(self, main_by_value: bool) -> None:
        self.main_by_value = main_by_value
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
            return _storage_of, (torch.empty(0, dtype=torch.uint8, device=obj.device).set_(obj),)
        return _typed_storage_of, (obj._untyped_storage, obj.dtype)

    def reduce_tensor(self, tensor: Any, cls: type) -> Any:
        attributes = tensor.__dict__
        made: tuple[Any, tuple[Any, ...]]
        if cls is Tensor or cls is Parameter:
            self.tensors.append(tensor)
            made = (_tensor_at, (len(self.tensors) - 1,))
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
                made = (_as_subclass, (tensor.as_subclass(Tensor), cls))
        return (*made, dict(attributes), None, None, _set_attributes) if attributes else made


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
        if cls is FunctionType and getattr(obj, "_torchdynamo_wrapper_id", None) == id(obj):
            return _compiled, (obj._torchdynamo_orig_callable, _backend_of(obj))
        return super().reducer_override(obj)

    def _dynamic_function_reduce(self, func: FunctionType) -> Any:
        reduced = super()._dynamic_function_reduce(func)
        origin = origin_of(func) if self._table.main_by_value else None
        if origin is None:
            return reduced
        code, _, _, _, closure = reduced[1]
        attributes, slots = reduced[2]
        names = slots["__globals__"]
        rest = (attributes, {**slots, "__globals__": {}})
        state = (rest, names, versions_of(origin, names))
        return function_of, (origin, code, closure), state, None, None, finish_function


def _dump(pickler: type[_Pickler | _CloudPickler], value: Any, main_by_value: bool) -> Packed:
    table = _Table(main_by_value)
    file = io.BytesIO()
    file.write(b"\0")
    pickler(file, table).dump(value)
    form = _PICKLE
    if table.buffers:
        form = _PICKLE_AND_BUFFERS
        file.write(_BUFFER_COUNT.pack(len(table.buffers)))
    file.seek(0)
    file.write(bytes((form,)))
    return Packed(file.getvalue(), table.tensors + table.buffers)


def _pack_with_cloudpickle(value: Any, main_by_value: bool) -> Packed:
    if main_by_value and "__mp_main__" in sys.modules:
        cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])  # as cloudpickle itself does with `__main__`
    try:
        return _dump(_CloudPickler, value, main_by_value)
    except SerializationError:
        raise
    except Exception as error:
        reason = blame(value, lambda part: _dump(_CloudPickler, part, main_by_value))
        raise SerializationError(reason) from error


def _is_of_main(obj: Any) -> bool:
    return isinstance(obj, (FunctionType, type)) and obj.__module__ in _MAIN_MODULES


def _is_found_by_name(obj: Any) -> bool:
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


# What a pickled payload names in this module, and the reader that gives those names their meaning.


def _tensor_at(index: int) -> Tensor:
    raise ProtocolError(f"tensor {index} of a payload was read without its table")  # `_Unpickler` puts the table here


def _storage_of(tensor: Tensor) -> UntypedStorage:
    return tensor.untyped_storage()


def _typed_storage_of(storage: UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _backend_of(compiled: Any) -> str:
    """What a function was compiled with, by name."""
    context = inspect.getclosurevars(compiled).nonlocals.get("self")
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_name", "inductor")


def _compiled(function: Any, backend: str) -> Any:
    return torch.compile(function, backend=backend)


def _as_subclass(tensor: Tensor, cls: type[Tensor]) -> Tensor:
    if tensor.requires_grad and tensor.is_leaf:  # stays a leaf
        return tensor.detach().as_subclass(cls).requires_grad_()
    return tensor.as_subclass(cls)


def _set_attributes(tensor: Tensor, attributes: dict[str, Any]) -> None:
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
            return self._tensors.__getitem__ if name == "_tensor_at" else getattr(sys.modules[__name__], name)
        return self._find("__main__" if module == "__mp_main__" else module, name)


def _load(payload: Any, tensors: Sequence[Tensor], find_class: FindClass | None) -> Any:
    buffers: list[memoryview] = []
    if payload[0] == _PICKLE_AND_BUFFERS:
        count = _BUFFER_COUNT.unpack(payload[-_BUFFER_COUNT.size :])[0] if len(payload) > _BUFFER_COUNT.size else 0
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
    try:
        # Not from `sys.modules`: another thread may be half-way through importing it.
        found: Any = importlib.import_module(module)
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
    return found
