"""What the Trace Event Format asks of a file, as far as its viewers rely on it."""

import json
from collections import defaultdict
from typing import Any

_NEEDS = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "M": {"name", "pid", "tid", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
    "i": {"name", "cat", "pid", "tid", "ts", "s"},
}


def check(timeline: dict[str, Any]) -> None:
    """Fail unless the file is well-formed: fields, names of tracks, slices that nest, arrows with two ends."""
    named_processes, named_threads = set(), set()
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    arrows: dict[str, dict[str, float]] = defaultdict(dict)
    json.dumps(timeline, allow_nan=False)  # viewers read JSON, which has no NaN
    assert timeline["displayTimeUnit"] in ("ms", "ns")
    for event in timeline["traceEvents"]:
        assert _NEEDS[event["ph"]] <= event.keys(), event
        assert type(event["pid"]) is int and type(event["tid"]) is int and type(event["name"]) is str, event
        assert isinstance(event.get("args", {}), dict), event
        if event["ph"] == "M":
            if event["name"] == "process_name":
                named_processes.add(event["pid"])
            elif event["name"] == "thread_name":
                named_threads.add((event["pid"], event["tid"]))
            continue
        assert event["ts"] >= 0, event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            assert event["ph"] not in arrows[event["id"]], "an arrow begins and ends once"
            arrows[event["id"]][event["ph"]] = event["ts"]
    assert {pid for pid, _ in slices} <= named_processes
    assert set(slices) <= named_threads
    for track in slices.values():
        _check_nesting(track)
    assert all(ends.keys() == {"s", "f"} for ends in arrows.values())
    assert all(ends["s"] <= ends["f"] for ends in arrows.values()), "an arrow leads back in time"


def _check_nesting(track: list[tuple[float, float]]) -> None:
    open_until: list[float] = []
    for begin, end in sorted(track, key=lambda s: (s[0], -s[1])):
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 0.01, "slices on one track overlap without nesting"
        open_until.append(end)
