"""`telegrad status`: the workers of a job that runs, once, as a table or as JSON; what is stuck is said below it."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from telegrad.observe.asking import ask_all
from telegrad.observe.attach import attached, only_errors_logged
from telegrad.observe.explanation import look
from telegrad.observe.snapshot import Snapshot, decode
from telegrad.rpc.agent import Agent
from telegrad.rpc.workers import Member
from telegrad.transport.addresses import TCP, host_identity

COLUMNS = ("worker", "rank", "state", "pid", "host", "address", "uptime", "made", "served", "running", "memory")
_RIGHT = {"rank", "pid", "uptime", "made", "served", "running", "memory"}


def show(options: argparse.Namespace) -> int:
    """Print it; 0 if each worker answered."""
    with only_errors_logged(), attached(options.connect) as agent:
        state = describe(agent)
    if options.json:
        sys.stdout.write(json.dumps(state, indent=2) + "\n")
    else:
        sys.stdout.write(in_words(state))
    return 0 if all(row["state"] == "up" for row in state["workers"]) and not state["deadlocks"] else 1


def describe(agent: Agent) -> dict[str, Any]:
    """What all workers say of themselves."""
    me = agent.member.incarnation
    members = sorted((m for m in agent.directory.members() if m.incarnation != me), key=lambda m: m.worker_id)
    answers = ask_all(agent, members, "snapshot")
    rows = [_row(agent, member, answers.get(member.incarnation)) for member in members]
    return {"workers": rows, "deadlocks": look(agent).deadlocks}


def _row(agent: Agent, member: Member, answer: bytes | None) -> dict[str, Any]:
    state = "up" if answer is not None else "dead" if agent.is_dead(member) and not _runs_here(member) else "silent"
    row: dict[str, Any] = {"worker": member.name, "rank": int(member.worker_id), "state": state, "pid": member.pid}
    row["address"] = next((f"{a.host}:{a.where}" for a in member.addresses if a.kind == TCP), "this host only")
    if answer is not None:
        row |= _numbers(decode(answer))
    return row


def _runs_here(member: Member) -> bool:
    """Whether its process is on this host and exists: an observer that gets no answer takes it for dead too early."""
    return member.host == host_identity() and Path(f"/proc/{member.pid}").exists()


def _numbers(known: Snapshot) -> dict[str, Any]:
    return {
        "host": known.host,
        "uptime": round(known.up_seconds, 1),
        "made": known.calls_made,
        "served": known.calls_served,
        "running": known.serving,
        "memory": known.memory,
    }


def in_words(state: dict[str, Any]) -> str:
    """The state as a table."""
    rows = state["workers"]
    up = sum(row["state"] == "up" for row in rows)
    lines = [f"{up} of {len(rows)} workers answer", ""]
    lines += _table([COLUMNS, *([_cell(column, row.get(column)) for column in COLUMNS] for row in rows)])
    if any(row["state"] == "silent" for row in rows):
        lines += ["", "A silent worker is stopped, cut off or too busy to answer within two seconds."]
    lines += [f"\nDEADLOCK: {text}" for text in state["deadlocks"]]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return [
        "  ".join(
            cell.rjust(width) if column in _RIGHT else cell.ljust(width)
            for column, cell, width in zip(COLUMNS, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column == "uptime":
        minutes, seconds = divmod(int(value), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02} m" if hours else f"{minutes} m {seconds:02} s" if minutes else f"{seconds} s"
    if column == "memory":
        return f"{value / 2**20:,.0f} MiB"
    return f"{value:,}" if column in ("made", "served", "running") else str(value)
