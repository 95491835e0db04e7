"""Ids that cross the wire: 64-bit numbers with the creating worker's id in the top 16 bits.

Each kind of id is its own type, so that mypy notices when two are swapped. An id never repeats within an incarnation
of the worker that made it, and whoever holds one can tell who made it without asking.
"""

import itertools
import random
from collections.abc import Iterator
from typing import NewType

WorkerId = NewType("WorkerId", int)
Incarnation = NewType("Incarnation", int)
RequestId = NewType("RequestId", int)
ContextId = NewType("ContextId", int)
MessageId = NewType("MessageId", int)  # one Send and its Recv share one
PassId = NewType("PassId", int)
RRefId = NewType("RRefId", int)
ForkId = NewType("ForkId", int)

WORKER_BITS = 16
LOCAL_BITS = 64 - WORKER_BITS
MAX_WORKER_ID = (1 << WORKER_BITS) - 1
MAX_LOCAL_ID = (1 << LOCAL_BITS) - 1
GENERATION_BITS = 10
MAX_GENERATION = (1 << GENERATION_BITS) - 1


def draw_incarnation(generation: int) -> Incarnation:
    """A random number for a worker that starts; it ends in how often a worker with its id was started before."""
    if not 0 <= generation <= MAX_GENERATION:
        raise ValueError(f"generation {generation} is not within 0..{MAX_GENERATION}")
    return Incarnation((random.SystemRandom().getrandbits(63 - GENERATION_BITS) | 1) << GENERATION_BITS | generation)


def generation_of(incarnation: Incarnation) -> int:
    """How often a worker with the same id was started before this incarnation."""
    return incarnation & MAX_GENERATION


def make_id(worker: int, local: int) -> int:
    """The 64-bit id of the `local`-th thing made on `worker`."""
    if not 0 <= worker <= MAX_WORKER_ID:
        raise ValueError(f"worker id {worker} is not within 0..{MAX_WORKER_ID}")
    if not 0 <= local <= MAX_LOCAL_ID:
        raise ValueError(f"local id {local} is not within 0..{MAX_LOCAL_ID}")
    return worker << LOCAL_BITS | local


def worker_of(id_: int) -> WorkerId:
    """The worker that made this id."""
    return WorkerId(id_ >> LOCAL_BITS)


def local_part(id_: int) -> int:
    """The number of this id among those its worker made."""
    return id_ & MAX_LOCAL_ID


def count_from(worker: int, start: int = 0) -> Iterator[int]:
    """Ids of one kind made on `worker`. `next` on it is atomic under the GIL, so threads may share it."""
    return itertools.count(make_id(worker, start))
