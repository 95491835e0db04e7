"""At most once: what became of a caller's requests, so that one that comes again is not run again. Pure.

A request is running, then answered, then acknowledged: the caller has the reply and will not ask again. Until then the
reply is kept. What was acknowledged in order is one number; what was acknowledged by name, because an older request
still runs, is a few ranges. Notices have no reply and nobody acknowledges them, so the latest are remembered.

Several threads serve one caller. A request is running until its reply was kept and sent. So one that is not running has
its reply here, or never ran, or is acknowledged: `take` looks in that order.
"""

import threading
import time
from collections.abc import Iterable
from typing import Any

from telegrad.errors import ProtocolError
from telegrad.rpc.server.ranges import Ranges

MOST_KEPT = 16384  # replies of one caller that it has not acknowledged
_REMEMBERED_NOTICES = 1024  # well above what a link sends again over a new connection (`KEPT_NOTICES` there)

Reply = bytes | tuple[Any, ...]  # what goes back to the caller: a frame, or the pieces of a large one
NEW: Reply = ()


class AtMostOnce:
    """The requests and notices of one caller."""

    def __init__(self) -> None:
        self.running: dict[int, tuple[type, float]] = {}  # what is being served and since when, by request id
        # Answered, but not yet known to have arrived. Kept before it is sent: the acknowledgement may come first.
        self.replies: dict[int, Reply] = {}
        self.acknowledged = 0  # every reply below has arrived
        self._forgotten = Ranges()  # answered, and acknowledged by name though an older request still runs
        self._has_forgotten = False  # whether there are any
        self._noticed: dict[int, None] = {}  # notices taken lately, oldest first
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<AtMostOnce: {len(self.running)} running, {len(self.replies)} kept, below {self.acknowledged} done>"

    def numbers(self) -> tuple[tuple[int, ...], tuple[int, ...], int, str]:
        """The requests that run, those whose replies are kept, below which all are done, and which others are."""
        return tuple(self.running), tuple(self.replies), self.acknowledged, repr(self._forgotten)

    def take(self, request_id: int, kind: type) -> Reply | None:
        """A request came: NEW if it is to be run now, its reply if that has to be sent again, None if neither.

        Raises ProtocolError if the caller lets replies pile up. One of ours says what it has after 256 of them."""
        replies = self.replies
        with self._lock:  # the same request may come twice, from two connections, to two threads
            if request_id in self.running:
                return replies.get(request_id)  # about to be sent, perhaps over a connection that is lost
            if replies:
                reply = replies.get(request_id)
                if reply is not None:
                    return reply
                if len(replies) > MOST_KEPT or self._forgotten.count > MOST_KEPT:
                    raise ProtocolError(f"it has not acknowledged {len(replies)} replies; no more are kept for it")
            if request_id < self.acknowledged or (self._has_forgotten and request_id in self._forgotten):
                return None
            self.running[request_id] = (kind, time.monotonic())
            return NEW

    def is_answered(self, request_id: int) -> bool:
        """Whether a request has run; not if it is running, or has not come."""
        with self._lock:
            if request_id in self.running:
                return False
            return request_id in self.replies or request_id < self.acknowledged or request_id in self._forgotten

    def acknowledge(self, limit: int) -> None:
        """All replies below `limit` have arrived."""
        self.acknowledged = limit
        replies = self.replies
        replies.pop(limit - 1, None)  # where one request follows the other, there is no more
        if replies:
            for request_id in tuple(replies):  # a copy: other threads reply meanwhile
                if request_id < limit:
                    replies.pop(request_id, None)
        if self._has_forgotten:
            with self._lock:
                self._forgotten.drop_below(limit)
                self._has_forgotten = bool(self._forgotten)

    def acknowledge_named(self, request_ids: Iterable[int]) -> None:
        """These replies have arrived, though an older request still runs; that they were run stays known."""
        with self._lock:
            for request_id in request_ids:
                if self.replies.pop(request_id, None) is not None:
                    self._forgotten.add(request_id)
                    self._has_forgotten = True

    def is_news(self, notice_id: int) -> bool:
        """A notice came: whether it has not been taken before. One without a number always is."""
        noticed = self._noticed
        with self._lock:
            if notice_id in noticed:
                return False
            if notice_id:
                noticed[notice_id] = None
                if len(noticed) > _REMEMBERED_NOTICES:
                    del noticed[next(iter(noticed))]
        return True
