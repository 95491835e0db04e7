"""Requests that wait for their reply. Pure: it is told what happened and says who is concerned.

A request leaves the table exactly once: by its reply, its deadline, or the end of the worker it was sent to. Whoever
takes it out completes it, so nothing is completed twice and a late reply finds nothing and is dropped.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from telegrad.rpc.client.function_table import with_definition
from telegrad.wire.frames import Frame

FOREVER = float("inf")


class Slot(msgspec.Struct, eq=False):
    """One request on its way: what it was, until when it may take, and how its caller learns of the end."""

    subject: str | Callable[[], str]
    timeout: float
    deadline: float
    link: Any = None  # the one it was sent on
    since: float = 0.0  # when it was asked
    # What was given to the connection, to send again over a new one, and the definition of the function if the message
    # has only the number that stands for it.
    resend: tuple[Any, ...] = ()
    definition: bytes = b""
    # For a caller whose thread does not wait: called with the slot when it is done.
    complete: "Callable[[Slot], None] | None" = None
    # Its caller will come and wait itself, so no other thread need look for the reply until then.
    attended: bool = False
    # The future that `complete` will set, if that is what it does.
    future: Any = None
    on_reply: Any = None  # what a layer above does with the reply before it is unpacked
    kept: Any = None  # what the worker counts on while it may still run the request
    request_id: int = 0
    frame: Frame | None = None
    error: BaseException | None = None
    done: bool = False
    wake: Any = None  # releases the caller that waits while another thread reads
    in_place: Any = None  # CUDA tensors that the worker may read here until it has answered
    watched: bool = False  # whether its end is recorded, or noted in the audit
    seen: Any = None  # what is recorded of it

    def wait(self) -> None:
        """Wait here until it is done; raises RpcTimeout at the deadline, unless `complete` takes the error."""
        self.link.wait(self)

    def what(self) -> str:
        """What was asked, in words."""
        return self.subject if isinstance(self.subject, str) else self.subject()

    def whole(self) -> tuple[Any, ...]:
        """What to send if nothing sent before can be relied on."""
        message, *rest = self.resend
        return (with_definition(message, self.definition) if self.definition else message, *rest)

    def end_in_place(self) -> None:
        """The call is over: its tensors may change from now on."""
        tensors, self.in_place = self.in_place, None
        for one in tensors:
            one.end()

    def take_error(self) -> BaseException:
        """The error, to raise. The slot lets go of it: the frames it collects on its way up hold the slot."""
        error, self.error = self.error, None
        assert error is not None
        return error


class Left(NamedTuple):
    """What is known on of a request that its caller has left."""

    kept: Any  # see `Slot`
    defines: Any  # the call with the definition of its function: later ones may have sent the number alone


class Pending:
    """The table of one link. Taking out is atomic under the GIL: whoever pops a slot owns its completion."""

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}  # by the number of the request
        self.next_deadline = FOREVER  # of those that no caller's own thread keeps
        self._lock = threading.Lock()  # numbers and enters in one step, so that `lowest` never skips one
        self._last = 0
        self._lowest = 1
        # Left by their callers: the reply may still come, and layers above hear of it.
        self.given_up: dict[int, Left] = {}

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def asked(self) -> int:
        """How many requests there have been."""
        return self._last

    def admit(self, slot: Slot) -> int:
        """Number a request and wait for its reply. Returns the oldest request without one."""
        slots = self.slots
        with self._lock:
            slot.request_id = self._last = number = self._last + 1
            if slots or self.given_up:
                slots[number] = slot
                return self._lowest if self._lowest in slots else self._advance()
            slots[number] = slot  # all before it were answered
            self._lowest = number
            return number

    def lowest(self) -> int:
        """The oldest request without a reply, or the next one to come: all before it were answered."""
        with self._lock:
            return self._advance()

    def _advance(self) -> int:
        # Those that were given up count as well: whoever runs one must keep its reply until that has come.
        lowest = self._lowest
        while lowest <= self._last and lowest not in self.slots and lowest not in self.given_up:
            lowest += 1
        self._lowest = lowest
        return lowest

    def take(self, request_id: int) -> Slot | None:
        """The slot of a reply; None if nobody waits for it any more."""
        return self.slots.pop(request_id, None)

    def give_up(self, request_id: int) -> Slot | None:
        """The slot of a request whose caller waits no longer; None if it is being completed."""
        with self._lock:  # it is in one of the two at any moment
            slot = self.slots.pop(request_id, None)
            if slot is not None:
                self.given_up[request_id] = Left(slot.kept, slot.whole()[0] if slot.definition else None)
        return slot

    def was_given_up(self, request_id: int) -> bool:
        """Whether the caller of a request that had no reply waits no longer."""
        with self._lock:  # as above
            return request_id in self.given_up

    def forget(self, request_id: int) -> None:
        """A request could not be sent, or not all of it: it will have no reply, not even a late one."""
        with self._lock:
            self.slots.pop(request_id, None)
            left = self.given_up.pop(request_id, None)  # by the timer, if its time was up as well
        del left  # outside the lock, as below

    def overdue(self) -> list[int]:
        """The requests that were given up and have had no reply."""
        return sorted(self.given_up)

    def definition_in(self, request_id: int) -> Any:
        """The call that a request was which was given up, if it may have defined its function."""
        left = self.given_up.get(request_id)
        return None if left is None else left.defines

    def is_late(self, request_id: int, never_came: bool = False) -> bool:
        """Whether a reply that nobody waits for comes to a request that was given up; true once. It may say that the
        request was lost with its connection, and `never_came`.

        If not, it is a second copy of a reply that was taken: a request that was sent again is answered again."""
        with self._lock:
            try:
                kept = self.given_up.pop(request_id).kept
            except KeyError:
                return False
        if never_came and kept is not None:
            kept.unsent()
        del kept  # outside the lock: what it was may be the last to hold a reference
        return True

    def expired(self, now: float) -> tuple[list[Slot], float]:
        """Slots whose deadline passed, taken out; and when to look again."""
        late, earliest = [], FOREVER
        for slot in list(self.slots.values()):
            if slot.complete is None:
                continue  # its caller keeps the deadline itself
            if slot.deadline <= now:
                if self.give_up(slot.request_id) is not None:
                    late.append(slot)
            elif slot.deadline < earliest:
                earliest = slot.deadline
        self.next_deadline = earliest
        return late, earliest

    def any_unattended(self) -> bool:
        """Whether there is a request whose caller does not come for the reply itself."""
        return any(slot.complete is not None and not slot.attended for slot in list(self.slots.values()))

    def take_all(self) -> list[Slot]:
        """Every slot, taken out: the worker they wait for is gone."""
        taken = []
        for request_id in list(self.slots):
            slot = self.slots.pop(request_id, None)
            if slot is not None:
                taken.append(slot)
        return taken

    def forget_given_up(self) -> None:
        """No reply will come to what its caller has left: the worker is gone for good."""
        with self._lock:
            given_up, self.given_up = self.given_up, {}
        del given_up  # outside the lock, as above

    def numbers(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """The requests that wait, those that were given up, and the lowest of both when it was last asked for."""
        return tuple(self.slots), tuple(sorted(self.given_up)), self._lowest

    def snapshot(self) -> list[Slot]:
        """The slots that wait, oldest first."""
        return list(self.slots.values())
