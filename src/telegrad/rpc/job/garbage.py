"""Python's garbage collector, and what lives as long as the process.

torch and what it imports are 170,000 objects. The collector walks all of them each time the living ones have grown by a
quarter, which takes 100 ms and more: a worker with many calls in flight stood still for that long every few seconds. So
what is alive when it has walked them for the first time in a worker is set aside until that leaves. It is freed as ever
when nobody refers to it; only cycles among such objects wait. There is no garbage among them: that has just been
collected, which to do on joining would cost each worker those 100 ms. A program that has set objects aside itself, or
takes them back, is left alone.
"""

import gc
from typing import Any

_ALL_GENERATIONS = 2

_set_aside = False  # whether that was done here


def watch() -> None:
    """This process becomes a worker."""
    if _collected not in gc.callbacks:
        gc.callbacks.append(_collected)


def _collected(phase: str, about: dict[str, Any]) -> None:
    """The collector begins, or has just ended."""
    global _set_aside  # noqa: PLW0603 - of the process, like the collector
    if phase == "stop" and not _set_aside and about["generation"] == _ALL_GENERATIONS and not gc.get_freeze_count():
        _set_aside = True
        gc.freeze()


def take_back() -> None:
    """It is none any more."""
    global _set_aside  # noqa: PLW0603 - of the process, like the collector
    if _collected in gc.callbacks:
        gc.callbacks.remove(_collected)
    if _set_aside:
        _set_aside = False
        gc.unfreeze()
