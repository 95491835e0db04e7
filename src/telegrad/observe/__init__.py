"""To see what a job does: a timeline over all workers, a live page, metrics, profiles, and why it hangs.

    with telegrad.observe.record("step.json"):      one file for Perfetto
        ...
    print(telegrad.observe.explain())               who waits for whom, and where in the code

Nothing here costs anything until it is used; most of it is loaded only then.
"""

import importlib
from typing import TYPE_CHECKING, Any

from telegrad.observe.announcement import install as install_announcement
from telegrad.observe.automatic import install as install_automatic
from telegrad.observe.profiling.merging import install as install_profiling
from telegrad.observe.profiling.remote import Profiler
from telegrad.observe.service import Observation
from telegrad.rpc.agent import Agent
from telegrad.rpc.job.debug_waits import Waits

if TYPE_CHECKING:
    from telegrad.observe.explanation import explain
    from telegrad.observe.spans import trace_calls
    from telegrad.observe.timeline.recording import record

__all__ = ["explain", "record", "trace_calls"]

_LAZY = {"explain": "explanation", "record": "timeline.recording", "trace_calls": "spans"}


if not TYPE_CHECKING:  # to a checker every name would exist then

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__  # what users use, and not the modules behind it


def _explain() -> str:
    return str(importlib.import_module(f"{__name__}.explanation").explain())


def install(agent: Agent) -> None:
    """Let an agent answer questions about itself."""
    agent.install(Observation(agent))
    agent.install(Profiler(agent))
    agent.layer(Waits).describe = _explain  # what SIGUSR1 prints
    install_profiling()
    install_announcement(agent)
    install_automatic(agent)
