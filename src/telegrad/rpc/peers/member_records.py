"""What a worker needs of the rendezvous store once it has joined: the records of others, and a place for its own."""

from collections.abc import Callable
from typing import Any, Protocol

from telegrad.rpc.workers import Member


class MemberRecords(Protocol):
    """The log of members in the rendezvous store (`job/rendezvous/member_log.py`), as far as it is needed here."""

    store: Any
    reads_all: bool  # whether all records are given when one is asked about

    @property
    def is_settling(self) -> bool:
        """Whether records that are not there may come in a moment, since the store was lost."""

    def news(self, take: Callable[[list[Member]], None], about: str | int | None = None) -> None:
        """Give the records appended since the last time to `take`, at least the one `about` a worker."""

    def publish(self, member: Member) -> bool:
        """Append a record."""

    def end_job(self) -> None:
        """All workers have left."""

    def say_last(self, member: Member) -> None:
        """Tell those who monitor the store the last record of this worker, if the store ends with it."""

    def lose(self) -> None:
        """Let the store go."""
