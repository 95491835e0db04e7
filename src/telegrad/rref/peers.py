"""Who is who among references: every id names the incarnation that made it, so what is dead stays dead.

A worker that is started again keeps its worker id. References must not mix it up with its predecessor, so to them each
incarnation is a peer of its own, and the ids a peer makes begin with its `PeerId`:

    63          48        38                    0
    | worker id | generation |      counter      |

The generation counts how often the worker was started; it is part of its incarnation, which all workers know.
"""

from collections.abc import Iterator
from itertools import count
from typing import NewType

from telegrad.ids import GENERATION_BITS, LOCAL_BITS, WorkerId, generation_of
from telegrad.rpc.workers import Member

PeerId = NewType("PeerId", int)

_COUNTER_BITS = LOCAL_BITS - GENERATION_BITS
_COUNTER_MASK = (1 << _COUNTER_BITS) - 1


def peer_of(member: Member) -> PeerId:
    """The peer that an incarnation of a worker is."""
    return PeerId(member.worker_id << GENERATION_BITS | generation_of(member.incarnation))


def worker_id_of(peer: PeerId) -> WorkerId:
    """The worker that a peer is an incarnation of."""
    return WorkerId(peer >> GENERATION_BITS)


def make_id(peer: PeerId, number: int) -> int:
    """The id of the `number`-th thing a peer makes."""
    return peer << _COUNTER_BITS | number


def ids_of(peer: PeerId) -> Iterator[int]:
    """Ids for the things a peer makes. `next` on it is atomic under the GIL, so threads may share it."""
    return count(make_id(peer, 0))


def maker_of(id_: int) -> PeerId:
    """The peer that made this id."""
    return PeerId(id_ >> _COUNTER_BITS)


def show_id(id_: int) -> str:
    """An id in the form torch shows it in."""
    return f"GloballyUniqueId(created_on={worker_id_of(maker_of(id_))}, local_id={id_ & _COUNTER_MASK})"


def short_id(id_: int) -> str:
    """An id for people: the worker that made it, and its number there."""
    return f"{worker_id_of(maker_of(id_))}.{id_ & _COUNTER_MASK}"
