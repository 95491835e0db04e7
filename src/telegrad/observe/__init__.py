"""To see what a job does: a timeline over all workers, a live page, metrics, profiles, and why it hangs.

    with telegrad.observe.record("step.json"):      one file for Perfetto
        ...
    print(telegrad.observe.explain())               who waits for whom, and where in the code

Nothing here costs anything until it is used; most of it is loaded only then.
"""

import importlib
from typing import TYPE_CHECKING, Any

from telegrad.observe.profiling.merging import install as install_profiling
from telegrad.observe.profiling.remote import Profiler
from telegrad.observe.service import Observation
from telegrad.rpc.agent import Agent

if TYPE_CHECKING:
    from telegrad.observe.timeline.recording import record

__all__ = ["install", "record"]

_LAZY = {"record": "timeline.recording"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def install(agent: Agent) -> None:
    """Let an agent answer questions about itself."""
    agent.install(Observation(agent))
    agent.install(Profiler(agent))
    install_profiling()
