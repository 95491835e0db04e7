"""What comes of dialling a worker: whom a link asks, what it is told, and what callers hear if nobody answers."""

from typing import TYPE_CHECKING, NamedTuple, Protocol

from telegrad.errors import WorkerDied
from telegrad.rpc.client.pending import Slot
from telegrad.rpc.workers import Member
from telegrad.transport.addresses import TCP
from telegrad.transport.connection import Connection

if TYPE_CHECKING:
    from telegrad.rpc.client.connecting import Connecting


class Dialled(NamedTuple):
    """A worker answered."""

    connection: Connection
    main_by_value: bool  # whether functions of `__main__` must be sent whole over it


class Unanswered(NamedTuple):
    """A worker did not answer."""

    why: str
    gone: bool  # whether that is known to be final: to dial again would not help


class LinkEvents(Protocol):
    """Whom a link asks for connections, and tells what happens to it."""

    def dial(self, link: "Connecting", deadline: float) -> Dialled | Unanswered:
        """A new connection for a link. TimeoutError at the deadline of whoever asked for it."""

    def link_lost(self, link: "Connecting") -> None:
        """The connection of a link ended: replace it, or find that the worker is dead."""

    def unanswered(self, member: Member, why: str) -> None:
        """Nobody listens any more where a worker did: it is gone for good."""

    def said_goodbye(self, member: Member, ending: str) -> None:
        """The worker leaves on purpose; nothing more comes from it."""


def does_not_answer(member: Member, outcome: Unanswered) -> WorkerDied:
    """Nobody answers where a worker should."""
    where = ", ".join(f"{a.host}:{a.where}" if a.kind == TCP else a.where for a in member.addresses)
    return WorkerDied(
        f"worker {member.name!r} does not answer at {where} ({outcome.why}). It ended, or cannot be reached from here.",
        worker=member.name,
        incarnation=member.incarnation,
    )


OWN_END = "this worker has shut down"  # how the error of a request begins that was given up with the worker itself


def died_meanwhile(slot: Slot, member: Member, death: WorkerDied) -> WorkerDied:
    """A worker died that had not answered a request."""
    text = f"{death} It was asked: {slot.what()}."
    return WorkerDied(text, worker=member.name, incarnation=member.incarnation)
