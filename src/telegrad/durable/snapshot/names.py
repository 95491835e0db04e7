"""Names for what is copied and who has it; shared by the two cores and by the shells around them."""

from typing import NamedTuple


class Snapshot(NamedTuple):
    """The state of a whole run between two steps: taken after `step` steps, in one epoch of one driver.

    Epochs count the beginnings and returns of a run: a snapshot that was taken anew after a return is another one, so
    parts of both are never mixed, not even where a program does not repeat itself exactly. They are ordered by step.
    """

    step: int
    epoch: int
    driver: int  # its incarnation: files of different jobs stay apart

    def __str__(self) -> str:
        return f"{self.step}.{self.epoch:x}.{self.driver:x}"


class Report(NamedTuple):
    """What one worker has when a run begins or returns."""

    own: frozenset[Snapshot] = frozenset()
    kept: frozenset[tuple[str, Snapshot]] = frozenset()  # for which worker, and of when
