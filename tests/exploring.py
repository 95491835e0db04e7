"""All orders of what can happen in a small world, one after the other: a test's `run` asks `Chance` what happens next.

A run is repeated from its beginning with other choices until none is left. Worlds are deterministic, so the same
choices lead to the same state; a state that was seen before need not be followed again, if the world can tell its
states apart (`Chance.seen`). An error carries the choices that led to it.
"""

from collections.abc import Callable, Hashable, Sequence


class SeenBefore(Exception):
    """This run has come to a state that another has followed to its ends."""


class Chance:
    """Makes the choices of one run: those that were given, then always the first."""

    def __init__(self, given: Sequence[int], known: set[Hashable]) -> None:
        self._given = given
        self._known = known
        self._taken: list[tuple[int, int]] = []  # the choice, and of how many
        self.story: list[str] = []

    def choose(self, options: Sequence[str]) -> str:
        """One of the options."""
        at = len(self._taken)
        choice = self._given[at] if at < len(self._given) else 0
        self._taken.append((choice, len(options)))
        self.story.append(options[choice])
        return options[choice]

    @property
    def repeats(self) -> bool:
        """Whether this run is still on the way to where it differs from the one before: its state is nothing new."""
        return len(self._taken) < len(self._given)

    def seen(self, state: Hashable) -> None:
        """The world is in this state. Ends the run if what follows from it has been followed before."""
        if self.repeats:
            return
        if state in self._known:
            raise SeenBefore
        self._known.add(state)

    def next(self) -> list[int] | None:
        """The choices of the next run; None if there is none."""
        taken = self._taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        return [choice for choice, _ in taken[:-1]] + [taken[-1][0] + 1] if taken else None


def explore(run: Callable[[Chance], None], most: int = 100_000) -> int:
    """Run with all choices; how many runs came to their end."""
    known: set[Hashable] = set()
    path: list[int] | None = []
    ends = 0
    for _ in range(most):
        chance = Chance(path, known)
        try:
            run(chance)
            ends += 1
        except SeenBefore:
            pass
        except BaseException as error:
            error.add_note("after: " + "; ".join(chance.story))
            raise
        path = chance.next()
        if path is None:
            return ends
    raise AssertionError(f"more than {most} runs: the world is too large")
