"""The turn of a session: one thread has it at a time, and may lose it to another while it is busy."""

from typing import TYPE_CHECKING

from telegrad.wire.frames import NOTICE, Frame

if TYPE_CHECKING:
    from telegrad.rpc.server.session import Session


class SessionTurn:
    """The right of one thread to serve one session."""

    __slots__ = ("frame", "owes", "seen", "session")

    def __init__(self, session: "Session") -> None:
        self.session = session
        self.frame: Frame | None = None  # the one that is being served
        self.seen: Frame | None = None  # the one at the timer's last look
        self.owes = False  # whether replies wait for those behind them: written when it ends, or has no more to serve

    @property
    def main_by_value(self) -> bool:
        """Whether what is of `__main__` must be sent whole to the caller."""
        return self.session.main_by_value

    @property
    def has_more(self) -> bool:
        """Whether more has come than the request that is being served."""
        return self.session.has_more(self)

    def give_up(self) -> None:
        """Let another thread serve the session."""
        self.session.give_up(self)

    def is_cancelled(self) -> bool:
        """Whether the caller of the request that is being served no longer waits for it, or is gone for good."""
        frame, cancelled = self.frame, self.session.cancellations
        if frame is None or frame.kind == NOTICE:  # notices have numbers of their own
            return False
        return self.session.closed or (cancelled is not None and frame.request_id in cancelled)

    def sleeping(self, change: int) -> None:
        """Count this thread among those that wait."""
        self.session.sleeping(change)
