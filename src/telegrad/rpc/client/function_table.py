"""Functions by number, the caller's side: one that both workers can find by name is sent once on a link, and is a
number afterwards. Anything else callable (a bound method, a lambda, a partial) travels with its arguments.

The other side is `server/function_table.py`.
"""

import itertools
import operator
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import msgspec
import torch

from telegrad.rpc.trust.exports import definition_of
from telegrad.wire.codec import pack
from telegrad.wire.messages import WITH_A_CALL, PythonCall

BY_NAME = (FunctionType, BuiltinFunctionType, type, str)  # what may have a number
NOT_NUMBERED = 0
_MAX_FUNCTIONS = 4096


class Callee(NamedTuple):
    """A function as a link calls it."""

    number: int
    definition: bytes  # what its number stands for
    what: str  # a call of it, in words
    by_number: PythonCall  # the message of a call, where the other worker knows the number


class FunctionTable:
    """The functions that were sent on one link. Several threads use it; what two of them define at once has two
    numbers, which does no harm."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self.known: dict[Any, Callee] = {}  # those that are defined on the other worker
        self._numbers = itertools.count(NOT_NUMBERED + 1)

    def define(self, func: Any, main_by_value: bool) -> Callee:
        """A number and a definition for a function; NOT_NUMBERED for one that cannot be found by name. Text is the name
        that the other worker has exported one under."""
        number, definition = NOT_NUMBERED, b""
        if type(func) is str:
            number, definition = next(self._numbers), definition_of(func)
        elif _has_a_name(func) and len(self.known) < _MAX_FUNCTIONS:
            packed = pack(sendable(func), main_by_value=main_by_value)
            if not packed.tensors:
                number, definition = next(self._numbers), packed.payload
        what = f"{name_of(func)}() on worker {self._worker!r}"
        return Callee(number, definition, what, PythonCall(number, b""))

    def sent(self, func: Any, callee: Callee) -> None:
        """The call that defines `func` was sent: from now on its number is enough."""
        if callee.number:
            self.known.setdefault(func, callee)


def name_of(func: Any) -> str:
    """How a function is called in errors and traces."""
    if type(func) is str:
        return func
    return getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or repr(func)


def _has_a_name(func: Any) -> bool:
    """Whether both workers can find it under the same name."""
    return isinstance(func, BY_NAME) and "<" not in getattr(func, "__qualname__", "<")


def with_definition(call: Any, definition: bytes) -> Any:
    """The message of a call, with the definition of its function rather than the number alone."""
    if type(call) in WITH_A_CALL:
        return msgspec.structs.replace(call, call=with_definition(call.call, definition))
    return msgspec.structs.replace(call, definition=definition)


class ScriptedFunction:
    """A TorchScript function by its qualified name: it cannot be pickled, but both sides have compiled it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = torch.jit._state._python_cu.find_function(self.name)
        if function is None:
            raise AttributeError(
                f"this worker has not compiled the TorchScript function {self.name!r}: import its module"
            )
        try:
            return function(*args, **kwargs)
        except torch.jit.Error as error:  # a class of its own, for which no caller outside TorchScript looks
            raise RuntimeError(str(error)) from error


class NamedOperator:
    """An operator of `torch.ops`, which cannot be pickled either; it arrives as the operator of that name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return find_operator, (self.name,)


def find_operator(name: str) -> Any:
    """The operator of this name, with its overload where that is named too."""
    return operator.attrgetter(name)(torch.ops)


def sendable(func: Any) -> Any:
    """What is pickled for a function."""
    if isinstance(func, torch.jit.ScriptFunction):
        return ScriptedFunction(func.qualified_name)
    if isinstance(func, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
        return NamedOperator(str(func))
    return func
