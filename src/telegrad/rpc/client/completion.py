"""How callers learn that their request has ended: those that sleep are woken, futures are completed.

One rule: a slot is completed by a thread that does not read. So a callback, or a hook of a backward pass, may run for
long and may wait for another reply of the same link. The thread of a user runs nobody's callbacks: what may run a
user's code it leaves to the I/O threads; and a reply that its caller came for (`attended`) is left to that caller.
"""

from functools import partial

from telegrad import trace
from telegrad.rpc.client.pending import Slot
from telegrad.rpc.runtime import Runtime


def wake(slot: Slot) -> None:
    """Wake a caller that sleeps: its reply is there, or it is to read. It may be awake already: by itself, at its
    deadline, or because it was to read when another thread came first, and found the reply."""
    try:
        slot.wake.release()
    except RuntimeError:
        pass


class Completion:
    """The ends of the requests of one link."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def announce(self, slot: Slot) -> bool:
        """A slot that was taken out of the table has its reply, or its error: wake its caller if that sleeps.

        Returns whether it has to be completed."""
        slot.done = True
        if trace.recorder is not None:
            trace.recorder.answered(slot)
        if slot.wake is None:
            return slot.complete is not None
        wake(slot)
        return slot.complete is not None and not slot.attended

    def by_io_thread(self, slots: list[Slot]) -> None:
        """Complete what was read. Of several, what runs callbacks goes to threads of its own: one may wait for another.
        Answers of a pass are completed here: there may be hundreds, and each hand-over costs as much as one of them."""
        if len(slots) > 1:
            left = self._complete_plain(slots, None)
            slots = [slot for slot in left if slot.future is None]
            if len(slots) < len(left):
                self._hand_over([slot for slot in left if slot.future is not None])
        for slot in slots:
            _complete(slot)

    def by_caller(self, slots: list[Slot], own: Slot | None) -> None:
        """The same in a thread that may run nothing of a user's: a user's own, or one with more to complete. What the
        first came for itself, its `own` if that is attended, it will take."""
        for_others = self._complete_plain(slots, own)
        if for_others:
            self._hand_over(for_others)

    def _complete_plain(self, slots: list[Slot], own: Slot | None) -> list[Slot]:
        """Complete what runs no user's code. Returns the others."""
        others = []
        for slot in slots:
            future = slot.future
            if future is None:
                if slot.attended:
                    if slot is not own:
                        others.append(slot)
                    continue
            else:
                future.settling = True  # before looking: see `Future.add_done_callback`
                if future.has_callbacks:
                    future.settling = False
                    others.append(slot)
                    continue
            _complete(slot)
        return others

    def settle(self, slots: list[Slot]) -> None:
        """Slots that were taken out of the table have an error: their time is up, or the worker is gone."""
        unfinished = [slot for slot in slots if self.announce(slot)]
        if unfinished:
            self._hand_over(unfinished)

    def _hand_over(self, slots: list[Slot]) -> None:
        """To the I/O threads: what runs callbacks each to one of its own; answers of a pass, of which there may be
        hundreds and which do not wait for each other, all to one."""
        apart = [[slot] for slot in slots if slot.future is not None]
        together = [slot for slot in slots if slot.future is None]
        for part in [*apart, together] if together else apart:
            if self._runtime.closing:  # no thread may be left
                _complete_all(part)
            else:
                self._runtime.io_threads.submit(partial(_complete_all, part))


def _complete_all(slots: list[Slot]) -> None:
    for slot in slots:
        _complete(slot)


def _complete(slot: Slot) -> None:
    complete = slot.complete
    if complete is not None:  # else its caller came for the reply itself, and was first
        complete(slot)
