"""Memory that a receiver keeps ready: a tensor that comes is written straight to where it stays, by its sender.

When a tensor has come, another of that size is expected. Memory for it is allocated by torch, on the stream that the
last one came on, and granted to the peer right after something was sent to it, when nobody waits for that. The peer's
stream writes to it in place of a block of its own (`offers.py`), and the message names it. So a received tensor costs
this process no work on the GPU, which has another process's work before it then: to change between two processes takes
a GPU 140 us, whatever it is asked to do.

Granted memory belongs to the receiver. The peer may write to it once, at any moment until its message has come and the
number is there, or until it has said that it will not: a grant that is reclaimed, or left over when the connection
ends, is kept until then, or until the peer is gone.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from telegrad.cuda import order
from telegrad.cuda.forms import Form, empty
from telegrad.cuda.runtime import CudaError, runtime
from telegrad.errors import ProtocolError
from telegrad.transport.device.blocks import budget
from telegrad.transport.device.flags import Flags, Patience, Promise, keep_promises
from telegrad.transport.device.grants import Grant, Granted, Late, Place
from telegrad.transport.device.leftovers import close_later
from telegrad.transport.device.offers import FIRST_GRANT
from telegrad.transport.device.regions import Region, regions
from telegrad.wire.block_notices import GrantDeviceMemory, GrantedPlace
from telegrad.wire.frames import SegmentSpec
from telegrad.wire.tensor.segments import contiguous_strides, element_span

MOST_TENSORS = 8  # in a message that grants are made for
_MOST_GRANTS = 4  # of one size, unless one message has more tensors of it
_MOST_EXPECTED = 8
_LARGE = 16 * 2**20  # of which one is granted at a time
_GRACE_SECONDS = 0.5  # for what a process that has ended had begun on the GPU
_UNHEARD_SECONDS = 5.0  # after which a peer that has not heard of a grant will not, the connection being gone


class Landing:
    """What one connection's peer may write to. Any thread may receive; notices are made by the one that writes."""

    def __init__(self, flags: Callable[[], Flags]) -> None:
        """`flags` makes those of this connection, when the first grant is made."""
        self._make_flags = flags
        self._flags: Flags | None = None
        self.patience = Patience()
        self._lock = threading.Lock()
        self._places: list[Place] = []
        self._free: list[Place] = []
        self._prepared: list[Grant] = []  # the peer does not know them
        self._told: dict[int, Grant] = {}  # by place: the peer may write to them. Taken out in one step
        self.expected: deque[tuple[int, int, Sequence[Form]]] = deque()  # by stream and device: to be prepared
        self._held: dict[tuple[int, int], int] = {}  # by device and size: how many there are of both
        self._used: deque[tuple[int, int]] = deque()  # the same of those that messages named, to be counted out
        self._late: list[Late] = []
        self._dropped: deque[Granted] = deque()  # named by messages that nobody took tensors of
        self._reclaimed: list[int] = []  # to be told to the peer
        self._possible = True  # until memory turns out to be of a kind that cannot be exported
        self._closed = False

    # --- granting ---

    def expect(self, device: int, forms: Sequence[Form]) -> None:
        """Tensors of these forms came: have memory for the next ones, for the current stream of this thread.

        Small memory is allocated when the thread has sent what it has to send next, and has time for it."""
        if not self._possible or self._closed or len(forms) > MOST_TENSORS:
            return
        if len(self.expected) < _MOST_EXPECTED and max(map(_nbytes, forms)) <= _LARGE:
            self.expected.append((order.current_stream(device), device, forms))
        else:
            self.prepare(device, forms)

    def prepare_expected(self) -> bool:
        """This thread has sent something: prepare what came on its stream. Whether there was anything."""
        prepared = False
        for _ in range(len(self.expected)):
            try:
                stream, device, forms = expected = self.expected.popleft()
            except IndexError:  # another thread does the same
                break
            if order.current_stream(device) == stream:
                self.prepare(device, forms)
                prepared = True
            else:
                self.expected.append(expected)
        return prepared

    def prepare(self, device: int, forms: Sequence[Form]) -> None:
        """Allocate memory of these forms, to be granted by the next notice."""
        if self._closed or torch.is_inference_mode_enabled():
            return
        stream = order.current_stream(device)
        for form in forms:
            place = self._take_place(device, _nbytes(form), len(forms))
            if place is None:
                return
            grant = self._allocate(device, form, place, stream)
            with self._lock:
                if grant is None or self._closed:
                    self._release(device, _nbytes(form), place)
                    return
                self._prepared.append(grant)

    def _take_place(self, device: int, nbytes: int, wanted: int) -> Place | None:
        key = device, nbytes
        with self._lock:
            self._count_used()
            held = self._held.get(key, 0)
            if held >= (wanted if nbytes > _LARGE else max(wanted, _MOST_GRANTS)):
                return None
            if self._late or self._dropped:
                self._tidy_late()
            if not self._free:
                if self._flags is None:
                    self._flags = self._make_flags()
                if not self._flags.has_room(1):
                    return None
                self._free.append(Place(len(self._places), self._flags.take()))
                self._places.append(self._free[-1])
            if not budget.reserve(device, nbytes):
                return None
            self._held[key] = held + 1
            return self._free.pop()

    def _count_used(self) -> None:
        """Under the lock: what came is the program's."""
        while self._used:
            self._release(*self._used.popleft(), None)

    def _allocate(self, device: int, form: Form, place: Place, stream: int) -> Grant | None:
        try:
            tensor = empty(form, torch.device("cuda", device))
            region = regions.of(tensor.data_ptr())
        except (torch.OutOfMemoryError, CudaError):
            return None
        if region is None:
            self._possible = False
            return None
        grant = Grant(place, form, _nbytes(form), tensor, region, device, stream)
        if runtime().is_idle(stream):
            place.flag.free.set(grant.use)
        else:  # what had this memory before may still be at work on it there
            runtime().write_value(stream, place.flag.free.on_device, grant.use)
        return grant

    def _release(self, device: int, nbytes: int, place: Place | None) -> None:
        """Under the lock: a grant is none any more; its place may be used again, unless it is still waited for."""
        self._held[device, nbytes] -= 1
        budget.release(device, nbytes)
        if place is not None:
            self._free.append(place)

    @property
    def has_news(self) -> bool:
        """Whether the peer should be told something."""
        return bool(self._prepared or self._reclaimed)

    def grants(self, announce: Callable[[Region, int], None]) -> GrantDeviceMemory | None:
        """What the peer may write to from now on; `announce` has it know a region first."""
        places = []
        with self._lock:
            prepared, self._prepared = self._prepared, []
            for grant in prepared:
                announce(grant.region, grant.device)
                offset = grant.tensor.data_ptr() - grant.region.start
                number, name = grant.place.number, f"cuda:{grant.device}"
                places.append(GrantedPlace(number, grant.use, grant.region.number, offset, grant.nbytes, name))
                self._told[number] = grant
            if not places or self._flags is None:
                return None
            return GrantDeviceMemory(self._flags.page, tuple(places))

    def reclaimed(self) -> tuple[int, ...]:
        """Places that the peer should give back; each is named once."""
        with self._lock:
            numbers, self._reclaimed = tuple(self._reclaimed), []
        return numbers

    # --- receiving ---

    def arrive(self, segment: SegmentSpec) -> Granted:
        """A message names granted memory; in the place of an offset it says whose number tells that it was written."""
        number = segment.block - FIRST_GRANT
        grant = self._told.pop(number, None)  # in one step, without the lock
        if grant is None:
            raise ProtocolError(f"the peer wrote to granted memory {number}, which is not granted to it")
        self._used.append((grant.device, grant.nbytes))
        if self._closed:
            with self._lock:
                self._count_used()
        granted = Granted(self, grant)  # first: whatever comes of this, the memory is kept until it was written
        if segment.nbytes != grant.nbytes:
            raise ProtocolError(f"{segment.nbytes} bytes are said to be in {grant.nbytes} granted ones")
        if segment.offset != number:
            granted.told_by(self.place(segment.offset))
        return granted

    def place(self, number: int) -> Place:
        """A place that the peer named."""
        if not 0 <= number < len(self._places):
            raise ProtocolError(f"the peer named place {number} of {len(self._places)} for granted memory")
        return self._places[number]

    def free(self, place: Place) -> None:
        """The tensor of a grant was taken, and is there."""
        self._free.append(place)

    def follow(self, late: Late) -> None:
        """The tensor of a grant was taken, and is not there yet."""
        with self._lock:
            self._late.append(late)

    def drop(self, granted: Granted) -> None:
        """Nobody wants it; in any thread at any moment, so without the lock."""
        self._dropped.append(granted)

    def _tidy_late(self) -> None:
        """Under the lock: places whose bytes have come are free again."""
        while self._dropped:
            self._late.append(self._dropped.popleft().late(held=True))
        still = []
        for late in self._late:
            if late.is_there():
                self._free.append(late.place)
            else:
                still.append(late)
        self._late = still

    # --- giving back ---

    def trim(self, before: float) -> None:
        """Have back what has been granted and not used since `before` on the monotonic clock."""
        with self._lock:
            self._count_used()
            self._tidy_late()
            for grant in [grant for grant in self._prepared if grant.since < before]:
                self._prepared.remove(grant)
                self._release(grant.device, grant.nbytes, grant.place)
            for number, grant in list(self._told.items()):
                if grant.went_back() and self._told.pop(number, None) is not None:
                    self._release(grant.device, grant.nbytes, grant.place)
                elif not grant.asked and grant.since < before:
                    grant.asked = True
                    self._reclaimed.append(number)

    @property
    def regions_in_use(self) -> set[int]:
        """The numbers of regions in which the peer may write."""
        with self._lock:
            return {grant.region.number for grant in (*self._prepared, *self._told.values())}

    @property
    def granted(self) -> tuple[int, int]:
        """How many places the peer may write to, and their bytes."""
        with self._lock:
            sizes = [grant.nbytes for grant in [*self._told.values()]]
        return len(sizes), sum(sizes)

    def close(self, peer_is_gone: Callable[[], bool]) -> None:
        """The connection has ended. What the peer may still write to is kept until it has said that it will not."""
        with self._lock:
            self._closed = True
            self._count_used()
            self._tidy_late()
            for grant in self._prepared:
                self._release(grant.device, grant.nbytes, None)
            self._prepared = []
            told, self._told = list(self._told.values()), {}
            late, self._late = self._late, []
        keep_promises([Promise(one.teller.flag.written, one.use, one.spoil) for one in late], peer_is_gone)
        if told or late:
            close_later(functools.partial(_Ending(told, late, peer_is_gone).is_over, self._ended))

    def _ended(self, grant: Grant) -> None:
        with self._lock:
            self._release(grant.device, grant.nbytes, None)


class _Ending:
    """What is left of a connection: memory that its peer may still write to."""

    def __init__(self, told: list[Grant], late: list[Late], peer_is_gone: Callable[[], bool]) -> None:
        self._told = told
        self._late = late
        self._peer_is_gone = peer_is_gone
        self._since = time.monotonic()
        self._gone_since: float | None = None

    def is_over(self, ended: Callable[[Grant], None]) -> bool:
        """Whether the peer will write no more; `ended` is called with each grant that has ended."""
        now = time.monotonic()
        if self._gone_since is None and self._peer_is_gone():
            self._gone_since = now
        gone = self._gone_since is not None and now - self._gone_since > _GRACE_SECONDS
        unheard = now - self._since > _UNHEARD_SECONDS
        still = []
        for grant in self._told:
            if gone or grant.went_back() or (unheard and not grant.was_heard()):
                ended(grant)
            else:
                still.append(grant)
        self._told = still
        self._late = [late for late in self._late if not gone and not late.is_there()]
        return not self._told and not self._late


@functools.lru_cache(maxsize=4096)
def _nbytes(form: Form) -> int:
    """The bytes of memory that torch gives a tensor of this form."""
    return element_span(form.shape, form.strides or contiguous_strides(form.shape)) * form.dtype.itemsize
