"""Which way the tensors of a message go to the peer, if they can stay on the GPU.

There are three, the first two with the option `cuda_direct`; the first that can be gone is taken:
- The peer reads them where they lie: the caller waits for the answer, and its stream is idle (`in_place.py`).
- This process writes them to where they stay, memory that the peer has granted for that (`landing.py`, `offers.py`).
- Through a block: this process copies them into it, the peer copies them out (`blocks.py`).

Whether the peer can open memory of a GPU is asked once, with the first block, and that message goes through the host:
the peer may be in a container of its own, or not see that GPU. Its answer decides for all messages that follow. Where
there is no room for a block a message goes through the host as well.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple

from telegrad.cuda import order
from telegrad.cuda.copy_kernel import copy_and_tell, copy_one_and_tell
from telegrad.cuda.gpus import gpu_id
from telegrad.cuda.runtime import CudaError, runtime
from telegrad.transport.device.blocks import DeviceBlock, NoRoom
from telegrad.transport.device.flags import Flags, Page
from telegrad.transport.device.in_place import InPlace
from telegrad.transport.device.lending import DeviceLender
from telegrad.transport.device.offers import Offer, Offers
from telegrad.transport.device.regions import PLACE_BITS, Region, ShownRegions, regions
from telegrad.wire.block_notices import AnnounceDeviceBlock
from telegrad.wire.frames import SegmentSpec, align
from telegrad.wire.messages import AnyMessage
from telegrad.wire.tensor.segments import Segment
from telegrad.wire.tensor.specs import TensorSpec

log = logging.getLogger("telegrad.transport")


class PeerState(Enum):
    """What is known of the peer and one GPU."""

    ASKED = auto()
    CAN_OPEN = auto()
    CANNOT = auto()


_CAN_OPEN = PeerState.CAN_OPEN


def _is_usual(specs: Sequence[TensorSpec], segments: Sequence[Segment]) -> bool:
    """Whether all is on one device and stays on a GPU, each tensor with memory of its own."""
    device = segments[0].device
    if device < 0 or len(specs) != len(segments):
        return False
    for index, spec in enumerate(specs):
        if spec.segment != index or segments[index].device != device or not spec.device.startswith("cuda"):
            return False
    return True


class _Lying(NamedTuple):
    """The tensors of one message that lie on one device."""

    device: int
    stream: int  # the current one there
    segments: Sequence[Segment]


@functools.cache
def _say_once(device: int) -> None:
    log.warning(
        "no room for blocks of device memory on cuda:%d: tensors go through host memory, which is slower. Raise "
        "`cuda_memory_share` in the options, or keep fewer messages in flight",
        device,
    )


class Ways:
    """What one connection has to send tensors by. Any thread may send."""

    def __init__(self, tell: Callable[[AnyMessage], None], lend_page: Callable[[], Page]) -> None:
        """`tell` has a notice sent before anything that is sent from then on; `lend_page` shares a block of host memory
        with the peer for good."""
        self._tell = tell
        self.lender = DeviceLender(lambda: Flags(lend_page()))
        self.offers = Offers()
        self.shown = ShownRegions(tell)
        self._peer: dict[int, PeerState] = {}  # by device
        self._regions_open = True  # whether the peer can open memory of torch's allocator, as far as is known
        self._asked: dict[int, int] = {}  # the device of a block that the peer was asked about

    def lend(
        self, specs: Sequence[TensorSpec], segments: Sequence[Segment], in_place: list[InPlace] | None = None
    ) -> list[SegmentSpec | None]:
        """See that the peer finds what can stay on the GPU. For each segment where it is now, or None: it goes another
        way.

        Copies are on the current stream, so the sender may change its tensors as soon as this returns, but for those
        of `in_place`: a list if the peer may read tensors where they lie until its answer has come."""
        if _is_usual(specs, segments):
            found = self._lend_all(segments[0].device, segments, [spec.device for spec in specs], in_place)
            return [None] * len(segments) if found is None else found  # type: ignore[return-value] # none is None
        stays = {spec.segment: spec.device for spec in specs if spec.device.startswith("cuda")}
        placed: list[SegmentSpec | None] = [None] * len(segments)
        by_device: dict[int, list[int]] = {}
        for index, segment in enumerate(segments):
            if segment.device >= 0 and index in stays:
                by_device.setdefault(segment.device, []).append(index)
        for device, indices in by_device.items():
            targets = [stays[index] for index in indices]
            found = self._lend_all(device, [segments[index] for index in indices], targets, in_place)
            if found is not None:
                for index, at in zip(indices, found, strict=True):
                    placed[index] = at
        return placed

    def lend_one(self, spec: TensorSpec, segment: Segment, in_place: list[InPlace] | None) -> SegmentSpec | None:
        """The same for the only tensor of a message, which nearly all have, and with the fewest steps. None if it
        goes through a block, or it is not known yet which way it can go: `lend` is to be asked then."""
        device = segment.device
        if self._peer.get(device) is not _CAN_OPEN or not spec.device.startswith("cuda"):
            return None
        stream = order.current_stream(device)
        if in_place is not None and (found := self._leave_one(device, stream, segment, in_place)) is not None:
            return found
        offer = self.offers.take_one(device, (spec.device, segment.nbytes))
        return None if offer is None else self._write_one(stream, segment, offer)

    def _lend_all(
        self,
        device: int,
        segments: Sequence[Segment],
        targets: Sequence[str],
        in_place: list[InPlace] | None,
    ) -> list[SegmentSpec] | None:
        """The same for those of one device, which go to these of the peer; None if they go another way."""
        if self._peer.get(device) is not _CAN_OPEN and not self._can_open(device):
            return None
        lying = _Lying(device, order.current_stream(device), segments)
        found = None if in_place is None else self._leave(lying, in_place)
        if found is None and self.offers:
            keys = [(target, segment.nbytes) for target, segment in zip(targets, segments, strict=True)]
            offers = self.offers.take(device, keys)
            found = self._write(lying, offers) if offers else None
        return self._copy(lying) if found is None else found

    def _copy(self, lying: _Lying) -> list[SegmentSpec] | None:
        """Into a block; None if there is no room for one."""
        block = self._block(lying.device, sum(align(segment.nbytes) for segment in lying.segments))
        if block is None:
            return None
        if block.uses > 1 and not block.flag.read.has_reached(block.uses - 1):
            runtime().wait_value(lying.stream, block.flag.read.on_device, block.uses - 1)
        offset = 0
        pieces, placed = [], []
        for segment in lying.segments:
            pieces.append((segment.address, block.address + offset, segment.nbytes))
            placed.append(SegmentSpec(segment.nbytes, block.name, offset))
            offset += align(segment.nbytes)
        copy_and_tell(lying.device, lying.stream, pieces, block.flag.written.on_device, block.uses, block.counter)
        return placed

    def _write(self, lying: _Lying, offers: tuple[Offer, ...]) -> list[SegmentSpec]:
        """To memory of the peer."""
        first = offers[0]
        placed = [first.segment]
        pieces = [(lying.segments[0].address, first.address, first.segment.nbytes)]
        for segment, offer in zip(lying.segments[1:], offers[1:], strict=True):
            pieces.append((segment.address, offer.address, segment.nbytes))
            placed.append(SegmentSpec(segment.nbytes, offer.segment.block, first.place))
        copy_and_tell(lying.device, lying.stream, pieces, first.flag.written.on_device, first.use, first.counter)
        self.offers.written(offers)
        return placed

    def _write_one(self, stream: int, segment: Segment, offer: Offer) -> SegmentSpec:
        number = offer.flag.written.on_device
        address, nbytes = segment.address, segment.nbytes
        copy_one_and_tell(offer.device, stream, address, offer.address, nbytes, number, offer.use, offer.counter)
        self.offers.written((offer,))
        return offer.segment

    def _leave_one(self, device: int, stream: int, segment: Segment, in_place: list[InPlace]) -> SegmentSpec | None:
        """Where it lies; None if it cannot stay there."""
        if not self._regions_open or not runtime().is_idle(stream):
            return None
        address, nbytes = segment.address, segment.nbytes
        try:
            region = regions.of(address)
        except CudaError:
            return None
        if region is None or address + nbytes > region.start + region.size:
            return None
        block = self._block_to_read(device)
        if block is None:
            return None
        self.shown.show(region, device, block.flag.read, block.uses)
        in_place.append(InPlace(block, (segment.owner,)))
        return SegmentSpec(nbytes, block.name, region.number << PLACE_BITS | address - region.start)

    def _leave(self, lying: _Lying, in_place: list[InPlace]) -> list[SegmentSpec] | None:
        """Where they lie; None if they cannot stay there."""
        if not self._regions_open or not runtime().is_idle(lying.stream):
            return None
        found: list[Region] = []
        region: Region | None = None
        try:
            for segment in lying.segments:
                if region is None or not region.start <= segment.address < region.start + region.size:
                    region = regions.of(segment.address)
                if region is None or segment.address + segment.nbytes > region.start + region.size:
                    return None
                found.append(region)
        except CudaError:
            return None
        block = self._block_to_read(lying.device)
        if block is None:
            return None
        placed = []
        shown: Region | None = None
        for segment, region in zip(lying.segments, found, strict=True):
            if region is not shown:
                self.shown.show(region, lying.device, block.flag.read, block.uses)
                shown = region
            place = region.number << PLACE_BITS | segment.address - region.start
            placed.append(SegmentSpec(segment.nbytes, block.name, place))
        in_place.append(InPlace(block, tuple([segment.owner for segment in lying.segments])))
        return placed

    def _block_to_read(self, device: int) -> DeviceBlock | None:
        """A block for the numbers of what the peer reads where it lies; None if none can be had."""
        try:
            block = self.lender.take_read(device)
        except (CudaError, NoRoom):
            return None
        if block is not None and not block.announced:
            self._announce(block, ask=False)
        return block

    def _can_open(self, device: int) -> bool:
        """Whether the peer can open memory of this GPU. If that is not known it is asked."""
        peer = self._peer.get(device)
        if peer is None:
            try:
                self._ask(device)
            except NoRoom as error:
                log.debug("%s", error)
                _say_once(device)
        return peer is PeerState.CAN_OPEN

    def _block(self, device: int, nbytes: int) -> DeviceBlock | None:
        try:
            block = self.lender.take(device, nbytes)
        except NoRoom as error:
            log.debug("%s", error)
            _say_once(device)
            return None
        if not block.announced:
            self._announce(block, ask=False)
        return block

    def _ask(self, device: int) -> None:
        self._peer[device] = PeerState.ASKED
        try:
            block = self.lender.take(device, 1)
        except CudaError as error:
            log.warning("device memory cannot be shared here (%s): tensors go through host memory", error)
            self._peer[device] = PeerState.CANNOT
            return
        self._asked[block.number] = device
        self._announce(block, ask=True)
        block.uses = 0  # it was only shown: nobody will read it, and it is free again

    def _announce(self, block: DeviceBlock, ask: bool) -> None:
        block.announced = True
        slab = block.slab
        self._tell(
            AnnounceDeviceBlock(
                block.number,
                block.size,
                gpu_id(slab.device),
                block.offset,
                slab.handle,
                block.flag.page,
                block.flag.place,
                ask,
            )
        )
