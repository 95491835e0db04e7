"""Tensors that a peer reads where they lie, for a caller that waits until its call has been answered.

If all work on the caller's stream is done, nothing has to be copied before the callee may read: its own stream copies
the tensors out of the caller's memory. The caller's process asks nothing of the GPU then, which would have to change
from the other process to it (140 us) and back.

The memory must not change before it was read. So this is for calls whose thread waits for the answer: what came of it
then is that it was read, or is about to be, and the stream waits for that; or nobody has begun to read, and from then
on nobody may (`given_up`). The reader sets `let_go` before it looks at `given_up`, the sender the other way round.
"""

from __future__ import annotations

import threading

from telegrad.cuda import order
from telegrad.cuda.runtime import runtime
from telegrad.transport.device.blocks import DeviceBlock

fence = threading.Lock()  # taken between writing one number and reading another: neither is put off then


class InPlace:
    """The tensors of one message. The number of a block's use says when they were read; its memory is not used."""

    __slots__ = ("_block", "_use")

    def __init__(self, block: DeviceBlock, kept: tuple[object, ...]) -> None:
        with fence:
            block.kept = kept
        block.flag.written.set(block.uses)  # there is nothing to wait for
        self._block = block
        self._use = block.uses

    def end(self) -> None:
        """The call is over: from now on the caller may change its tensors, on the current stream of this thread."""
        block, use = self._block, self._use
        flag = block.flag
        if not flag.read.has_reached(use):
            if not flag.let_go.has_reached(use):
                flag.given_up.set(use)
                with fence:
                    pass
            if flag.let_go.has_reached(use) and not flag.read.will_soon_reach(use):
                device = block.slab.device
                runtime().wait_value(order.current_stream(device), flag.read.on_device, use)
                return  # what is kept is let go of when it was read: see `DeviceLender`
        with fence:
            if block.uses == use:
                block.kept = ()
