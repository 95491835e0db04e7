"""A context: what one worker remembers of one forward pass, so that a backward pass can follow it back.

Calls made inside a context leave Sends and Recvs here, and the names of the workers they touched. Each worker that a
context reaches has one under the same id; the worker that opened it tells them all when it ends.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from torch import Tensor
from torch.autograd.graph import Node

from telegrad.autograd.functions import RecvNode, SendNode
from telegrad.errors import AutogradError, ContextFailed, WorkerDied
from telegrad.ids import ContextId, MessageId, PassId, WorkerId, worker_of

Late = Callable[[MessageId, WorkerId], None]
_MOST_PASSES = 256  # that have not begun here and that a message is too late for: more only a liar names


class Snapshot(msgspec.Struct, frozen=True, eq=False):
    """The nodes of a context at one moment."""

    sends: dict[MessageId, SendNode]
    recvs: dict[Node, RecvNode]
    orphans: dict[MessageId, WorkerId] = {}
    alone: set[MessageId] | frozenset[MessageId] = frozenset()  # Sends that will hear from nobody


class Context(msgspec.Struct, eq=False, weakref=True):
    """One worker's part of one distributed autograd context. A struct: one is made for every step, in C.

    Examples:
        >>> with autograd.context() as context_id:
        ...     autograd.inspect_context(context_id)["participants"]
        []
    """

    context_id: ContextId
    here: WorkerId
    sends: dict[MessageId, SendNode] = {}
    recvs: dict[Node, RecvNode] = {}  # by their autograd nodes, as a pass meets them
    # Messages whose tensors nobody here can use: their Recv is still to be made, or never will be, since the call
    # failed or its caller had given up. Their Sends must hear so.
    orphans: dict[MessageId, WorkerId] = {}
    unsent: set[MessageId] = set()  # Sends whose message never left: they hear from nobody
    participants: set[WorkerId] = set()
    gradients: dict[Tensor, Tensor] = {}
    failure: WorkerDied | None = None  # the loss of a participant; never raised itself
    ended: bool = False
    usable: bool = True  # neither: what a call looks at before it asks `check_usable`
    strict: bool = False  # see `autograd.context`
    latest: Any = None  # the part of this worker in the latest pass over it; set by the engine
    profile: Any = None  # runs what passes do here, while a root profiles them
    answered: MessageId | None = None  # the Send of the reply that left last
    ahead: Any = None  # a Send and what lies behind it, if that was looked at before a pass came (`walking.py`)
    newest_pass: dict[WorkerId, PassId] = {}  # by its root: what comes about an older one comes too late
    lock: Any = msgspec.field(default_factory=threading.Lock)
    _late: Late | None = None
    _begun: PassId | None = None
    _too_late: dict[PassId, set[MessageId]] = {}

    def __repr__(self) -> str:
        waits = self.waiting_for()
        waiting = f", waiting for {', '.join(waits)}" if waits else ""
        failed = ", failed" if self.failure else ""
        return f"<Context {self.context_id}: {len(self.sends)} sent, {len(self.recvs)} received{waiting}{failed}>"

    @property
    def opened_by(self) -> WorkerId:
        """The worker whose `with context()` this is."""
        return worker_of(self.context_id)

    def waiting_for(self) -> list[str]:
        """What a running pass waits for here, in words."""
        return [] if self.latest is None else self.latest.waiting_for()

    def lose(self, error: WorkerDied) -> None:
        """A participant is gone: nothing more can be done with this context."""
        self.failure = error.again()
        self.usable = False

    def check_usable(self) -> None:
        """Raise if nothing more can be done with this context."""
        lost = self.failure
        if lost is not None:
            text = f"context {self.context_id} cannot be used any more: {lost} Open a new context"
            raise ContextFailed(text, worker=lost.worker, incarnation=lost.incarnation)
        if self.ended:
            raise AutogradError(f"context {self.context_id} has ended")

    def walked_from(self, message_id: MessageId) -> Any:
        """What was found ahead behind this Send, taken out; None if nothing was, or of another."""
        ahead, self.ahead = self.ahead, None
        return ahead[1] if ahead is not None and ahead[0] == message_id else None

    # --- what calls record ---

    def add_send(self, send: SendNode) -> None:
        """Tensors leave with a message."""
        if not self.ended:
            self.sends[send.message_id] = send  # one that `clear` overtakes goes with the context itself

    def arrived(self, message_id: MessageId, sender: WorkerId) -> None:
        """A message came with tensors that require grad; a Recv may follow.

        After the beginning of a pass nothing new can be part of it, since what it starts from was there before. But the
        sender may have counted this message in, so it hears now that no gradient will come.
        """
        with self.lock:
            self.orphans[message_id] = sender
            late = self._late
        if late is not None:
            late(message_id, sender)

    def arrived_in_pass(self, message_id: MessageId, sender: WorkerId, pass_id: PassId) -> None:
        """A message of a pass came, with gradients that have a graph; a Recv may follow.

        It is no part of that pass, and its sender knows. Of a later one it might be, as any other message.
        """
        with self.lock:
            self.orphans[message_id] = sender
            begun = self._begun
            of_later = begun is not None and (worker_of(begun) != worker_of(pass_id) or begun > pass_id)
            late = self._late if of_later else None
        if late is not None:
            late(message_id, sender)

    def add_recv(self, recv: RecvNode) -> None:
        """The tensors of a message that `arrived` are now part of the graph here."""
        if not self.ended:
            self.recvs[recv.node] = recv  # first: for a moment it is both, and a snapshot counts it once
            self.orphans.pop(recv.message_id, None)

    def arrived_with(self, recv: RecvNode) -> None:
        """Both at once: a message came, and its tensors are part of the graph."""
        with self.lock:
            if not self.ended:
                self.recvs[recv.node] = recv
            late = self._late
        if late is not None:
            late(recv.message_id, recv.peer)

    def touch(self, workers: Iterable[WorkerId]) -> None:
        """Workers that have a part in this context."""
        self.participants.update(workers)

    def snapshot(self, pass_id: PassId, late: Late) -> Snapshot:
        """What a pass works with that begins now. `late` hears of every message that arrives from now on."""
        with self.lock:
            self._late, self._begun = late, pass_id
            if not self.orphans and not self.unsent and not self._too_late:
                return Snapshot(self.sends.copy(), self.recvs.copy())
            return self._whole_snapshot(pass_id)

    def _whole_snapshot(self, pass_id: PassId) -> Snapshot:
        """The same with messages that have one end only."""
        orphans = self.orphans.copy()
        recvs = self.recvs.copy()
        attached = {recv.message_id for recv in recvs.values()}
        left = {message_id: sender for message_id, sender in orphans.items() if message_id not in attached}
        return Snapshot(self.sends.copy(), recvs, left, self.unsent | self._too_late.pop(pass_id, set()))

    def came_too_late(self, message_id: MessageId, pass_id: PassId) -> bool:
        """A message from here came too late for a pass. Says whether that has begun here; if not, it will know."""
        with self.lock:
            if self._begun == pass_id:
                return True
            if len(self._too_late) >= _MOST_PASSES and pass_id not in self._too_late:
                raise AutogradError(f"messages of context {self.context_id} are said to be late for too many passes")
            self._too_late.setdefault(pass_id, set()).add(message_id)
            return False

    # --- what passes leave ---

    def accumulate(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Add the leaf gradients of a finished pass."""
        with self.lock:
            if not self.gradients:
                self.gradients.update(gradients)
                return
            for leaf, gradient in gradients.items():
                known = self.gradients.get(leaf)
                self.gradients[leaf] = gradient if known is None else add_gradients(known, gradient)

    def end(self) -> None:
        """Let go of every tensor and node; a pass that runs is given up. Without the lock: what another thread adds now
        goes with the context."""
        self.ended, self.usable = True, False
        self.sends, self.recvs, self.orphans, self.gradients = {}, {}, {}, {}
        self._late = self.ahead = None
        latest, self.latest = self.latest, None
        if latest is not None and not latest.finished:
            latest.fail(AutogradError(f"context {self.context_id} ended while a backward pass over it was running"))


def add_gradients(one: Tensor, other: Tensor) -> Tensor:
    """Their sum. torch adds a sparse tensor to a dense one, and not the other way round."""
    return other + one if one.is_sparse and not other.is_sparse else one + other
