"""What a layer above the agent is: one object that says which messages it serves, and what it does when things happen.

The agent moves messages and knows none of their meanings. Each layer (user calls, barriers, references, autograd, the
backward pass) derives from `Layer`, overrides what concerns it, and is put on an agent with `agent.install(layer)`.
Others find it with `agent.layer(Type)`, by its own class or one that it derives from: so a layer can also ask for what
one above it offers, by a class of its own that the upper one derives from.

    happens                                         the layer is asked
    a request or notice came                        the handler in its `messages()`
    a call with values of the user goes out         wrap_call
    tensors came with the reply of any other call   on_plain_reply
    a reply came that nobody waits for any more     on_late_reply
    a payload came that cannot be unpacked          on_discard
    records of members were read                    on_news
    a worker is gone for good                       on_death
    somebody asks why this worker hangs             waits
    a caller's time is up                           whereabouts
    the heartbeat looks whom to ask                 awaited
    all are in their graceful shutdown              before_shutdown
    the agent ends                                  on_close

Layers are asked in the order in which they were installed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from telegrad.ids import WorkerId
from telegrad.rpc.request import Request
from telegrad.rpc.workers import Member
from telegrad.wire.frames import Frame
from telegrad.wire.messages import AnyMessage

Handler = Callable[[Request], None]
L = TypeVar("L")


class Served(NamedTuple):
    """How one kind of message is served."""

    handler: Handler  # replies once, from any thread, now or later; what it raises is the reply
    # A notice that frees memory and is not waited for: it is served when no request waits behind it.
    deferrable: bool = False
    # Whether a graceful shutdown waits for it. Not for requests of Telegrad's own, such as a barrier.
    counts_as_work: bool = True


class OnReply(Protocol):
    """What a layer does about the reply of a call it wrapped. Called once, or never if the call fails.

    If a layer below had wrapped the call before, what that one does is put here as `inner`, to be called by this."""

    def __call__(self, message: AnyMessage, tensors: list[torch.Tensor]) -> tuple[AnyMessage, list[torch.Tensor]]:
        """The reply came: the inner reply, and the tensors to unpack it with."""

    def sent(self) -> None:
        """The call has left: what is to be done before its caller goes on, while the other worker works."""

    def unsent(self) -> None:
        """The call did not leave this worker."""


# Sees a call going out, with its tensors; returns the wrapped call and what to do with the reply, or None.
WrapCall = Callable[[WorkerId, AnyMessage, list[torch.Tensor]], tuple[AnyMessage, OnReply] | None]


class Layer:
    """One layer on one agent. Every method may be left as it is."""

    def messages(self) -> Mapping[type[Any], Served]:
        """The messages this layer serves."""
        return {}

    def wrap_call(
        self, to: WorkerId, message: AnyMessage, tensors: list[torch.Tensor]
    ) -> tuple[AnyMessage, OnReply] | None:
        """A call goes out, with its tensors: the wrapped call and what to do with its reply, or None to let it pass."""

    def on_plain_reply(self, what: Callable[[], str], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors came with the reply of a call that no layer had wrapped: those to unpack it with. At most one layer
        may ask for this."""
        return tensors

    def on_late_reply(self, frame: Frame, sender: WorkerId) -> None:
        """A reply came after its caller had given up. In the thread that reads the link: must not wait."""

    def on_discard(self, payload: Any, tensors: list[torch.Tensor]) -> None:
        """A payload came that cannot be unpacked, or is no longer wanted: give back what was counted in it."""

    def on_news(self, members: Sequence[Member]) -> Sequence[Member]:
        """Records of members were read from the rendezvous store: those that are to be believed now."""
        return members

    def on_death(self, member: Member) -> None:
        """This incarnation of a worker is gone for good. In whichever thread found out: must not wait."""

    def waits(self) -> Sequence[tuple[str, int]]:
        """What is waited for here, beside replies: each in words, with the id of the worker that can end it, or -1."""
        return ()

    def whereabouts(self, member: Member, link: int, request_id: int, seconds: float) -> str:
        """A caller's time is up: what the worker that was asked says of the request, to go on after its name; empty if
        nothing is known in so many seconds. At most one layer may be asked for this."""
        return ""

    def awaited(self) -> Sequence[Member]:
        """Workers that somebody waits for without having asked them anything; the heartbeat asks whether they live."""
        return ()

    def before_shutdown(self) -> None:
        """All workers have come to their graceful shutdown, or this one leaves alone: let go of what others hold."""

    def on_close(self) -> None:
        """The agent ends; nothing can be sent any more."""


# Wraps a call that is wrapped already, and what is done with its reply.
Around = Callable[[AnyMessage, OnReply | None], tuple[AnyMessage, OnReply]]


class CallProfiler(Layer):
    """Who profiles on other workers what calls do there that are made under a profiler; a layer above derives this."""

    def begin(self, how: str, func: Any, member: Member) -> Around:
        """A call of `func`, "sync", "async" or "remote", is about to go out from a thread that is being profiled."""
        raise NotImplementedError


class _ByClass(dict[type[Any], Any]):
    """Layers by their class, and by those that it derives from."""

    def __missing__(self, kind: type[Any]) -> Any:
        raise LookupError(f"no layer of this agent is a {kind.__name__}: install one first")


class _Find(Protocol):
    def __call__(self, kind: type[L], /) -> L | None:
        """The layer of this class, or of one that derives from it; None if there is none."""


class _Layer(Protocol):
    def __call__(self, kind: type[L], /) -> L:
        """The same of one that must be there: LookupError if it is not."""


class Layers:
    """The layers of one agent, and tables of what is asked of them on the path of a call."""

    def __init__(self) -> None:
        self._installed: list[Layer] = []
        self._found = _ByClass()
        # The table's own methods: calls in a context look up layers a few times each.
        self.find: _Find = self._found.get
        self.layer: _Layer = self._found.__getitem__
        self.served: dict[type[Any], Served] = {}  # by the type of message
        self.wrap_call: list[WrapCall] = []  # of those that do wrap calls
        self.on_plain_reply: Callable[[Callable[[], str], list[torch.Tensor]], list[torch.Tensor]] | None = None
        self.whereabouts: Callable[[Member, int, int, float], str] | None = None
        # Where peers are not trusted (`rpc/trust/`): what looks at each request before its handler, and at each value
        # before it is kept for a reference, whether values travel as plain data alone, and what keeps a record of all
        # that leaves and comes.
        self.before_serving: Handler | None = None
        self.before_keeping: Callable[[Request, int, Any], None] | None = None
        self.plain = False
        self.audit: Any = None

    def __iter__(self) -> Iterator[Layer]:
        return iter(tuple(self._installed))  # a copy: compat installs one while others are being asked

    def install(self, layer: Layer) -> None:
        """Put a layer on top of those that are there."""
        messages = layer.messages()
        for kind in messages:
            if kind in self.served:
                raise ValueError(f"{type(layer).__name__} serves {kind.__name__}, which another layer serves already")
        self.served.update(messages)
        if type(layer).wrap_call is not Layer.wrap_call:
            self.wrap_call.append(layer.wrap_call)
        if type(layer).on_plain_reply is not Layer.on_plain_reply:
            self.on_plain_reply = layer.on_plain_reply
        if type(layer).whereabouts is not Layer.whereabouts:
            self.whereabouts = layer.whereabouts
        self._installed.append(layer)
        for kind in type(layer).__mro__:
            if kind is not Layer:
                self._found.setdefault(kind, layer)

    def is_work(self, kind: type[Any]) -> bool:
        """Whether a graceful shutdown waits for requests of this type."""
        served = self.served.get(kind)
        return served is None or served.counts_as_work

    def is_deferrable(self, kind: type[Any]) -> bool:
        """Whether notices of this type may wait until no request waits behind them."""
        served = self.served.get(kind)
        return served is not None and served.deferrable
