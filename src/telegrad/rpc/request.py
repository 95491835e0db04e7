"""A request on its way through this worker: handlers read it and answer it, layers above put on it what is to be done
around it.
"""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from telegrad.cuda import lanes, order
from telegrad.rpc.devices import Placement
from telegrad.rpc.remote_errors import describe_exception, describe_in_short
from telegrad.rpc.workers import Member, WorkerInfo
from telegrad.wire.codec import Packed
from telegrad.wire.frames import FAILURE, NOTICE, REPLY, Frame
from telegrad.wire.messages import AnyMessage
from telegrad.wire.tensor.returning import mark_spare, storages_of
from telegrad.wire.tensor.small import describe_small
from telegrad.wire.tensor.specs import TensorSpec
from telegrad.wire.tensor.tensors import describe

# Of functions called from elsewhere; their callers are told anyway.
failures = logging.getLogger("telegrad.rpc.failures")

_NOTHING = Packed(b"", [])


class AnswersTo(Protocol):
    """The session that a request came in, as far as the request needs it."""

    member: Member  # who asks
    main_by_value: bool  # whether functions of `__main__` must be sent whole to it
    info: WorkerInfo  # of this worker
    functions: Any  # numbers that stand for functions in this session
    requests: Any  # what became of the caller's requests
    plain: bool  # whether values travel as plain data alone, since the caller is not trusted
    audit: Any  # what keeps a record of what leaves; None for none
    closed: bool  # whether the caller is gone for good
    warnings: Any  # where what a caller can cause is logged, now and then

    cancellations: Any  # of the caller's requests; None if there are none

    def cancelling(self) -> Any:
        """What was cancelled of the caller's requests."""

    @property
    def placement(self) -> Placement:
        """Where tensors go on other workers."""

    def serve(self, request: "Request") -> None:
        """Give a request to the handler of its message."""

    def serve_inner(self, request: "Request") -> None:
        """The same of a message that was found within another."""

    def reply(
        self,
        kind: int,
        request_id: int,
        message: AnyMessage,
        payload: bytes = b"",
        tensors: Sequence[TensorSpec] = (),
        memory: Any = b"",
        *,
        lazy: bool = False,
    ) -> None:
        """Send the reply of a request."""


class Request:
    """One request being served. Handlers read it, and reply once, from any thread, now or later."""

    # Defaults of the class, for most requests set none of these. By layers above that wrap calls: what to do with the
    # tensors that came, and with the reply going out; and what makes the context in which a user's function runs.
    on_tensors: Any = None
    on_reply: Any = None
    scope: Any = None
    recorded = True  # whether the audit, where there is one, has to keep an error of it
    on_lane = False  # whether it has streams of its own, with CUDA tensors
    _came: frozenset[int] = frozenset()  # the storages of large tensors that came with it

    def __init__(self, session: AnswersTo, frame: Frame) -> None:
        self.session = session
        self.frame = frame
        self.message: AnyMessage = frame.message

    def __repr__(self) -> str:
        return f"<Request {self.frame.request_id} of {self.session.member.name!r}: {type(self.message).__name__}>"

    @property
    def caller(self) -> Member:
        """Who asked."""
        return self.session.member

    def take_tensors(self) -> list[torch.Tensor]:
        """The tensors that came with it. Nothing else holds them then."""
        frame = self.frame
        if not frame.is_large:
            return frame.take_tensors()
        tensors = frame.take_tensors()
        self._came = storages_of(tensors)
        return tensors

    def reply(self, message: AnyMessage, packed: Packed = _NOTHING, *, lazy: bool = False) -> None:
        """Answer; lazily if nobody waits for the answer."""
        frame, session, tensors = self.frame, self.session, packed.tensors
        if frame.kind == NOTICE:
            return
        if order.active:
            lanes.answering()
        specs: Any = ()
        memory: Any = b""
        try:
            if tensors:
                if order.active or session.member.device_maps:
                    specs, memory = session.placement.describe(session.member, tensors, reply=True)
                else:
                    specs, memory = describe_small(tensors) or describe(tensors)
            # Once nothing can be refused any more: what a layer notes about a reply must be about one that leaves.
            if self.on_reply is not None:
                message = self.on_reply(message, tensors)
            if self._came and specs and type(memory) is not bytes:
                memory = mark_spare(tensors, memory, self._came)
        except Exception as error:
            packed.unsent()
            self.fail(error)
            return
        if session.audit is not None:
            session.audit.replied(self, message, packed.payload, specs)
        session.reply(REPLY, frame.request_id, message, packed.payload, specs, memory, lazy=lazy)

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        session, info = self.session, self.session.info
        if failures.isEnabledFor(logging.INFO):
            failures.info("On %s, for %s:", info, session.member.info, exc_info=error)
        if self.frame.kind == NOTICE:
            session.warnings.warning("a %s of %s failed: %s", type(self.message).__name__, session.member.name, error)
            return
        if session.audit is not None:
            session.audit.failed(self, error)
        if order.active:
            lanes.answering()
        session.reply(FAILURE, self.frame.request_id, *self.describe(error))

    def describe(self, error: BaseException) -> tuple[Any, ...]:
        """An error as it travels to the caller: whole, or if that is not trusted as little as it needs."""
        session = self.session
        if session.plain:
            return describe_in_short(error, session.info)
        return describe_exception(error, session.info, session.main_by_value)
