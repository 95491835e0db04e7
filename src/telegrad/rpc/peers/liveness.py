"""Who lives: decides when another worker is dead. Pure: it is told what happened, and says what to do about it.

A worker is only missed while something is expected of it. One that is silent then is pinged, and given up when it stays
silent for too long, unless it is known to be busy. One whose connection ends is dialled again at once: a living worker
answers, a dead one's address refuses. Each incarnation of a worker goes through these states:

    state      event                       if                                   next       action
    ---------------------------------------------------------------------------------------------------
    QUIET      beat                        something is expected                EXPECTED
    EXPECTED   beat                        nothing is expected any more         QUIET
    EXPECTED   beat                        silent for a heartbeat               ASKED      PING
    ASKED      beat                        it was heard meanwhile               EXPECTED
    ASKED      beat                        silent, but not for too long         ASKED      PING
    ASKED      beat                        silent for too long, known busy      ASKED      PING
    ASKED      beat                        silent for too long                  GONE       GIVE_UP
    any        connection_lost                                                  CUT        REDIAL
    CUT        beat                                                             CUT
    CUT        connected                                                        QUIET
    CUT        unanswered                  nobody listens there any more        GONE       GIVE_UP
    CUT        unanswered                  another incarnation answers          GONE       GIVE_UP
    CUT        unanswered                  stopped, on this host                GONE       GIVE_UP
    CUT        unanswered                  there is time, or it is busy         CUT        REDIAL
    CUT        unanswered                  for too long                         GONE       GIVE_UP
    any        replaced                                                         GONE       GIVE_UP
    any        said_goodbye                                                     GONE       LET_GO
    GONE       anything                                                         GONE

"For too long" is the patience of the options: three heartbeats. The threads that perform this are in `heartbeat.py`.
"""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

BUSY_FACTOR = 10  # how much longer a worker is waited for whose host answers though it does not itself


class State(Enum):
    """What is known of another worker."""

    QUIET = "nothing is expected of it"
    EXPECTED = "it owes an answer"
    ASKED = "it owes an answer, and was asked whether it lives"
    CUT = "its connection ended"
    GONE = "it is dead, or has left"


class Action(Enum):
    """What to do."""

    NOTHING = "nothing"
    PING = "ask whether it lives"
    REDIAL = "dial again, in a moment if it was dialled just now"
    GIVE_UP = "it is dead: end all that waits for it"
    LET_GO = "it left on purpose: the same, without a warning"


class Failure(Enum):
    """Why a worker did not answer when it was dialled."""

    NOBODY_LISTENS = "nobody listens at its address"
    REPLACED = "another incarnation answers, or it refuses this worker"
    TIMED_OUT = "its host, or its process, did not answer in time"
    BROKEN = "the connection broke"


class Evidence(NamedTuple):
    """What can be known of a worker that says nothing itself."""

    here: bool  # it is on this host, whose process table tells
    running: bool  # its process is there and is not stopped; never known of one that is elsewhere
    host_answers: bool = False  # the kernel of its host has confirmed what was sent to it lately


def is_final(failure: Failure, evidence: Evidence) -> bool:
    """Whether dialling again cannot help: nobody listens any more, or the process is known to be stopped."""
    if failure is Failure.TIMED_OUT:
        return evidence.here and not evidence.running
    return failure in (Failure.NOBODY_LISTENS, Failure.REPLACED)


class Liveness:
    """One incarnation of another worker. Not for several threads at once: its owner holds a lock."""

    def __init__(self, heartbeat: float, patience: float) -> None:
        self.state = State.QUIET
        self._heartbeat = heartbeat
        self._patience = patience
        self._since = 0.0  # when it entered its state
        self.silent = 0.0  # seconds, at the last look
        self._quiet_at = 0.0  # when nothing was expected of it, at the last look: its silence counts from then

    def __repr__(self) -> str:
        return f"<Liveness: {self.state.value}>"

    def _enter(self, state: State, now: float, action: Action = Action.NOTHING) -> Action:
        if self.state is not state:
            self.state, self._since = state, now
        return action

    def beat(self, now: float, expected: bool, heard: float, evidence: Callable[[], Evidence]) -> Action:
        """The heartbeat looks: whether something is expected of it, and when it was last heard.

        `evidence` is asked for only if that decides; to look may cost a system call."""
        if self.state in (State.CUT, State.GONE):
            return Action.NOTHING
        if not expected:
            self._quiet_at = now
            return self._enter(State.QUIET, now)
        silent = self.silent = now - max(heard, self._quiet_at)
        if silent <= self._heartbeat:
            return self._enter(State.EXPECTED, now)
        if silent > self._patience and not self._is_excused(silent, evidence()):
            return self._enter(State.GONE, now, Action.GIVE_UP)
        return self._enter(State.ASKED, now, Action.PING)

    def _is_excused(self, silent: float, evidence: Evidence) -> bool:
        """Whether a silent worker is only busy, say in a long call into C that keeps Python's lock.

        On this host the process table tells. Of another host only its kernel can be heard: while that answers, the
        network and the host are well, and the worker gets ten times as long."""
        if evidence.here:
            return evidence.running
        return evidence.host_answers and silent < BUSY_FACTOR * self._patience

    def connection_lost(self, now: float) -> Action:
        """Its connection ended."""
        if self.state is State.GONE:
            return Action.NOTHING
        return self._enter(State.CUT, now, Action.REDIAL)

    def connected(self, now: float) -> Action:
        """It answered when it was dialled."""
        if self.state is State.CUT:
            self._enter(State.QUIET, now)
        return Action.NOTHING

    def unanswered(self, now: float, failure: Failure, evidence: Evidence) -> Action:
        """It was dialled after its connection had ended, and did not answer."""
        if self.state is State.GONE:
            return Action.NOTHING
        self._enter(State.CUT, now)
        if is_final(failure, evidence):
            return self._enter(State.GONE, now, Action.GIVE_UP)
        if now - self._since < self._patience or (evidence.here and evidence.running):
            return Action.REDIAL
        return self._enter(State.GONE, now, Action.GIVE_UP)

    def replaced(self, now: float) -> Action:
        """A later incarnation of it was started."""
        if self.state is State.GONE:
            return Action.NOTHING
        return self._enter(State.GONE, now, Action.GIVE_UP)

    def said_goodbye(self, now: float) -> Action:
        """It left on purpose."""
        if self.state is State.GONE:
            return Action.NOTHING
        return self._enter(State.GONE, now, Action.LET_GO)
