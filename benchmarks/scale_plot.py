"""Draws docs/assets/scale.svg from what `python -m benchmarks.scale --save FOLDER` counted.

    python -m benchmarks.scale_plot FOLDER

Lines and dots are of agents in one process, rings of real worker processes where those were counted as well.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

PICTURE = Path("docs/assets/scale.svg")
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 470, 20, 320
_MESSAGES, _BYTES, _REQUESTS, _OUT = range(4)
_PASS, _CALLS, _BARRIER = "a pass over all: forward, backward, end", "first call from one to all", "a barrier of all"
_SERIES = (
    ("a join, kB out of the store", "all join", _OUT, 1000, "#d62728"),
    ("a join, requests to the store", "all join", _REQUESTS, 1, "#9467bd"),
    ("a pass, messages", _PASS, _MESSAGES, 1, "#1f77b4"),
    ("a barrier, messages", _BARRIER, _MESSAGES, 1, "#2ca02c"),
    ("a pass, kB", _PASS, _BYTES, 1000, "#ff7f0e"),
)
_LEAST, _MOST = 1.0, 1e6

Counted = dict[str, dict[str, list[float]]]


def draw(agents: Counted, processes: Counted) -> str:
    """The picture, both axes logarithmic."""
    sizes = sorted(map(int, agents))
    first, last = math.log(sizes[0]), math.log(sizes[-1])

    def x(size: float) -> float:
        return _LEFT + (math.log(size) - first) / (last - first) * (_RIGHT - _LEFT)

    def y(number: float) -> float:
        part = math.log(max(number, _LEAST) / _LEAST) / math.log(_MOST / _LEAST)
        return _BOTTOM - part * (_BOTTOM - _TOP)

    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 366" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for power in range(7):
        at = y(10.0**power)
        lines.append(f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10**power:,}</text>')
    lines += [f'<text x="{x(size):.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{size:,}</text>' for size in sizes]
    lines.append(f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_BOTTOM + 40}" text-anchor="middle">workers</text>')
    for title, event, kind, unit, colour in _SERIES:
        points = [(x(size), y(agents[str(size)][event][kind] / unit)) for size in sizes]
        joined = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        lines.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points]
        lines.append(f'<text x="{_RIGHT + 10}" y="{points[-1][1] + 4:.1f}" fill="{colour}">{title}</text>')
        for size, row in processes.items():
            if not row[event][kind]:
                continue
            place = f'cx="{x(int(size)):.1f}" cy="{y(row[event][kind] / unit):.1f}"'
            lines.append(f'<circle {place} r="6" fill="none" stroke="{colour}"/>')
    lines.append("</svg>\n")
    return "\n".join(lines)


def main() -> None:
    folder = Path(sys.argv[1])
    agents: Counted = json.loads((folder / "scale-agents.json").read_text())
    real = folder / "scale-processes.json"
    PICTURE.write_text(draw(agents, json.loads(real.read_text()) if real.exists() else {}))
    print(f"saved {PICTURE}")


if __name__ == "__main__":
    main()
