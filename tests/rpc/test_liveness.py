"""Who lives, as a table: each state, each event, what becomes of it; the docstring of the module has the same rows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from telegrad.rpc.peers import liveness as module
from telegrad.rpc.peers.liveness import BUSY_FACTOR, Action, Evidence, Failure, Liveness, State, is_final

HEARTBEAT, PATIENCE = 1.0, 3.0
HERE_RUNNING = Evidence(here=True, running=True)
HERE_STOPPED = Evidence(here=True, running=False)
ELSEWHERE = Evidence(here=False, running=False)
HOST_ANSWERS = Evidence(here=False, running=False, host_answers=True)

Event = Callable[[Liveness], Action]


def beat(expected: bool = True, silent: float = 0.0, evidence: Evidence = ELSEWHERE, now: float = 100.0) -> Event:
    return lambda worker: worker.beat(now, expected, now - silent, lambda: evidence)


def cut(now: float = 100.0) -> Event:
    return lambda worker: worker.connection_lost(now)


def connected() -> Event:
    return lambda worker: worker.connected(100.0)


def unanswered(failure: Failure = Failure.BROKEN, evidence: Evidence = ELSEWHERE, after: float = 0.0) -> Event:
    return lambda worker: worker.unanswered(100.0 + after, failure, evidence)


def replaced() -> Event:
    return lambda worker: worker.replaced(100.0)


def goodbye() -> Event:
    return lambda worker: worker.said_goodbye(100.0)


LEADS_TO: dict[State, list[Event]] = {
    State.QUIET: [beat(expected=False, now=10.0)],
    State.EXPECTED: [beat(now=10.0)],
    State.ASKED: [beat(silent=1.5, now=10.0)],
    State.CUT: [cut()],
    State.GONE: [goodbye()],
}
ANY = tuple(state for state in State if state is not State.GONE)

# As in the docstring of the module, row by row.
TABLE: list[tuple[State | tuple[State, ...], str, Event, State, Action]] = [
    (State.QUIET, "something is expected", beat(), State.EXPECTED, Action.NOTHING),
    (State.EXPECTED, "nothing is expected any more", beat(expected=False), State.QUIET, Action.NOTHING),
    (State.EXPECTED, "silent for a heartbeat", beat(silent=1.5), State.ASKED, Action.PING),
    (State.ASKED, "it was heard meanwhile", beat(silent=0.5), State.EXPECTED, Action.NOTHING),
    (State.ASKED, "silent, but not for too long", beat(silent=2.9), State.ASKED, Action.PING),
    (State.ASKED, "busy here", beat(silent=500.0, evidence=HERE_RUNNING, now=900.0), State.ASKED, Action.PING),
    (State.ASKED, "its host answers", beat(silent=9.0, evidence=HOST_ANSWERS), State.ASKED, Action.PING),
    (State.ASKED, "silent for too long", beat(silent=3.1), State.GONE, Action.GIVE_UP),
    (State.ASKED, "stopped here", beat(silent=3.1, evidence=HERE_STOPPED), State.GONE, Action.GIVE_UP),
    (
        State.ASKED,
        "its host answers, but for too long",
        beat(silent=BUSY_FACTOR * PATIENCE + 1, evidence=HOST_ANSWERS),
        State.GONE,
        Action.GIVE_UP,
    ),
    (ANY, "connection lost", cut(), State.CUT, Action.REDIAL),
    (State.CUT, "beat", beat(silent=50.0), State.CUT, Action.NOTHING),
    (State.CUT, "connected", connected(), State.QUIET, Action.NOTHING),
    (State.CUT, "nobody listens", unanswered(Failure.NOBODY_LISTENS), State.GONE, Action.GIVE_UP),
    (State.CUT, "another incarnation", unanswered(Failure.REPLACED), State.GONE, Action.GIVE_UP),
    (State.CUT, "stopped here", unanswered(Failure.TIMED_OUT, HERE_STOPPED), State.GONE, Action.GIVE_UP),
    (State.CUT, "there is time", unanswered(after=2.9), State.CUT, Action.REDIAL),
    (State.CUT, "busy here", unanswered(evidence=HERE_RUNNING, after=900.0), State.CUT, Action.REDIAL),
    (State.CUT, "for too long", unanswered(after=3.1), State.GONE, Action.GIVE_UP),
    (ANY, "replaced", replaced(), State.GONE, Action.GIVE_UP),
    (ANY, "goodbye", goodbye(), State.GONE, Action.LET_GO),
    *[
        (State.GONE, name, event, State.GONE, Action.NOTHING)
        for name, event in {
            "beat": beat(silent=50.0),
            "connection lost": cut(),
            "connected": connected(),
            "unanswered": unanswered(Failure.NOBODY_LISTENS),
            "replaced": replaced(),
            "goodbye": goodbye(),
        }.items()
    ],
]
ROWS = [
    (state, event, next_, action)
    for states, _, event, next_, action in TABLE
    for state in (states if isinstance(states, tuple) else (states,))
]
NAMES = [
    f"{state.name}-{name}"
    for states, name, *_ in TABLE
    for state in (states if isinstance(states, tuple) else (states,))
]


def in_state(state: State) -> Liveness:
    worker = Liveness(HEARTBEAT, PATIENCE)
    for event in LEADS_TO[state]:
        event(worker)
    assert worker.state is state
    return worker


@pytest.mark.parametrize(("state", "event", "next_", "action"), ROWS, ids=NAMES)
def test_the_table(state: State, event: Event, next_: State, action: Action) -> None:
    worker = in_state(state)
    assert event(worker) is action
    assert worker.state is next_


def test_the_docstring_has_the_same_transitions() -> None:
    """Each line of the table in the module, by state, next state and action, is a row here, and the other way round."""
    doc = (module.__doc__ or "").split("-----\n")[1].split("\n\n")[0]
    written = set()
    for line in doc.splitlines():
        words = line.split()
        names = [word for word in words if word in State.__members__]
        action = words[-1] if words[-1] in Action.__members__ else "NOTHING"
        written.add((words[0], names[-1], action))
    known = set()
    for states, _, _, next_, action in TABLE:
        known.add(("any" if isinstance(states, tuple) else states.name, next_.name, action.name))
    assert written == known


def test_silence_counts_from_when_something_was_expected() -> None:
    worker = Liveness(HEARTBEAT, PATIENCE)
    worker.beat(1000.0, False, 1.0, lambda: ELSEWHERE)  # last heard long ago, which nobody minded
    assert worker.beat(1000.5, True, 1.0, lambda: ELSEWHERE) is Action.NOTHING
    assert worker.silent == 0.5
    assert worker.beat(1003.5, True, 1.0, lambda: ELSEWHERE) is Action.GIVE_UP


def test_evidence_is_looked_for_only_where_it_decides() -> None:
    worker = Liveness(HEARTBEAT, PATIENCE)

    def costly() -> Evidence:
        raise AssertionError("nobody needs to know")

    assert worker.beat(10.0, True, 7.5, costly) is Action.PING
    assert worker.beat(10.0, True, 9.5, costly) is Action.NOTHING


def test_the_time_to_dial_again_begins_with_the_loss() -> None:
    worker = in_state(State.CUT)
    assert worker.connection_lost(102.0) is Action.REDIAL  # heard of twice
    assert worker.unanswered(103.5, Failure.BROKEN, ELSEWHERE) is Action.GIVE_UP


@pytest.mark.parametrize(
    ("failure", "evidence", "final"),
    [
        (Failure.NOBODY_LISTENS, HERE_RUNNING, True),
        (Failure.REPLACED, ELSEWHERE, True),
        (Failure.TIMED_OUT, HERE_STOPPED, True),
        (Failure.TIMED_OUT, HERE_RUNNING, False),
        (Failure.TIMED_OUT, ELSEWHERE, False),
        (Failure.BROKEN, HERE_STOPPED, False),
    ],
)
def test_what_is_final(failure: Failure, evidence: Evidence, final: bool) -> None:
    assert is_final(failure, evidence) is final


def test_the_core_does_nothing_itself() -> None:
    source = Path(module.__file__).read_text()
    assert not any(f"import {name}" in source for name in ("time", "threading", "socket", "logging", "os"))
