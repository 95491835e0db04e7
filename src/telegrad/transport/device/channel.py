"""Device memory on one connection: which tensors of a message stay on the GPU, and what the peers say about it.

Whether the peer can open memory of a GPU is asked once, with the first block, and that message goes through the host:
the peer may be in a container of its own, or not see that GPU. Its answer decides for all messages that follow. Where
there is no room for a block a message goes through the host as well.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from enum import Enum, auto

from telegrad.cuda import order
from telegrad.cuda.copy_kernel import Piece, copy_and_tell
from telegrad.cuda.runtime import CudaError, runtime
from telegrad.transport.device.blocks import FIRST_NAME, Announcement, DeviceBlock, NoRoom, gpu_id
from telegrad.transport.device.borrowing import DeviceBorrower
from telegrad.transport.device.flags import Flags, Page
from telegrad.transport.device.lending import DeviceLender
from telegrad.wire.block_notices import (
    AnnounceDeviceBlock,
    DeviceBlockOpened,
    DeviceBlocksClosed,
    RetireDeviceBlocks,
)
from telegrad.wire.frames import SegmentSpec, align
from telegrad.wire.messages import AnyMessage
from telegrad.wire.tensor.segments import Segment
from telegrad.wire.tensor.specs import TensorSpec

log = logging.getLogger("telegrad.transport")

DEVICE_NOTICES = (AnnounceDeviceBlock, DeviceBlockOpened, DeviceBlocksClosed, RetireDeviceBlocks)


class _Peer(Enum):
    """What is known of the peer and one GPU."""

    ASKED = auto()
    CAN_OPEN = auto()
    CANNOT = auto()


@functools.cache
def _say_once(device: int) -> None:
    log.warning(
        "no room for blocks of device memory on cuda:%d: tensors go through host memory, which is slower. Raise "
        "`cuda_memory_share` in the options, or keep fewer messages in flight",
        device,
    )


class DeviceChannel:
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
        self._tell = tell
        self._find_page = find_page
        self._peer_is_gone = peer_is_gone
        self._pages: dict[int, Flags] = {}  # the peer's, by the number of the block they lie in
        self.lender = DeviceLender(lambda: Flags(lend_page()))
        self.borrower = DeviceBorrower()
        self._peer: dict[int, _Peer] = {}  # by device
        self._asked: dict[int, int] = {}  # the device of a block that the peer was asked about

    # --- sending ---

    def lend(self, specs: Sequence[TensorSpec], segments: Sequence[Segment]) -> list[SegmentSpec | None]:
        """Copy what can stay on the GPU into blocks. For each segment where it is now, or None: it goes another way.

        The copies are on the current stream, so the sender may change its tensors as soon as this returns."""
        placed: list[SegmentSpec | None] = [None] * len(segments)
        stays = {spec.segment for spec in specs if spec.device.startswith("cuda")}
        by_device: dict[int, list[int]] = {}
        for index, segment in enumerate(segments):
            if segment.device >= 0 and index in stays:
                by_device.setdefault(segment.device, []).append(index)
        for device, indices in by_device.items():
            block = self._block(device, sum(align(segments[index].nbytes) for index in indices))
            if block is None:
                continue
            stream = order.current_stream(device)
            if block.uses > 1 and not block.flag.read.has_reached(block.uses - 1):
                runtime().wait_value(stream, block.flag.read.on_device, block.uses - 1)
            offset = 0
            pieces = []
            for index in indices:
                segment = segments[index]
                pieces.append(Piece(segment.address, block.address + offset, segment.nbytes))
                placed[index] = SegmentSpec(segment.nbytes, block.name, offset)
                offset += align(segment.nbytes)
            copy_and_tell(device, stream, pieces, block.flag.written.on_device, block.uses, block.counter)
        return placed

    def _block(self, device: int, nbytes: int) -> DeviceBlock | None:
        peer = self._peer.get(device)
        try:
            if peer is None:
                self._ask(device)
            if peer is not _Peer.CAN_OPEN:
                return None
            block = self.lender.take(device, nbytes)
        except NoRoom as error:
            log.debug("%s", error)
            _say_once(device)
            return None
        if not block.announced:
            self._announce(block, ask=False)
        return block

    def _ask(self, device: int) -> None:
        self._peer[device] = _Peer.ASKED
        try:
            block = self.lender.take(device, 1)
        except CudaError as error:
            log.warning("device memory cannot be shared here (%s): tensors go through host memory", error)
            self._peer[device] = _Peer.CANNOT
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

    # --- receiving ---

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

    def _open(self, message: AnnounceDeviceBlock) -> str:
        """Open a block; why not, if it cannot be."""
        try:
            flags = self._pages.get(message.page)
            if flags is None:
                flags = self._pages[message.page] = Flags(self._find_page(message.page))
            flag = flags.at(message.flag)
        except CudaError as error:
            return str(error)
        return self.borrower.open(
            Announcement(message.number, message.size, message.gpu, message.offset, message.memory, flag)
        )

    def _take_answer(self, message: DeviceBlockOpened) -> None:
        device = self._asked.pop(message.number, None)
        if device is not None:
            self._peer[device] = _Peer.CANNOT if message.refusal else _Peer.CAN_OPEN
        if message.refusal:
            log.info("a peer cannot open device memory: %s; tensors go through host memory", message.refusal)
            if device is None:  # a later block: none of that kind from now on
                self._peer = dict.fromkeys(self._peer, _Peer.CANNOT)

    # --- both ---

    @property
    def has_news(self) -> bool:
        """Whether the peer should be told something."""
        return bool(self.borrower.closed) or self.lender.has_retired

    def news(self) -> list[AnyMessage]:
        """What to tell it; each is told once."""
        numbers = []
        while self.borrower.closed:
            try:
                numbers.append(self.borrower.closed.popleft())
            except IndexError:  # another thread took the last one
                break
        messages: list[AnyMessage] = [DeviceBlocksClosed(tuple(numbers))] if numbers else []
        if self.lender.has_retired:
            messages.append(RetireDeviceBlocks(self.lender.retired()))
        return messages

    def close(self) -> None:
        """The connection has ended."""
        self.lender.close(self._peer_is_gone)
        self.borrower.close(self._peer_is_gone)


def is_of_device(block: int) -> bool:
    """Whether a block's number is that of device memory."""
    return block >= FIRST_NAME
