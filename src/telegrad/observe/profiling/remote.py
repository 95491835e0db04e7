"""Calls made under a profiler, from both ends.

The caller wraps the call (`RpcWithProfiling`); the callee profiles the function in the thread that runs it, with the
older one of torch's profilers, of which every thread can have its own; the events come with the reply. A call that the
function makes meanwhile is made under a profiler, too, so nested calls bring theirs. A pass is told to all its workers
beforehand, and asked for afterwards: gradients go between any two of them.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from telegrad.autograd.context import Context
from telegrad.autograd.registry import registry_of
from telegrad.engine.backward import PassProfiler
from telegrad.errors import ProtocolError
from telegrad.observe.asking import ask_all
from telegrad.observe.profiling.events import Profiled, ProfiledCall, RemoteEvent, encode, local, merge, to_send
from telegrad.observe.profiling.merging import parse_records
from telegrad.rpc.agent import Agent
from telegrad.rpc.client.function_table import name_of
from telegrad.rpc.layer import Around, CallProfiler, OnReply, Served
from telegrad.rpc.request import Request
from telegrad.rpc.workers import Member
from telegrad.wire.messages import AnyMessage, RpcWithProfiling, RpcWithProfilingReply


def key_of(how: str, func: Any, caller: str, callee: str) -> str:
    """What torch names a call in a profile."""
    if isinstance(func, torch.jit.ScriptFunction):
        name = func.qualified_name
    else:
        name = torch.jit._builtins._find_builtin(func) or name_of(func)  # type: ignore[no-untyped-call] # torch's own, without types
    return f"rpc_{how}#{name}({caller} -> {callee})"


class Profiler(CallProfiler, PassProfiler):
    """Remote profiling on one agent."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    def messages(self) -> Mapping[type[Any], Served]:
        """Calls made under a profiler elsewhere."""
        return {RpcWithProfiling: Served(self._serve)}

    # --- the caller ---

    def begin(self, how: str, func: Any, member: Member) -> Around:
        """A call is about to go out from a thread that is being profiled."""
        agent = self.agent
        key = key_of(how, func, agent.info.name, member.name)
        call = ProfiledCall(key, int(agent.info.id), int(member.worker_id))
        note(call)
        return partial(_wrap, call)

    def profiling(self, context: Context) -> contextlib.AbstractContextManager[None]:
        """A pass begins in a thread that is being profiled."""
        plain = self.agent.layers.plain  # others are not asked there, and would refuse
        return contextlib.nullcontext() if plain else profiling_pass(self.agent, context)

    # --- the callee ---

    def _serve(self, request: Request) -> None:
        message = request.message
        assert type(message) is RpcWithProfiling
        profiled = _ProfiledRequest(request, _Profile(self.agent, message.options))
        profiled.message = message.call
        profiled.session.serve(profiled)


def note(call: ProfiledCall) -> None:
    """Leave the moment of a call in the profile of this thread, and remember the call for its end."""
    if local.calls is None:
        local.calls = []
    local.calls.append(call)
    with record_function(call.key):
        call.began = time.perf_counter()


def _wrap(call: ProfiledCall, message: AnyMessage, on_reply: OnReply | None) -> tuple[AnyMessage, OnReply]:
    return RpcWithProfiling(call.key, local.options, message), _Reply(call, on_reply)  # type: ignore[arg-type] # a call


class _Reply:
    """What is done with the reply of a profiled call."""

    def __init__(self, call: ProfiledCall, inner: OnReply | None) -> None:
        self._call = call
        self._inner = inner

    def __call__(self, message: AnyMessage, tensors: list[Tensor]) -> tuple[AnyMessage, list[Tensor]]:
        if type(message) is not RpcWithProfilingReply:
            raise ProtocolError(f"a call made under a profiler was answered with {type(message).__name__}")
        self._call.finish(message.events)
        if self._inner is not None:
            return self._inner(message.reply, tensors)
        return message.reply, tensors

    def sent(self) -> None:
        """The call has left."""
        if self._inner is not None:
            self._inner.sent()

    def unsent(self) -> None:
        """The call did not leave."""
        if self._inner is not None:
            self._inner.unsent()


class ScopedRequest(Request):
    """A request whose function runs within one more context, around those that other layers put on it."""

    __slots__ = ("_inner_scope", "_outer_scope")

    def __init__(self, request: Request, outer_scope: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._inner_scope: Any = None
        self._outer_scope = outer_scope
        super().__init__(request.session, request.frame)
        self.message = request.message
        self.on_tensors, self.on_reply, self.scope = request.on_tensors, request.on_reply, request.scope

    @property
    def scope(self) -> Any:
        """Makes the context in which the function runs."""
        return self._enter

    @scope.setter
    def scope(self, inner: Any) -> None:
        self._inner_scope = inner

    @contextlib.contextmanager
    def _enter(self) -> Iterator[None]:
        with self._outer_scope(), self._inner_scope() if self._inner_scope is not None else contextlib.nullcontext():
            yield


class _ProfiledRequest(ScopedRequest):
    """A request whose reply carries the profile of its function."""

    __slots__ = ("_inner_reply", "_profile")

    def __init__(self, request: Request, profile: "_Profile") -> None:
        self._profile = profile
        super().__init__(request, lambda: profile)

    @property
    def on_reply(self) -> Any:
        """What is done with the reply going out."""
        return self._reply

    @on_reply.setter
    def on_reply(self, inner: Any) -> None:
        self._inner_reply = inner

    def _reply(self, message: AnyMessage, tensors: list[Tensor]) -> AnyMessage:
        if self._inner_reply is not None:
            message = self._inner_reply(message, tensors)
        return RpcWithProfilingReply(encode(self._profile.result()), message)  # type: ignore[arg-type] # a reply: what was asked takes no other


class _Profile:
    """The profile of one thread of this worker, for as long as a function runs in it."""

    def __init__(self, agent: Agent, options: int) -> None:
        self._agent = agent
        self._options = options
        self._calls: list[ProfiledCall] = []
        self._events: list[Any] = []
        self._began = time.perf_counter()
        self._runs = False

    def __enter__(self) -> None:
        self._runs = False
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined] # torch declares no type for it
            return  # somebody profiles this very thread, and sees the events there
        self._runs = True
        self._outer = (local.calls, local.options)
        local.calls, local.options = self._calls, self._options
        self._began = time.perf_counter()
        torch.autograd._enable_profiler_legacy(_config(self._options))  # type: ignore[attr-defined] # torch declares no type for it

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._runs:
            records = torch.autograd._disable_profiler_legacy()  # type: ignore[attr-defined] # torch declares no type for it
            local.calls, local.options = self._outer
            self._events = parse_records(records)

    def result(self) -> Profiled:
        """What the reply carries. Calls that the function made have their own events by now, if it waited for them."""
        events = merge(self._events, self._calls, legacy=True)
        return Profiled(time.perf_counter() - self._began, to_send(events, int(self._agent.info.id)))


RECORD_SHAPES, MEMORY, STACK, FLOPS, MODULES, CUDA = (1 << bit for bit in range(6))


def _config(options: int) -> Any:
    cuda = bool(options & CUDA) and torch.cuda.is_available()
    return torch.autograd.ProfilerConfig(  # type: ignore[attr-defined] # torch declares no type for it
        torch.autograd.ProfilerState.CUDA if cuda else torch.autograd.ProfilerState.CPU,  # type: ignore[attr-defined] # so too
        bool(options & RECORD_SHAPES),
        bool(options & MEMORY),
        bool(options & STACK),
        bool(options & FLOPS),
        bool(options & MODULES),
        torch._C._profiler._ExperimentalConfig(),
    )


# --- passes ---


class PassProfile:
    """What one worker runs of the passes over one context, profiled each time."""

    def __init__(self, agent: Agent, options: int) -> None:
        self._agent = agent
        self._options = options
        self._lock = threading.Lock()
        self._found: list[RemoteEvent] = []
        self._began = time.perf_counter()

    def run(self, work: Any) -> None:
        """Run what may run of a pass."""
        profile = _Profile(self._agent, self._options)
        begin = (time.perf_counter() - self._began) * 1e6
        with profile:
            work()
        with self._lock:
            for event in profile.result().events:
                event.start += begin
                event.end += begin
                self._found.append(event)

    def result(self) -> Profiled:
        """All of it."""
        with self._lock:
            return Profiled(time.perf_counter() - self._began, self._found)


def profile_pass(agent: Agent, data: bytes) -> None:
    """Asked by a root: profile what is run here of passes over a context."""
    context_id, options = msgspec.msgpack.decode(data)
    context = registry_of(agent).get(context_id)
    if context is not None:
        context.profile = PassProfile(agent, options)


def profiled_pass(agent: Agent, data: bytes) -> Profiled:
    """Asked by a root: what was run here, now that the pass is over."""
    context = registry_of(agent).get(msgspec.msgpack.decode(data))
    profile = None if context is None else context.profile
    if context is not None:
        context.profile = None
    return Profiled(0.0, []) if profile is None else profile.result()


@contextlib.contextmanager
def profiling_pass(agent: Agent, context: Context) -> Iterator[None]:
    """Around a pass that begins in a thread that is being profiled: the other workers profile their parts."""
    found = [agent.directory.by_id(worker) for worker in context.participants if worker != agent.info.id]
    members = [member for member in found if member is not None]
    ask_all(agent, members, "profile a pass", encode((context.context_id, local.options)))
    calls = {}
    for member in members:
        key = f"rpc_backward#context {context.context_id}({agent.info.name} -> {member.name})"
        calls[member.incarnation] = ProfiledCall(key, int(agent.info.id), int(member.worker_id))
        note(calls[member.incarnation])
    try:
        yield
    finally:
        answers = ask_all(agent, members, "the profile of a pass", encode(context.context_id))
        for incarnation, call in calls.items():
            call.finish(answers.get(incarnation) or b"")
