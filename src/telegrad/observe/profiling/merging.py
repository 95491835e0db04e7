"""How events of other workers get into torch's profiles.

torch gives no way to add events to a profile, so the functions by which its profilers read what they recorded are
replaced, once, by ones that add the events of calls made meanwhile. Without such calls they do what they did.
"""

import json
from functools import wraps
from pathlib import Path
from typing import Any

from torch.autograd import profiler, profiler_legacy

from telegrad.observe.profiling.events import ProfiledCall, local, merge, take_calls

# torch's own, for a profile that is not merged into but sent.
parse_records: Any = profiler_legacy._parse_legacy_records

_OPTIONS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


class _State:
    installed = False


def install() -> None:
    """Let torch's profiles hold the events of other workers."""
    if _State.installed:
        return
    _State.installed = True
    profiler_legacy._parse_legacy_records = _parse_legacy_records
    legacy: Any = profiler_legacy.profile
    modern: Any = profiler.profile
    for kind in (legacy, modern):
        kind._start_trace = _noting_options(kind._start_trace)
    modern.__exit__ = _keeping_calls(modern.__exit__)
    modern._parse_kineto_results = _adding_events(modern._parse_kineto_results)
    modern.export_chrome_trace = _exporting_all(modern.export_chrome_trace)


def _parse_legacy_records(thread_records: Any) -> Any:
    return merge(parse_records(thread_records), take_calls(), legacy=True)


def _noting_options(start: Any) -> Any:
    @wraps(start)
    def start_trace(self: Any) -> None:
        local.calls = None
        local.options = sum(1 << bit for bit, name in enumerate(_OPTIONS) if getattr(self, name, False))
        if getattr(self, "use_cuda", False) or getattr(self, "use_device", None) == "cuda":
            local.options |= 1 << len(_OPTIONS)
        start(self)

    return start_trace


def _keeping_calls(leave: Any) -> Any:
    @wraps(leave)
    def exit_(self: Any, *error: Any) -> Any:
        if self.enabled:
            self._telegrad_calls = take_calls()  # before the events are read, which may be much later and elsewhere
        return leave(self, *error)

    return exit_


def _adding_events(parse: Any) -> Any:
    @wraps(parse)
    def parse_kineto_results(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls = getattr(self, "_telegrad_calls", [])
        events = parse(self, *args, **kwargs)
        return merge(events, calls, legacy=False) if calls else events

    return parse_kineto_results


def _exporting_all(export: Any) -> Any:
    @wraps(export)
    def export_chrome_trace(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        result = export(self, path, *args, **kwargs)
        calls = getattr(self, "_telegrad_calls", [])
        if calls:
            _add_to_file(Path(path), calls)
        return result

    return export_chrome_trace


def _add_to_file(path: Path, calls: list[ProfiledCall]) -> None:
    """Put the events of other workers into an exported trace: a process for each worker."""
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    begins: dict[str, list[dict[str, Any]]] = {}
    for event in sorted((e for e in events if e.get("ph") == "X"), key=lambda e: float(e["ts"])):
        begins.setdefault(event["name"], []).append(event)
    named = set()
    for call in calls:
        found = begins.get(call.key)
        if not found or call.profile is None:
            continue
        moment = found.pop(0)
        moment["dur"] = max(float(moment["dur"]), call.seconds * 1e6)
        begin = float(moment["ts"]) + max(0.0, call.seconds - call.profile.seconds) / 2 * 1e6
        for event in call.profile.events:
            pid = f"worker {event.node}"
            if pid not in named:
                named.add(pid)
                events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": pid}})
            events.append(
                {"ph": "X", "cat": "remote_op", "name": f"{call.key}#remote_op: {event.name}", "pid": pid}
                | {"tid": event.thread, "ts": begin + event.start, "dur": event.end - event.start}
                | {"args": {"worker": event.node}}
            )
    path.write_text(json.dumps(trace))
