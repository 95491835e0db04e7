"""What a peer has granted: memory of its own that this process may write tensors to, each place once.

The other side of `landing.py`. A sender that finds a place of the right size for each tensor of a message has its
stream write there, and the number of the first place says that all of them are written. What is reclaimed, or left
over when the connection ends, goes back by a number: nobody waits for an answer.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from telegrad.cuda.copy_kernel import give_back_counter, take_counter
from telegrad.errors import ProtocolError
from telegrad.transport.device.flags import Flag
from telegrad.transport.device.leftovers import close_later
from telegrad.transport.device.regions import Opened
from telegrad.wire.block_notices import GrantedPlace
from telegrad.wire.frames import SegmentSpec

FIRST_GRANT = 1 << 61  # what messages call granted memory begins here
_MOST_OFFERS = 4096


class Offer:
    """Memory of the peer for one tensor."""

    __slots__ = ("address", "counter", "device", "flag", "free", "key", "opened", "place", "segment", "use")

    def __init__(self, place: GrantedPlace, flag: Flag, opened: Opened) -> None:
        """What a message that uses it needs is made here, when nobody waits for it."""
        if not 0 < place.nbytes <= opened.size or not 0 <= place.offset <= opened.size - place.nbytes:
            raise ProtocolError(f"the peer granted {place.nbytes} bytes at {place.offset} of {opened.size}")
        self.place = place.place
        self.use = place.use
        self.flag = flag
        self.free = flag.free
        self.key = place.device, place.nbytes
        self.opened = opened.use()
        flag.read.set(place.use)  # heard of: from now on the peer waits for it to be written or to go back
        self.address = opened.address + place.offset
        self.device = opened.device  # as this process counts them
        self.segment = SegmentSpec(place.nbytes, FIRST_GRANT + place.place, place.place)  # its own number tells
        self.counter = 0

    def give_back(self) -> None:
        """It was not used."""
        self.flag.let_go.set(self.use)
        self.opened.drop()


class _Writing(NamedTuple):
    """Offers that are being written to."""

    offers: tuple[Offer, ...]

    def is_done(self) -> bool:
        return self.offers[0].flag.written.has_reached(self.offers[0].use)


class Offers:
    """Those of one peer. Any thread may take some."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[tuple[str, int], list[Offer]] = {}  # by the peer's name of its device, and the bytes
        self._unused: dict[int, Offer] = {}  # by place
        self._writing: deque[_Writing] = deque()
        self._counters: dict[tuple[int, int], int] = {}  # by device and place: for the copying kernel
        self._closed = False

    def add(self, offer: Offer) -> None:
        """The peer granted one more."""
        with self._lock:
            if offer.place in self._unused or len(self._unused) >= _MOST_OFFERS:
                raise ProtocolError(f"the peer granted place {offer.place} of its memory twice, or too many")
            if self._closed:
                offer.give_back()
                return
            offer.counter = self._counter(offer)
            self._unused[offer.place] = offer
            self._by_key.setdefault(offer.key, []).append(offer)

    def take_one(self, device: int, key: tuple[str, int]) -> Offer | None:
        """A place for the only tensor of a message, to be written to by a stream of `device`; None unless one is
        free."""
        with self._lock:
            for offer in self._by_key.get(key, ()):  # as in `take`
                if offer.device == device and offer.free.has_reached(offer.use):
                    self._by_key[key].remove(offer)
                    del self._unused[offer.place]
                    return offer
        return None

    def take(self, device: int, keys: Sequence[tuple[str, int]]) -> tuple[Offer, ...]:
        """A place for each, to be written to by a stream of `device`; none unless there is one for each, which is
        free."""
        with self._lock:
            taken: list[Offer] = []
            for key in keys:
                found = self._by_key.get(key, [])
                for offer in found:  # the oldest first: what was at work in that memory before is most likely done
                    if offer.device == device and offer.free.has_reached(offer.use):
                        break
                else:
                    for offer in reversed(taken):
                        self._by_key[offer.key].insert(0, offer)
                    return ()
                found.remove(offer)
                taken.append(offer)
            for offer in taken:
                del self._unused[offer.place]
            return tuple(taken)

    def _counter(self, offer: Offer) -> int:
        """For the launch that writes to it."""
        key = offer.device, offer.place
        found = self._counters.get(key)
        if found is None:
            found = self._counters[key] = take_counter(offer.device)
        return found

    def written(self, offers: tuple[Offer, ...]) -> None:
        """A stream was told to write to these."""
        self._writing.append(_Writing(offers))

    def tidy(self) -> None:
        """Let go of what has been written."""
        if not self._writing:
            return
        with self._lock:
            while self._writing and self._writing[0].is_done():
                for offer in self._writing.popleft().offers:
                    offer.opened.drop()

    def reclaim(self, places: Iterable[int]) -> None:
        """The peer wants these back, unless they have been used."""
        with self._lock:
            for place in places:
                offer = self._unused.pop(place, None)
                if offer is not None:
                    self._by_key[offer.key].remove(offer)
                    offer.give_back()

    def __bool__(self) -> bool:
        return bool(self._unused)

    def close(self) -> None:
        """The connection has ended: what was not used goes back now, the rest when it has been written."""
        with self._lock:
            self._closed = True
            for offer in self._unused.values():
                offer.give_back()
            self._unused.clear()
            self._by_key.clear()
        close_later(functools.partial(self._close_if_written))

    def _close_if_written(self) -> bool:
        with self._lock:
            while self._writing and self._writing[0].is_done():
                for offer in self._writing.popleft().offers:
                    offer.give_back()  # if its message never came, the peer waits for this
            if self._writing:
                return False
            for (device, _), counter in self._counters.items():
                give_back_counter(device, counter)
            self._counters.clear()
            return True
