"""The state of a job in a terminal: what the page shows, from a board of its own or from a page's server."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from telegrad.errors import TelegradError

try:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise TelegradError(f"`telegrad top` needs rich ({error}): pip install 'telegrad[observe]'") from error

_STYLES = {"up": "green", "dead": "bold red", "silent": "yellow"}


def fetch(url: str) -> dict[str, Any]:
    """The latest state from a page's address."""
    with urllib.request.urlopen(url.replace("/?", "/state?", 1), timeout=5) as answer:
        state: dict[str, Any] = json.load(answer)
        return state


def show(look: Callable[[], dict[str, Any] | None], seconds: float = 1.0, once: bool = False) -> int:
    """Show what `look` finds until that is None or Ctrl-C; the exit status."""
    console = Console()
    try:
        state = look()
        if once and state is not None:
            console.print(render(state, console.height))
            return 0
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while state is not None:
                live.update(render(state, console.height), refresh=True)
                time.sleep(seconds)
                state = look()
        console.print("The job has ended.")
        return 0
    except KeyboardInterrupt:
        return 0
    except (urllib.error.URLError, OSError) as error:
        console.print(f"The job has ended, or its page cannot be reached ({error}).")
        return 1


def render(state: dict[str, Any], height: int) -> Group:
    """A state as what a terminal of that height can show."""
    totals = state["totals"]
    head = Text.assemble(
        ("Telegrad  ", "bold"),
        f"{totals['up']} of {totals['workers']} up, {totals['calls']:,.0f} calls/s, {_time(totals['p50'])} median, "
        f"{_time(totals['p99'])} at p99, {_bytes(totals['bytes'])}/s",
    )
    parts: list[Any] = [head]
    for text in state["deadlocks"]:
        parts.append(Panel(text, title="deadlock", style="red"))
    room = max(4, height - 14)
    workers = sorted(state["workers"], key=lambda w: (w["state"] == "up", -w.get("calls", 0) - w.get("served", 0)))
    parts.append(_workers(workers[:room], len(workers) - room))
    busy = [link for link in state["links"] if link["calls"] or link["in_flight"]]
    if busy:
        parts.append(_links(busy[:5]))
    for line in state["explanation"][:4]:
        parts.append(Text(line, style="yellow"))
    for event in state["recent"][:3]:
        parts.append(Text(f"{time.strftime('%H:%M:%S', time.localtime(event['time']))} {event['text']}", style="red"))
    return Group(*parts)


def _workers(rows: list[dict[str, Any]], more: int) -> Table:
    table = Table(box=None, header_style="dim", caption=f"and {more} more" if more > 0 else None)
    for title in ("worker", "", "calls/s", "serves/s", "in flight", "served now", "memory", "owned", "contexts"):
        table.add_column(title, justify="left" if title in ("worker", "") else "right")
    for row in rows:
        numbers = [
            f"{row['calls']:,.0f}",
            f"{row['served']:,.0f}",
            str(row["in_flight"]),
            str(row["serving"]),
            _bytes(row["memory"]),
            f"{row['owned']} ({_bytes(row['owned_bytes'])})",
            str(row["contexts"]),
        ]
        table.add_row(row["name"], Text(row["state"], _STYLES[row["state"]]), *numbers) if "calls" in row else (
            table.add_row(row["name"], Text(row["state"], _STYLES[row["state"]]))
        )
    return table


def _links(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="dim")
    for title in ("link", "calls/s", "p50", "p99", "sent/s", "in flight"):
        table.add_column(title, justify="left" if title == "link" else "right")
    for row in rows:
        table.add_row(
            f"{row['from']} to {row['to']}",
            f"{row['calls']:,.0f}",
            _time(row["p50"]),
            _time(row["p99"]),
            _bytes(row["bytes"]),
            str(row["in_flight"]),
        )
    return table


def _time(seconds: float | None) -> str:
    if not seconds:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
