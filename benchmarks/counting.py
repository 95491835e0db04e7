"""Counts messages, bytes and requests to the rendezvous store, in any process that asks for it.

Wrapped around what every message and every request goes through, so what is counted is what is sent, pings, notices and
acknowledgements included.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from multiprocessing.sharedctypes import RawArray
from typing import Any

from telegrad.rpc.client import link
from telegrad.rpc.job.rendezvous.store_client import Prefixed
from telegrad.rpc.server import answers
from telegrad.transport import connection, outgoing

KINDS = ("messages", "bytes", "store requests", "bytes out of the store")
_MESSAGES, _BYTES, _REQUESTS, _OUT = range(len(KINDS))
_ENCODERS = (
    (connection, "encode_whole"),
    (connection, "encode_prefix"),
    (outgoing, "encode_whole"),
    (answers, "encode_whole"),
    (link, "encode_whole"),
)


class Counts:
    """One row of numbers for each process; all processes that are forked later see the same memory."""

    def __init__(self, processes: int) -> None:
        self._numbers = RawArray("q", processes * len(KINDS))
        self._lock = threading.Lock()

    def add(self, row: int, kind: int, number: int) -> None:
        """Only the process of that row may add to it."""
        with self._lock:
            self._numbers[row * len(KINDS) + kind] += number

    def total(self) -> list[int]:
        """The sum of all rows."""
        return [sum(self._numbers[kind :: len(KINDS)]) for kind in range(len(KINDS))]


def count_here(counts: Counts, row: int) -> None:
    """Count from now on what this process sends and asks. Call it before the first agent is made."""

    def wrapped(function: Any, note: Callable[[Any, Sequence[Any]], None]) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            note(result, args)
            return result

        return counting

    def sent(frame: Any, _: Sequence[Any]) -> None:
        counts.add(row, _MESSAGES, 1)
        counts.add(row, _BYTES, len(frame))

    def asked(answer: Any, _: Sequence[Any]) -> None:
        counts.add(row, _REQUESTS, 1)
        counts.add(row, _OUT, len(answer) if isinstance(answer, bytes) else 8)

    def asked_for_all(answer: Any, _: Sequence[Any]) -> None:
        counts.add(row, _REQUESTS, 2 if answer is not None else 1)
        counts.add(row, _OUT, sum(map(len, answer or ())))

    for module, name in _ENCODERS:
        setattr(module, name, wrapped(getattr(module, name), sent))

    def sent_again(_: Any, args: Sequence[Any]) -> None:  # the answer to a ping, which is encoded once and for all
        sent(args[1], ())

    answers.Answers._send_again = wrapped(answers.Answers._send_again, sent_again)  # type: ignore[method-assign]
    for name in ("set", "get", "add", "check", "compare_set", "delete_key"):
        setattr(Prefixed, name, wrapped(getattr(Prefixed, name), asked))
    Prefixed.get_all = wrapped(Prefixed.get_all, asked_for_all)  # type: ignore[method-assign]
