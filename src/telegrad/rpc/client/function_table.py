"""Functions by number, the caller's side: one that both workers can find by name is sent once on a link, and is a
number afterwards. Anything else callable (a bound method, a lambda, a partial) travels with its arguments.

One that is sent whole, since it is of this program's `__main__`, takes along the globals it uses. Those are watched:
what has another value at the time of a call goes before the call, and only that.

The other side is `server/function_table.py`.
"""

import itertools
import operator
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import msgspec
import torch

from telegrad.errors import RRefError, SerializationError
from telegrad.rpc.trust.exports import definition_of
from telegrad.wire.codec import pack, pack_of_script
from telegrad.wire.definitions import ANEW, NEWS, OF_A_SCRIPT, OF_A_SCRIPT_IN_PART
from telegrad.wire.messages import WITH_A_CALL, PythonCall
from telegrad.wire.pickling.watch import Key, Renewal, Taken, Watch

BY_NAME = (FunctionType, BuiltinFunctionType, type, str)  # what may have a number
NOT_NUMBERED = 0
_MAX_FUNCTIONS = 4096
_MOST_BYTES = 96 * 2**20  # of all definitions, and of one change; beyond a third more the worker ends the connection


class Callee(NamedTuple):
    """A function as a link calls it."""

    number: int
    definition: bytes  # what its number stands for
    what: str  # a call of it, in words
    by_number: PythonCall  # the message of a call, where the other worker knows the number


class Defined(NamedTuple):
    """What is sent for a function that is not called by its number alone."""

    callee: Callee
    carried: bytes  # its definition, or what it has to know before it runs, or nothing
    resent: bytes  # the same for a connection over which nothing can be relied on
    watch: Watch | None = None
    taken: Taken | None = None  # what the other worker has when it has got this


class FunctionTable:
    """The functions that were sent on one link. Several threads use it; what two of them define at once has two
    numbers, and what two of them find changed is sent twice, which does no harm."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self.known: dict[Any, Callee] = {}  # those that are defined on the other worker
        self._watched: dict[Any, tuple[Callee, Watch]] = {}  # the same, of those that use globals of a script
        self._sent: dict[Key, int] = {}  # by global of a script: the version that the other worker has
        self._careful = False  # whether something once arrived that could not be taken in: definitions are whole then
        self._numbers = itertools.count(NOT_NUMBERED + 1)
        self._left = _MAX_FUNCTIONS  # to be defined
        self._bytes_left = _MOST_BYTES  # for that

    def define(self, func: Any, main_by_value: bool) -> Defined:
        """A number and a definition for a function; NOT_NUMBERED for one that cannot be found by name. Text is the name
        that the other worker has exported one under."""
        if type(func) is str:
            definition = definition_of(func)
            return Defined(self._callee(func, next(self._numbers), definition), definition, definition)
        if _has_a_name(func):
            if main_by_value and (watched := self._watched.get(func)) is not None:
                return self._renew(func, *watched)
            if self._left > 0:
                taken = Taken({} if self._careful else self._sent)
                value = sendable(func)
                try:
                    packed = pack_of_script(value, taken) if main_by_value else pack(value)
                except RRefError:  # it uses a reference, which can be sent with a call
                    return self._whole(func)
                if not packed.tensors and len(packed.payload) < self._bytes_left:
                    self._bytes_left -= len(packed.payload)  # whether it is sent or not
                    watch = taken.watch()
                    form = b"" if watch is None else OF_A_SCRIPT_IN_PART if taken.in_part else OF_A_SCRIPT
                    definition = form + packed.payload
                    callee = self._callee(func, next(self._numbers), definition)
                    return Defined(callee, definition, definition, watch, taken)
        return self._whole(func)

    def _renew(self, func: Any, callee: Callee, watch: Watch) -> Defined:
        if watch.holds():
            return Defined(callee, b"", callee.definition)
        form, value = ANEW, sendable(func)
        if watch.since is None:
            taken = Taken({}, renewal=True)
        else:
            taken, news = watch.look(self._sent)
            if not news:
                return Defined(callee, b"", callee.definition, taken.watch(), taken)
            form, value = NEWS, Renewal(news, taken)
        try:
            packed = pack_of_script(value, taken)
        except SerializationError:  # a reference, which can be sent with a call; or the call says why not
            return self._whole(func)
        if packed.tensors or len(packed.payload) >= _MOST_BYTES:
            return self._whole(func)
        changes = form + packed.payload
        return Defined(callee, changes, changes, taken.watch(), taken)

    def forget_sent(self) -> None:
        """The other worker could not take in what came of a script, and whatever came with it: what it has is not known
        any more. All that a function uses goes with its next call, as does the function."""
        self._careful = True
        self._sent = {}
        for func, (callee, watch) in list(self._watched.items()):
            self._watched[func] = (callee, watch._replace(since=None))

    def _whole(self, func: Any) -> Defined:
        return Defined(self._callee(func, NOT_NUMBERED, b""), b"", b"")

    def _callee(self, func: Any, number: int, definition: bytes) -> Callee:
        return Callee(number, definition, f"{name_of(func)}() on worker {self._worker!r}", PythonCall(number, b""))

    def sent(self, func: Any, defined: Defined) -> None:
        """The call that defines `func`, or says what has changed for it, was sent: from now on that is known."""
        callee, taken = defined.callee, defined.taken
        if taken is not None:
            for key, version in taken.versions.items():
                if version > self._sent.get(key, -1):
                    self._sent[key] = version
        if defined.watch is not None:
            if func not in self._watched:
                self._left -= 1
            self._watched[func] = (callee, defined.watch)
        elif callee.number and defined.carried:
            self._left -= func not in self.known and type(func) is not str
            self.known.setdefault(func, callee)


def name_of(func: Any) -> str:
    """How a function is called in errors and traces."""
    if type(func) is str:
        return func
    name: str = getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or repr(func)
    return name.replace("_VariableFunctionsClass.", "torch.")  # a class of torch's, where most of its functions live


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
