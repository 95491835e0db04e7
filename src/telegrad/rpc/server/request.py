"""A request on its way through this worker: handlers read it, layers above put on it what is to be done around it."""

from typing import TYPE_CHECKING, Any

from telegrad.wire.frames import Frame
from telegrad.wire.messages import AnyMessage

if TYPE_CHECKING:
    from telegrad.rpc.server.session import Session
    from telegrad.rpc.workers import Member


class Request:
    """One request being served. Handlers read it, and reply once, from any thread, now or later."""

    __slots__ = ("came", "frame", "message", "on_reply", "on_tensors", "scope", "session")

    def __init__(self, session: "Session", frame: Frame) -> None:
        self.session = session
        self.frame = frame
        self.message: AnyMessage = frame.message
        self.came: frozenset[int] = frozenset()  # the storages of large tensors that came with it
        # Set by layers above that wrap calls: what to do with the tensors that came, and with the reply going out.
        self.on_tensors: Any = None
        self.on_reply: Any = None
        # Makes the context in which a user's function runs.
        self.scope: Any = None

    def __repr__(self) -> str:
        return f"<Request {self.frame.request_id} of {self.session.member.name!r}: {type(self.message).__name__}>"

    @property
    def caller(self) -> "Member":
        """Who asked."""
        return self.session.member
