"""Granted memory and tensors that are read in place, without a GPU: who may write or read what, until when.

Calls of CUDA are noted by a stand-in for the runtime; `tests/cuda` has the same things on a real one.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from telegrad.cuda.forms import Form
from telegrad.errors import ProtocolError, SerializationError
from telegrad.rpc.job.debug_waits import waits_of
from telegrad.transport.blocks.mapping import Mapping
from telegrad.transport.device import blocks, leftovers, regions
from telegrad.transport.device.borrowing import DeviceBorrower
from telegrad.transport.device.channel import DeviceChannel
from telegrad.transport.device.flags import Flags, Page
from telegrad.transport.device.grants import Granted
from telegrad.transport.device.in_place import InPlace
from telegrad.transport.device.landing import FIRST_GRANT
from telegrad.wire.block_notices import GrantDeviceMemory
from telegrad.wire.frames import FrameKind, SegmentSpec
from telegrad.wire.messages import AnyMessage, Ping
from telegrad.wire.tensor.segments import Segment
from telegrad.wire.tensor.specs import TensorSpec
from tests.transport.noted_cuda import Noted, install
from tests.transport.test_connection import make_pair, receive
from tests.waiting import wait_until

FORM = Form(torch.float32, (25,), ())
CUDA = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    yield from install(monkeypatch)


class Ends:
    """Two channels that hear each other."""

    def __init__(self) -> None:
        self.gone = False
        self._pages: dict[int, Page] = {}
        self._told: tuple[list[AnyMessage], list[AnyMessage]] = ([], [])
        self.here, self.there = self._channel(0), self._channel(1)

    def _channel(self, side: int) -> DeviceChannel:
        def lend_page() -> Page:
            page = Page(len(self._pages) + 1, Mapping(-1, 64 * 1024))
            self._pages[page.number] = page
            return page

        return DeviceChannel(self._told[side].append, lend_page, self._pages.__getitem__, lambda: self.gone)

    def talk(self) -> list[AnyMessage]:
        """All they have to tell each other; what was told."""
        heard: list[AnyMessage] = []
        for _ in range(4):
            for side, (channel, other) in enumerate(((self.here, self.there), (self.there, self.here))):
                notices = channel.news() if channel.has_news else []
                told = [*self._told[side], *notices]
                self._told[side].clear()
                regions.exported.clear()  # as in another process
                for message in told:
                    other.heard(message)
                heard += told
        return heard

    def meet(self) -> None:
        """Both know that the other can open memory."""
        for channel in (self.here, self.there):
            assert not channel._can_open(0)
        self.talk()
        assert self.here._can_open(0) and self.there._can_open(0)


def lend(channel: DeviceChannel, specs: Any, segments: Any, in_place: list[InPlace] | None = None) -> Any:
    """As `TensorMemory.place` does it."""
    found = channel.lend_one(specs[0], segments[0], in_place) if len(segments) == 1 else None
    return channel.lend(specs, segments, in_place) if found is None else [found]


@pytest.fixture
def ends(cuda: Noted) -> Ends:
    made = Ends()
    made.meet()
    return made


def sent(cuda: Noted, nbytes: int = 100, device: str = "cuda:0") -> tuple[list[TensorSpec], list[Segment]]:
    """A tensor as it is given to a channel."""
    address = cuda.allocate(nbytes)
    return [TensorSpec(0, 0, (nbytes,), (), 0, 0, 0, device)], [Segment(address, nbytes, object(), False, 0)]


def grant(ends: Ends, count: int = 1) -> None:
    """Tensors came here: there is granted memory for the next ones."""
    ends.here.landing.prepare(0, [FORM] * count)
    ends.talk()


def test_a_tensor_is_written_to_where_it_stays(ends: Ends, cuda: Noted) -> None:
    grant(ends)
    assert blocks.budget.taken(0) and ends.here.landing.granted == (1, 100)
    specs, segments = sent(cuda)
    cuda.calls.clear()
    (place,) = lend(ends.there, specs, segments)
    assert place is not None and place.block >= FIRST_GRANT
    (copied, written) = cuda.calls
    assert copied[0] == "copy" and copied[2:4] == (segments[0].address, 100)
    granted = ends.here.landing.arrive(place)
    granted._teller.flag.written.set(written[3])
    tensor = granted.tensor(FORM)
    assert tensor.data_ptr() == copied[1] and tensor.shape == (25,)
    assert len(cuda.calls) == 2, "the receiver asked something of the GPU"
    assert ends.here.landing.granted == (0, 0)
    other = granted.tensor(Form(torch.int32, (5, 5), ()))
    assert other.data_ptr() == copied[1] and other.shape == (5, 5)


def test_a_tensor_that_came_is_held_by_nobody_else(ends: Ends, cuda: Noted) -> None:
    grant(ends)
    (place,) = lend(ends.there, *sent(cuda))
    assert place is not None
    granted = ends.here.landing.arrive(place)
    granted._teller.flag.written.set(1)
    alive = weakref.ref(granted.tensor(FORM))
    del granted
    assert alive() is None


def test_the_number_of_the_first_tells_for_all_of_a_message(ends: Ends, cuda: Noted) -> None:
    grant(ends, 2)
    both = [sent(cuda), sent(cuda)]
    specs = [TensorSpec(0, 0, (100,), (), 0, index, 0, "cuda:0") for index in range(2)]
    cuda.calls.clear()
    placed = lend(ends.there, specs, [segments[0] for _, segments in both])
    assert [call[0] for call in cuda.calls] == ["copy", "copy", "write"]
    found: list[Granted] = []
    for place in placed:
        assert place is not None
        found.append(ends.here.landing.arrive(place))
    assert found[0]._teller is found[1]._teller
    cuda.calls.clear()
    for one in found:
        one.tensor(FORM)
    assert [call[0] for call in cuda.calls] == ["wait"], "once for the message"


def test_without_a_place_for_each_it_goes_through_a_block(ends: Ends, cuda: Noted) -> None:
    grant(ends)
    specs, segments = sent(cuda, 104)
    (place,) = lend(ends.there, specs, segments)
    assert place is not None and place.block < FIRST_GRANT
    assert len(ends.there.offers._unused) == 1
    specs, segments = sent(cuda, 100, "cuda:1")  # the peer's other GPU
    (place,) = lend(ends.there, specs, segments)
    assert place is not None and place.block < FIRST_GRANT


def test_memory_in_use_on_its_stream_is_not_written_to_before_it_is_free(ends: Ends, cuda: Noted) -> None:
    cuda.idle = False
    cuda.calls.clear()
    grant(ends)
    (told,) = cuda.calls
    assert told[0] == "write", "its stream says when nothing is at work there any more"
    (offer,) = ends.there.offers._unused.values()
    assert not ends.there.offers.take(0, [offer.key])
    specs, segments = sent(cuda)
    (place,) = lend(ends.there, specs, segments)
    assert place is not None and place.block < FIRST_GRANT
    offer.flag.free.set(offer.use)
    (place,) = lend(ends.there, specs, segments)
    assert place is not None and place.block >= FIRST_GRANT


def test_of_several_places_the_oldest_is_taken(ends: Ends) -> None:
    grant(ends, 2)
    first, second = ends.there.offers._unused.values()
    assert not ends.there.offers.take(0, [first.key] * 3)
    assert ends.there.offers.take(0, [first.key]) == (first,)
    assert ends.there.offers.take(0, [first.key]) == (second,)


def test_memory_is_prepared_when_the_thread_has_sent_something(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    landing = ends.here.landing
    landing.expect(0, [FORM])
    assert not landing.has_news
    monkeypatch.setattr("telegrad.cuda.order.current_stream", lambda _: 8)
    landing.prepare_expected()
    assert not landing.has_news, "another thread, which is on another stream"
    monkeypatch.setattr("telegrad.cuda.order.current_stream", lambda _: 7)
    landing.prepare_expected()
    assert landing.has_news
    landing.expect(0, [Form(torch.float32, (2**23,), ())])
    assert len(landing._prepared) == 2, "a large one is worth it at once"


def test_what_is_not_used_goes_back(ends: Ends) -> None:
    before = blocks.budget.taken(0)
    grant(ends)
    assert blocks.budget.taken(0) == before + 100
    ends.here.landing.trim(time.monotonic())
    ends.talk()
    assert len(ends.there.offers._unused) == 0
    ends.here.landing.trim(time.monotonic())
    assert blocks.budget.taken(0) == before and ends.here.landing.granted == (0, 0)


def test_what_is_used_as_it_is_reclaimed_is_a_tensor_all_the_same(ends: Ends, cuda: Noted) -> None:
    grant(ends)
    ends.here.landing.trim(time.monotonic())
    (place,) = lend(ends.there, *sent(cuda))
    ends.talk()
    ends.here.landing.trim(time.monotonic())
    assert place is not None
    ends.here.landing.arrive(place)


def test_grants_are_few(ends: Ends) -> None:
    for _ in range(10):
        grant(ends)
    assert len(ends.there.offers._unused) == 4
    for _ in range(10):
        ends.here.landing.prepare(0, [Form(torch.float32, (2**23,), ())])
    assert len([grant for grant in ends.here.landing._prepared if grant.nbytes > 100]) == 1


def test_memory_that_the_peer_may_write_to_outlives_the_connection(ends: Ends, cuda: Noted) -> None:
    grant(ends, 2)
    specs, segments = sent(cuda)
    (place,) = lend(ends.there, specs, segments)  # and its message never comes
    ends.here.landing.close(lambda: ends.gone)
    leftovers.collect()
    assert len(leftovers._unclosed) == 1
    ends.there.offers.close()  # what was not used goes back
    leftovers.collect()
    assert len(leftovers._unclosed) == 2, "one is being written to"
    assert place is not None
    ends.here.landing._places[place.offset].flag.written.set(1)
    leftovers.collect()
    leftovers.collect()
    assert not leftovers._unclosed


def test_grants_that_were_never_heard_of_are_let_go_of(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    ends.here.landing.prepare(0, [FORM])
    assert ends.here.news(), "and the connection ends before it is read"
    before = blocks.budget.taken(0)
    ends.here.landing.close(lambda: ends.gone)
    ends.there.offers.close()
    leftovers.collect()
    assert blocks.budget.taken(0) == before
    monkeypatch.setattr("telegrad.transport.device.landing._UNHEARD_SECONDS", 0.0)
    leftovers.collect()
    assert blocks.budget.taken(0) == before - 100


def test_a_tensor_whose_sender_is_gone_is_spoiled(ends: Ends, cuda: Noted) -> None:
    grant(ends)
    (place,) = lend(ends.there, *sent(cuda))
    assert place is not None
    tensor = ends.here.landing.arrive(place).tensor(FORM)
    ends.gone = True
    cuda.calls.clear()
    ends.here.landing.close(lambda: ends.gone)
    wait_until(lambda: ends.here.landing._places[0].flag.written.has_reached(1))
    assert cuda.calls == [("fill", tensor.data_ptr(), 0xFF, 100)]


def test_what_nobody_took_is_kept_until_it_is_written(ends: Ends, cuda: Noted) -> None:
    grant(ends)
    (place,) = lend(ends.there, *sent(cuda))
    assert place is not None
    ends.here.landing.arrive(place)
    gc.collect()
    ends.here.landing.trim(0.0)
    (late,) = ends.here.landing._late
    assert late.held is not None
    late.teller.flag.written.set(1)
    ends.here.landing.trim(0.0)
    assert not ends.here.landing._late and len(ends.here.landing._free) == 1


def test_lies_about_grants_are_refused(ends: Ends, cuda: Noted) -> None:
    landing = ends.here.landing
    with pytest.raises(ProtocolError, match="not granted"):
        landing.arrive(SegmentSpec(100, FIRST_GRANT, 0))
    landing.prepare(0, [FORM])
    told = [message for message in ends.talk() if type(message) is GrantDeviceMemory]
    ((place,),) = [message.places for message in told]
    with pytest.raises(ProtocolError, match="twice"):
        ends.there.heard(told[0])
    for wrong in ({"offset": 4}, {"nbytes": 2**40}, {"offset": -1}, {"nbytes": 0}, {"region": 77}, {"place": 10**6}):
        fields: dict[str, Any] = {name: getattr(place, name) for name in place.__struct_fields__}
        with pytest.raises(ProtocolError):
            ends.there.heard(GrantDeviceMemory(told[0].page, (type(place)(**{**fields, "place": 9, **wrong}),)))
    with pytest.raises(ProtocolError, match="bytes are said to be"):
        landing.arrive(SegmentSpec(99, FIRST_GRANT + place.place, place.place))
    landing.prepare(0, [FORM])
    ((other,),) = [message.places for message in ends.talk() if type(message) is GrantDeviceMemory]
    with pytest.raises(ProtocolError, match="named place"):
        landing.arrive(SegmentSpec(100, FIRST_GRANT + other.place, 50))
    assert len(landing._dropped) + len(landing._late) == 2, "memory that the peer may write to is kept"


def test_what_another_thread_will_write_is_left_to_it(cuda: Noted) -> None:
    a, b = make_pair()
    with closing(a), closing(b):
        landing = a.memory._device_channel().landing
        landing.expected.append((8, 0, [FORM]))  # of another stream, and so of another thread
        landing.prepare(0, [FORM])
        with a._write_lock:
            a.flush()
            assert landing.has_news
        a.flush()
        assert not landing.has_news and len(landing.expected) == 1


def test_over_a_connection_a_region_is_known_before_the_grants_in_it(cuda: Noted) -> None:
    a, b = make_pair()
    with closing(a), closing(b):
        here, there = a.memory._device_channel(), b.memory._device_channel()
        here._can_open(0)
        for connection, other in ((a, b), (b, a), (a, b)):
            connection.send(FrameKind.NOTICE, 1, 0, Ping())
            regions.exported.clear()  # as in another process
            receive(other, 1)
        here.landing.prepare(0, [FORM])
        a.send(FrameKind.NOTICE, 2, 0, Ping())
        regions.exported.clear()
        receive(b, 1)
        assert len(there.offers._unused) == 1


# --- read where they lie ---


def leave(ends: Ends, cuda: Noted) -> tuple[InPlace, Any, Segment]:
    """A tensor that stays where it is: the caller's handle, the callee's loan of it, and itself."""
    specs, segments = sent(cuda)
    in_place: list[InPlace] = []
    cuda.calls.clear()
    (place,) = lend(ends.here, specs, segments, in_place)
    assert cuda.calls == [], "something was asked of the GPU"
    ends.talk()
    assert place is not None
    loan = ends.there.borrower.borrow(place.block)
    return in_place[0], loan.part(place.offset, place.nbytes), segments[0]


def test_a_tensor_is_read_where_it_lies(ends: Ends, cuda: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[Any, int]] = []
    monkeypatch.setattr("telegrad.cuda.reads.reading", lambda *read: noted.append(read))
    handle, segment, source = leave(ends, cuda)
    segment.loan.copy_all([segment], [99], CUDA)
    assert cuda.calls[0] == ("copy", 99, source.address, 100, 7) and cuda.calls[1][0] == "write"
    number, use = noted[0]
    number.set(use)
    assert handle._block.kept
    handle.end()
    assert not handle._block.kept and len(cuda.calls) == 2
    del segment, handle
    again, _, _ = leave(ends, cuda)
    assert again._use == use + 1, "another block"


def test_two_that_are_read_at_the_same_time_have_numbers_of_their_own(
    ends: Ends, cuda: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telegrad.cuda.reads.reading", lambda *_: None)
    first, part, _ = leave(ends, cuda)
    second, other, _ = leave(ends, cuda)
    assert first._block is not second._block
    for each, handle in ((part, first), (other, second)):
        each.loan.copy_all([each], [99], CUDA)
        handle._block.flag.read.set(1)
        handle.end()
    del part, other, each
    assert ends.here.lender.lent() == (0, 0)
    third, part, _ = leave(ends, cuda)
    assert third._block is second._block and third._use == 2, "not the one that was used last"
    del part


def test_what_was_read_may_be_named_again_before_its_reader_has_dropped_it(
    ends: Ends, cuda: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telegrad.cuda.reads.reading", lambda *_: None)
    first, part, _ = leave(ends, cuda)
    part.loan.copy_all([part], [99], CUDA)
    first._block.flag.read.set(1)  # the GPU is done, and another thread of the caller sends
    second, other, _ = leave(ends, cuda)
    assert second._block is first._block and second._use == 2
    del part
    assert not second._block.flag.let_go.has_reached(2), "said for another"
    with pytest.raises(ProtocolError, match="without announcing or regaining it"):
        ends.there.borrower.borrow(second._block.name)
    other.loan.copy_all([other], [99], CUDA)


def test_the_one_that_is_used_again_and_again_goes_back_with_the_others(
    ends: Ends, cuda: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telegrad.cuda.reads.reading", lambda *_: None)
    handle, segment, _ = leave(ends, cuda)
    segment.loan.copy_all([segment], [99], CUDA)
    handle._block.flag.read.set(1)
    handle.end()
    del segment
    ends.here.lender.trim(time.monotonic() + 1)
    assert handle._block.number in ends.here.lender.untold


def test_the_callers_stream_waits_for_what_is_being_read(
    ends: Ends, cuda: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telegrad.cuda.reads.reading", lambda *_: None)
    handle, segment, _ = leave(ends, cuda)
    segment.loan.copy_all([segment], [99], CUDA)
    handle.end()
    assert cuda.calls[-1][0] == "wait" and handle._block.kept
    handle._block.flag.read.set(1)
    del segment
    ends.here.lender.trim(0.0)
    assert not handle._block.kept


def test_a_call_that_was_given_up_is_not_read(ends: Ends, cuda: Noted) -> None:
    handle, segment, _ = leave(ends, cuda)
    handle.end()
    assert not handle._block.kept
    with pytest.raises(SerializationError, match="given it up"):
        segment.loan.copy_all([segment], [99], CUDA)
    assert cuda.calls == []
    del segment
    gc.collect()
    assert handle._block.flag.read.has_reached(1) and ends.here.lender.lent() == (0, 0)


def test_a_stream_at_work_is_not_waited_for(ends: Ends, cuda: Noted) -> None:
    cuda.idle = False
    in_place: list[InPlace] = []
    lend(ends.here, *sent(cuda), in_place)
    assert not in_place


def test_idle_regions_are_closed(ends: Ends, cuda: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telegrad.cuda.reads.reading", lambda *_: None)
    handle, segment, source = leave(ends, cuda)
    assert source.address in cuda.opened
    ends.here.shown.retire(time.monotonic(), ())
    ends.talk()
    assert source.address in cuda.opened, "it has not been read"
    segment.loan.copy_all([segment], [99], CUDA)
    handle._block.flag.read.set(1)
    handle.end()
    ends.here.shown.retire(time.monotonic(), ())
    ends.talk()
    assert source.address not in cuda.opened and len(ends.here.shown) == 0


def test_lies_about_regions_are_refused(ends: Ends, cuda: Noted) -> None:
    handle, segment, _ = leave(ends, cuda)
    (known,) = ends.here.shown._shown
    start = (known << 40) + 50
    with pytest.raises(ProtocolError, match="exceeds"):
        segment.loan.part(start, 2**33)
    with pytest.raises(ProtocolError, match="without announcing"):
        segment.loan.part(10**6 << 40, 8)
    borrower: DeviceBorrower = ends.there.borrower
    for number, memory in ((0, bytes(64)), (known, bytes(64)), (2**22, bytes(64)), (10**6, b"short")):
        with pytest.raises(ProtocolError):
            borrower.open_region(number, "a gpu", memory)
    assert "does not see" in borrower.open_region(10**6, "another", bytes(64))
    with pytest.raises(SerializationError, match="cannot be opened"):
        borrower.region(10**6)
    handle.end()


def test_a_new_allocation_at_an_old_address_is_another_region(cuda: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    address = cuda.allocate(1000)
    first = regions.regions.of(address + 10)
    assert first is not None and regions.regions.of(address) is first
    identity, start, size = cuda.allocation_of(address)
    monkeypatch.setattr(cuda, "allocation_of", lambda _: (identity + 1, start, size))
    second = regions.regions.of(address)
    assert second is not None and second.number != first.number


def test_debug_waits_names_what_a_peer_may_use(ends: Ends, cuda: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telegrad.cuda.order.active", True)
    member = SimpleNamespace(name="w1", worker_id=1)
    link = SimpleNamespace(
        member=member, current=SimpleNamespace(devices=ends.here), pending=SimpleNamespace(snapshot=list)
    )
    silent = SimpleNamespace(member=member, connection=None, served=list)
    peers = SimpleNamespace(links=lambda: [link], sessions=lambda: [silent])
    agent: Any = SimpleNamespace(peers=peers, layers=[])
    assert waits_of(agent) == []
    ends.here.landing.prepare(0, [Form(torch.float32, (2**20,), ())])
    assert waits_of(agent) == [], "the peer does not know of it"
    ends.talk()
    assert waits_of(agent) == [("has granted w1 device memory for 1 tensors to come, 4.0 MB", -1)]
    lend(ends.here, *sent(cuda))
    lent, granted = waits_of(agent)
    assert lent.text.startswith("has lent 1 blocks of device memory") and lent.worker_id == 1
    assert granted.text.startswith("has granted w1")


def test_flags_have_a_page(cuda: Noted) -> None:
    assert Flags(Page(5, Mapping(-1, 64 * 1024))).page == 5
