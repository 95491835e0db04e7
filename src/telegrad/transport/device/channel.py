"""Device memory on one connection: what both ends say about it, and when it goes back.

Which way the tensors of a message take is in `ways.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from telegrad.cuda import order
from telegrad.cuda.forms import Form
from telegrad.cuda.runtime import CudaError
from telegrad.errors import SerializationError
from telegrad.transport.device.blocks import FIRST_NAME, Announcement
from telegrad.transport.device.borrowing import DeviceBorrower
from telegrad.transport.device.flags import Flags, Page
from telegrad.transport.device.landing import Landing
from telegrad.transport.device.offers import Offer
from telegrad.transport.device.ways import PeerState, Ways
from telegrad.wire.block_notices import (
    AnnounceDeviceBlock,
    AnnounceDeviceRegion,
    DeviceBlockOpened,
    DeviceBlocksClosed,
    DeviceRegionRefused,
    GrantDeviceMemory,
    ReclaimDeviceMemory,
    RetireDeviceBlocks,
    RetireDeviceRegions,
)
from telegrad.wire.messages import AnyMessage

log = logging.getLogger("telegrad.transport")

DEVICE_NOTICES = (
    AnnounceDeviceBlock,
    DeviceBlockOpened,
    DeviceBlocksClosed,
    RetireDeviceBlocks,
    AnnounceDeviceRegion,
    DeviceRegionRefused,
    RetireDeviceRegions,
    GrantDeviceMemory,
    ReclaimDeviceMemory,
)


class DeviceChannel(Ways):
    """The blocks of device memory of one connection, lent and borrowed. Any thread may send; one reads."""

    def __init__(
        self,
        tell: Callable[[AnyMessage], None],
        lend_page: Callable[[], Page],
        find_page: Callable[[int], Page],
        peer_is_gone: Callable[[], bool],
    ) -> None:
        """`tell` has a notice sent before anything that is sent from then on; `lend_page` shares a block of host memory
        with the peer for good, and `find_page` finds one of the peer's by its number."""
        super().__init__(tell, lend_page)
        self._find_page = find_page
        self._peer_is_gone = peer_is_gone
        self._pages: dict[int, Flags] = {}  # the peer's, by the number of the block they lie in
        self.borrower = DeviceBorrower(self._expect)
        self.landing = Landing(lambda: Flags(lend_page()))

    # --- what the peer says ---

    def _expect(self, device: int, forms: Sequence[Form]) -> None:
        """Tensors came through a block: have memory for the next ones, if the peer can open it."""
        if order.direct and self._regions_open and self._can_open(device):
            self.landing.expect(device, forms)

    def heard(self, message: AnyMessage) -> None:
        """One of `DEVICE_NOTICES` came."""
        if type(message) is DeviceBlocksClosed:
            self.lender.closed(message.blocks)
        elif type(message) is RetireDeviceBlocks:
            self.borrower.retire(message.blocks)
        elif type(message) is AnnounceDeviceBlock:
            refusal = self._open(message)
            if message.ask or refusal:
                self._tell(DeviceBlockOpened(message.number, refusal))
        elif type(message) is DeviceBlockOpened:
            self._take_answer(message)
        elif type(message) is GrantDeviceMemory:
            self._take_grants(message)
        elif type(message) is ReclaimDeviceMemory:
            self.offers.reclaim(message.places)
        elif type(message) is AnnounceDeviceRegion:
            refusal = self.borrower.open_region(message.number, message.gpu, message.memory)
            if refusal:
                self._tell(DeviceRegionRefused(message.number, refusal))
        elif type(message) is DeviceRegionRefused:
            log.info("a peer cannot open memory of torch's allocator: %s; tensors are copied once more", message.reason)
            self._regions_open = False
        elif type(message) is RetireDeviceRegions:
            self.borrower.retire_regions(message.numbers)

    def _take_grants(self, message: GrantDeviceMemory) -> None:
        """What the peer lets this process write to; what cannot be opened here goes back at once."""
        flags = self._flags_of(message.page)
        for place in message.places:
            flag = flags.at(place.place)
            try:
                self.offers.add(Offer(place, flag, self.borrower.region(place.region)))
            except SerializationError as error:
                log.debug("granted memory cannot be used: %s", error)
                flag.let_go.set(place.use)

    def _flags_of(self, page: int) -> Flags:
        flags = self._pages.get(page)
        if flags is None:
            flags = self._pages[page] = Flags(self._find_page(page))
        return flags

    def _open(self, message: AnnounceDeviceBlock) -> str:
        """Open a block; why not, if it cannot be."""
        try:
            flag = self._flags_of(message.page).at(message.flag)
        except CudaError as error:
            return str(error)
        return self.borrower.open(
            Announcement(message.number, message.size, message.gpu, message.offset, message.memory, flag)
        )

    def _take_answer(self, message: DeviceBlockOpened) -> None:
        device = self._asked.pop(message.number, None)
        if device is not None:
            self._peer[device] = PeerState.CANNOT if message.refusal else PeerState.CAN_OPEN
        if message.refusal:
            log.info("a peer cannot open device memory: %s; tensors go through host memory", message.refusal)
            if device is None:  # a later block: none of that kind from now on
                self._peer = dict.fromkeys(self._peer, PeerState.CANNOT)

    # --- what to tell it ---

    def use_time(self) -> bool:
        """See to what nobody waits for: memory that was written to, and memory for what is expected. Whether the peer
        should be told of that."""
        self.offers.tidy()
        return bool(self.landing.expected) and self.landing.prepare_expected()

    @property
    def has_news(self) -> bool:
        """Whether the peer should be told something."""
        return bool(self.borrower.closed or self.lender.untold or self.landing.has_news)

    def news(self) -> list[AnyMessage]:
        """What to tell it; each is told once."""
        numbers = []
        while self.borrower.closed:
            try:
                numbers.append(self.borrower.closed.popleft())
            except IndexError:  # another thread took the last one
                break
        messages: list[AnyMessage] = [DeviceBlocksClosed(tuple(numbers))] if numbers else []
        if self.lender.untold:
            messages.append(RetireDeviceBlocks(self.lender.retired()))
        if self.landing.has_news:
            grants = self.landing.grants(self.shown.show)
            if grants is not None:
                messages.append(grants)
            if reclaimed := self.landing.reclaimed():
                messages.append(ReclaimDeviceMemory(reclaimed))
        return messages

    def trim(self, before: float) -> None:
        """Give back what has been idle since `before` on the monotonic clock."""
        self.lender.trim(before)
        self.landing.trim(before)
        self.offers.tidy()
        self.shown.retire(before, self.landing.regions_in_use)

    @property
    def is_in_use(self) -> bool:
        """Whether there is anything of either side that may have to be given back."""
        return self.lender.has_blocks or self.borrower.mapped > 0 or len(self.shown) > 0 or self.landing.granted[0] > 0

    def close(self) -> None:
        """The connection has ended."""
        self.lender.close(self._peer_is_gone)
        self.offers.close()
        self.landing.close(self._peer_is_gone)
        self.borrower.close(self._peer_is_gone)


def is_of_device(block: int) -> bool:
    """Whether a block's number is that of device memory."""
    return block >= FIRST_NAME
