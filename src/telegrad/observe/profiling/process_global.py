"""A profile of everything that others call on this worker while it is on, whichever threads serve them.

Under torch's name, `torch.distributed.rpc._server_process_global_profile`. While one is on, the handler of calls is
another one, which profiles each; off, nothing is changed.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList

from telegrad.observe.profiling.merging import parse_records
from telegrad.observe.profiling.remote import ScopedRequest
from telegrad.rpc.current import require_agent
from telegrad.rpc.layer import Served
from telegrad.rpc.request import Request
from telegrad.wire.messages import PythonCall, PythonRemoteCall


class _Global:
    """The profiles that are on, and the handlers that are theirs when none is."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.on: list[Any] = []
        self.handlers: dict[type[Any], Served] = {}


_global = _Global()


@contextlib.contextmanager
def _profiled() -> Iterator[None]:
    with _global.lock:
        on = list(_global.on)
    if not on or torch.autograd._profiler_enabled():  # type: ignore[attr-defined] # torch declares no type for it
        yield
        return
    torch.autograd._enable_profiler_legacy(on[0].config())  # type: ignore[attr-defined] # torch declares no type for it
    try:
        yield
    finally:
        events = parse_records(torch.autograd._disable_profiler_legacy())  # type: ignore[attr-defined] # torch declares no type for it
        for profile in on:
            profile.served.append(events)


class server_process_global_profile(profiler_legacy.profile):  # noqa: N801 - torch's name
    """`with server_process_global_profile() as p:` on a worker; then `p.process_global_function_events`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call] # torch's own, without types
        self.served: list[list[Any]] = []
        self.process_global_function_events: list[list[Any]] = []

    def __enter__(self) -> Any:
        if not self.enabled:
            return None
        if self.entered:
            raise RuntimeError("autograd profiler traces are not reentrant")
        self.entered = True
        served = require_agent().layers.served
        with _global.lock:
            if not _global.on:
                for kind in (PythonCall, PythonRemoteCall):
                    _global.handlers[kind] = usual = served[kind]
                    served[kind] = usual._replace(handler=_Handler(usual))
            _global.on.append(self)
        return self

    def __exit__(self, *_: object) -> Any:
        if not self.enabled:
            return None
        with _global.lock:
            _global.on.remove(self)
            if not _global.on:
                require_agent().layers.served.update(_global.handlers)
        events = [sorted(each, key=lambda e: (e.time_range.start, -e.time_range.end)) for each in self.served]
        self.process_global_function_events = events
        use_device = "cuda" if self.use_cuda else None
        all_events: Any = EventList
        self.function_events = all_events(
            itertools.chain.from_iterable(events), use_device=use_device, profile_memory=self.profile_memory
        )
        self.function_events._build_tree()
        return False


class _Handler:
    """The handler of calls while they are profiled."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def __call__(self, request: Request) -> None:
        self._served.handler(ScopedRequest(request, _profiled))
