"""What the two ends of a connection tell each other about how tensors travel: the blocks of memory, and the streams.

Nobody above the connection sees these records. They are messages like the others (`messages.py`).
"""

import msgspec


class BlockNotice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of these records."""


class ReleaseBlocks(BlockNotice, frozen=True, tag=43):
    """I no longer use these blocks of your shared memory."""

    blocks: tuple[int, ...]


class RetireBlocks(BlockNotice, frozen=True, tag=44):
    """I will not use these blocks of my shared memory again; unmap them."""

    blocks: tuple[int, ...]


class AnnounceDeviceBlock(BlockNotice, frozen=True, tag=80):
    """A block of my device memory that messages will name; with `ask`, tell me whether you can open it."""

    number: int
    size: int
    gpu: str  # its UUID
    offset: int  # in the memory that the handle stands for
    memory: bytes  # what it is opened with
    page: int  # the block of shared memory, and the place in it, that says which use was written and read
    flag: int
    ask: bool


class DeviceBlockOpened(BlockNotice, frozen=True, tag=81):
    """I opened a block of your device memory, or cannot, and why."""

    number: int
    refusal: str


class DeviceBlocksClosed(BlockNotice, frozen=True, tag=82):
    """I have closed these blocks of your device memory, which you had retired."""

    blocks: tuple[int, ...]


class RetireDeviceBlocks(BlockNotice, frozen=True, tag=83):
    """I will not use these blocks of my device memory again; close them and tell me."""

    blocks: tuple[int, ...]


class AnnounceDeviceRegion(BlockNotice, frozen=True, tag=85):
    """Memory of my allocator that messages and grants will name; open it."""

    number: int
    gpu: str  # its UUID
    memory: bytes  # what it is opened with


class DeviceRegionRefused(BlockNotice, frozen=True, tag=86):
    """I cannot open that memory, and why."""

    number: int
    reason: str


class RetireDeviceRegions(BlockNotice, frozen=True, tag=87):
    """Neither messages nor grants will name these again; close them."""

    numbers: tuple[int, ...]


class GrantedPlace(BlockNotice, frozen=True):
    """Memory of mine that you may write one tensor to."""

    place: int  # among the flags of the page: its number, too
    use: int
    region: int
    offset: int
    nbytes: int
    device: str  # what I call it


class GrantDeviceMemory(BlockNotice, frozen=True, tag=88):
    """Write to these, in place of a block of yours, what you send me of these sizes."""

    page: int  # the block of shared memory that has their flags
    places: tuple[GrantedPlace, ...]


class ReclaimDeviceMemory(BlockNotice, frozen=True, tag=89):
    """Give these back, unless you have used them."""

    places: tuple[int, ...]


class StripesReady(BlockNotice, frozen=True, tag=84):
    """All connections that large messages may be divided among are there: so many."""

    connections: int


AnyBlockNotice = (
    ReleaseBlocks
    | RetireBlocks
    | AnnounceDeviceBlock
    | DeviceBlockOpened
    | DeviceBlocksClosed
    | RetireDeviceBlocks
    | AnnounceDeviceRegion
    | DeviceRegionRefused
    | RetireDeviceRegions
    | GrantDeviceMemory
    | ReclaimDeviceMemory
    | StripesReady
)
