"""Ids that cross the wire: 64-bit numbers that say who made them.

    63          48           38                   0
    | worker id | generation |      counter       |
    |<------ a peer -------->|

A worker that is started again keeps its worker id. What others remember of its predecessor must not be mixed up with
it, so each incarnation is a peer of its own, and the ids it makes begin with its `PeerId`. The generation counts how
often the worker was started; it is part of its incarnation, which all workers know.

Each kind of id is its own type, so that mypy notices when two are swapped. An id never repeats, and whoever holds one
can tell who made it without asking.
"""

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any, NewType

WorkerId = NewType("WorkerId", int)
Incarnation = NewType("Incarnation", int)
PeerId = NewType("PeerId", int)  # one incarnation of a worker
RequestId = NewType("RequestId", int)
ContextId = NewType("ContextId", int)
MessageId = NewType("MessageId", int)  # one Send and its Recv share one
PassId = NewType("PassId", int)
RRefId = NewType("RRefId", int)
ForkId = NewType("ForkId", int)

WORKER_BITS = 16
GENERATION_BITS = 10
COUNTER_BITS = 64 - WORKER_BITS - GENERATION_BITS
MAX_WORKER_ID = (1 << WORKER_BITS) - 1
MAX_GENERATION = (1 << GENERATION_BITS) - 1
MAX_COUNTER = (1 << COUNTER_BITS) - 1


def draw_incarnation(generation: int) -> Incarnation:
    """A random number for a worker that starts; it ends in how often a worker with its id was started before."""
    if not 0 <= generation <= MAX_GENERATION:
        raise ValueError(f"generation {generation} is not within 0..{MAX_GENERATION}")
    return Incarnation((random.SystemRandom().getrandbits(63 - GENERATION_BITS) | 1) << GENERATION_BITS | generation)


def generation_of(incarnation: Incarnation) -> int:
    """How often a worker with the same id was started before this incarnation."""
    return incarnation & MAX_GENERATION


@functools.lru_cache(maxsize=4096)
def peer_id(worker: int, generation: int) -> PeerId:
    """The peer that a worker is in one of its generations."""
    if not 0 <= worker <= MAX_WORKER_ID:
        raise ValueError(f"worker id {worker} is not within 0..{MAX_WORKER_ID}")
    if not 0 <= generation <= MAX_GENERATION:
        raise ValueError(f"generation {generation} is not within 0..{MAX_GENERATION}")
    return PeerId(worker << GENERATION_BITS | generation)


def worker_id_of(peer: PeerId) -> WorkerId:
    """The worker that a peer is an incarnation of."""
    return WorkerId(peer >> GENERATION_BITS)


def make_id(peer: PeerId, number: int) -> int:
    """The id of the `number`-th thing that a peer makes."""
    if not 0 <= number <= MAX_COUNTER:
        raise ValueError(f"number {number} is not within 0..{MAX_COUNTER}")
    return peer << COUNTER_BITS | number


def ids_of(peer: PeerId) -> Iterator[Any]:
    """Ids for things of one kind that a peer makes. `next` on it is atomic under the GIL, so threads may share it."""
    return itertools.count(make_id(peer, 0))


def random_ids_of(peer: PeerId) -> Iterator[Any]:
    """The same, for ids that nobody should guess. They may repeat, once in very many."""
    draw = random.SystemRandom().getrandbits
    return iter(lambda: make_id(peer, draw(COUNTER_BITS)), None)


def last_id_of(worker: WorkerId) -> int:
    """The highest id that any incarnation of a worker can make."""
    return make_id(peer_id(worker, MAX_GENERATION), MAX_COUNTER)


def maker_of(id_: int) -> PeerId:
    """The peer that made this id."""
    return PeerId(id_ >> COUNTER_BITS)


def worker_of(id_: int) -> WorkerId:
    """The worker that made this id, in whichever incarnation."""
    return WorkerId(id_ >> (GENERATION_BITS + COUNTER_BITS))


def number_of(id_: int) -> int:
    """The number of this id among those its peer made."""
    return id_ & MAX_COUNTER


def show_id(id_: int) -> str:
    """An id in the form torch shows it in."""
    return f"GloballyUniqueId(created_on={worker_of(id_)}, local_id={number_of(id_)})"


def short_id(id_: int) -> str:
    """An id for people: the worker that made it, and its number there."""
    return f"{worker_of(id_)}.{number_of(id_)}"
