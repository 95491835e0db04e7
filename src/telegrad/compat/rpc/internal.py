"""Stands in for `torch.distributed.rpc.internal`: how programs take values apart, and name calls in a profile."""

import io
import traceback
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from telegrad.rpc.current import require_agent
from telegrad.wire.codec import pack, unpack
from telegrad.wire.pickling.pickler import register_reducer

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]


class RPCExecMode(Enum):
    """The ways to make a call."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function and what to call it with."""

    func: Callable[..., Any]
    args: Sequence[Any] | None
    kwargs: dict[str, Any] | None


class RemoteException(NamedTuple):
    """An exception on its way home, as torch carries it."""

    msg: str
    exception_type: type[BaseException]


class _InternalRPCPickler:
    """Takes values apart into bytes and a table of tensors. A program may subclass it and pass an instance to
    `api._use_rpc_pickler`."""

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        """Send objects of a class as `reducer(obj)` says; the first registration of a class counts."""
        if obj_class not in _registered:
            _registered.add(obj_class)
            register_reducer(obj_class, reducer)

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Bytes, and the tensors they refer to."""
        packed = pack(obj)
        return packed.payload, packed.tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
        """The value again."""
        return unpack(binary_data, tensor_table)


def _load_script_module(saved: bytes) -> Any:
    return torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call] # torch's own, without types


def _save_script_module(module: Any) -> tuple[Any, ...]:
    file = io.BytesIO()
    torch.jit.save(module, file)
    return _load_script_module, (file.getvalue(),)


def send_script_modules() -> Callable[[], None]:
    """Let scripted modules travel, as torch's pickler does; by itself Telegrad refuses them. Returns what undoes it."""
    return register_reducer(torch.jit.ScriptModule, _save_script_module)


_registered: set[type] = set()
_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Bytes, and the tensors they refer to."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
    """The value again."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _run_function(python_udf: PythonUDF | BaseException) -> Any:
    """What a call returns; what it raises comes as a RemoteException."""
    try:
        if isinstance(python_udf, BaseException):
            raise python_udf
        return python_udf.func(*(python_udf.args or ()), **(python_udf.kwargs or {}))
    except Exception as error:
        text = f"On {require_agent().info}:\n{error!r}\n{traceback.format_exc()}"
        return RemoteException(text, type(error))


def _handle_exception(result: Any) -> None:
    """Raise what a RemoteException carries; anything else is left alone."""
    if not isinstance(result, RemoteException):
        return
    try:
        error = result.exception_type(result.msg)
    except Exception as refusal:
        raise RuntimeError(
            f"Failed to create original exception type. Error msg was {refusal} "
            f"Original exception on remote side was {result.msg}"
        ) from refusal
    raise error


def run_pickled(payload: bytes, tensors: list[torch.Tensor]) -> Any:
    """Runs on the callee: a call that the caller took apart with a pickler of its own."""
    udf = deserialize(payload, tensors)
    return udf.func(*(udf.args or ()), **(udf.kwargs or {}))


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """The name under which a call appears in a profile."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def _start_record_function(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dest_worker_name: str
) -> Any:
    """Begin to record a call in the running profile; whoever asked ends it."""
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined] # torch declares no type for it
        raise AssertionError("Autograd profiler should be enabled.")
    record = torch.autograd._RecordFunction()  # type: ignore[attr-defined] # torch declares no type for it
    key = _build_rpc_profiling_key(exec_type, func_name, current_worker_name, dest_worker_name)
    torch.autograd._run_before_callbacks(record, key)  # type: ignore[attr-defined] # torch declares no type for it
    return record
