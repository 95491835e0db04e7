"""A context: what one worker remembers of one forward pass, so that a backward pass can follow it back.

Calls made inside a context leave Sends and Recvs here, and the names of the workers they touched. Each worker that a
context reaches has one under the same id; the worker that opened it tells them all when it ends.
"""

import threading
from collections.abc import Callable, Iterable

from torch import Tensor

from telegrad.autograd.functions import RecvNode, SendNode
from telegrad.errors import AutogradError, ContextFailed
from telegrad.ids import ContextId, MessageId, WorkerId, worker_of


class Context:
    """One worker's part of one distributed autograd context."""

    def __init__(self, context_id: ContextId, here: WorkerId, strict: bool = False) -> None:
        self.context_id = context_id
        self.here = here
        self.strict = strict
        self.sends: dict[MessageId, SendNode] = {}
        self.recvs: dict[MessageId, RecvNode] = {}
        # Messages whose tensors came too late for their caller: nobody can use them, but their Sends must hear so.
        self.orphans: dict[MessageId, WorkerId] = {}
        self.participants: set[WorkerId] = set()
        self.gradients: dict[Tensor, Tensor] = {}
        self.failure: str | None = None
        self.ended = False
        # What a running pass waits for, in words; set by the engine.
        self.waiting_for: Callable[[], list[str]] | None = None
        self._lock = threading.Lock()
        self._in_flight = 0
        self._when_quiet: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        waits = self.waiting_for() if self.waiting_for is not None else []
        waiting = f", waiting for {', '.join(waits)}" if waits else ""
        failed = ", failed" if self.failure else ""
        return f"<Context {self.context_id}: {len(self.sends)} sent, {len(self.recvs)} received{waiting}{failed}>"

    @property
    def opened_by(self) -> WorkerId:
        """The worker whose `with context()` this is."""
        return worker_of(self.context_id)

    def check_usable(self) -> None:
        """Raise if nothing more can be done with this context."""
        if self.failure is not None:
            raise ContextFailed(f"context {self.context_id} cannot be used any more: {self.failure} Open a new context")
        if self.ended:
            raise AutogradError(f"context {self.context_id} has ended")

    # --- what calls record ---

    def add_send(self, send: SendNode) -> None:
        """Tensors left with a message."""
        with self._lock:
            self.sends[send.message_id] = send

    def add_recv(self, recv: RecvNode) -> None:
        """Tensors came with a message."""
        with self._lock:
            self.recvs[recv.message_id] = recv

    def touch(self, workers: Iterable[WorkerId]) -> None:
        """Workers that have a part in this context."""
        self.participants.update(workers)

    def snapshot(self) -> tuple[dict[MessageId, SendNode], dict[MessageId, RecvNode], dict[MessageId, WorkerId]]:
        """Sends, Recvs and orphans as they are now: what a pass works with."""
        with self._lock:
            return dict(self.sends), dict(self.recvs), dict(self.orphans)

    # --- calls under way ---

    def call_begins(self) -> None:
        """A call left; its reply may still add a Recv."""
        with self._lock:
            self._in_flight += 1

    def call_ends(self) -> None:
        """Its reply came, or never will."""
        ready: list[Callable[[], None]] = []
        with self._lock:
            self._in_flight -= 1
            if not self._in_flight:
                ready, self._when_quiet = self._when_quiet, []
        for action in ready:
            action()

    def when_quiet(self, action: Callable[[], None]) -> bool:
        """Have `action` called when no call is under way; True, without calling it, if that is now."""
        with self._lock:
            if not self._in_flight:
                return True
            self._when_quiet.append(action)
            return False

    # --- what passes leave ---

    def accumulate(self, gradients: dict[Tensor, Tensor]) -> None:
        """Add the leaf gradients of a finished pass."""
        with self._lock:
            for leaf, gradient in gradients.items():
                known = self.gradients.get(leaf)
                self.gradients[leaf] = gradient if known is None else known + gradient

    def clear(self) -> None:
        """Let go of every tensor and node."""
        with self._lock:
            self.ended = True
            self.sends.clear()
            self.recvs.clear()
            self.orphans.clear()
            self.gradients = {}
            self.waiting_for = None
