"""Where a request is that took too long: its worker is asked when the caller's time is up, and says so in words.

    has not arrived         it waits here to be sent, or on the way
    has not begun           other requests of the same caller are before it
    runs                    since when, where in the user's code, and what that waits for in turn
    waits for a value       since when, and who may be making it
    has been answered       the reply is on its way

The question has a short deadline of its own. A worker that does not answer in it is stopped, cut off or out of threads.
"""

import contextlib
import time

import msgspec

from telegrad.errors import TelegradError
from telegrad.observe.asking import ask
from telegrad.observe.threads import Activity, Key, Report, activities
from telegrad.rpc.agent import Agent
from telegrad.rpc.server.session import Session
from telegrad.rpc.workers import Member
from telegrad.wire.messages import PythonRemoteCall, RRefFetch

_decode_key = msgspec.msgpack.Decoder(Key).decode
_encode = msgspec.msgpack.Encoder().encode


def ask_whereabouts(agent: Agent, member: Member, link: int, request_id: int, seconds: float) -> str:
    """What a worker says of a request, to go on after its name; empty if it says nothing."""
    key: Key = (int(agent.member.incarnation), link, request_id)
    with contextlib.suppress(TelegradError, OSError):
        return str(msgspec.msgpack.decode(ask(agent, member, "whereabouts", _encode(key), seconds)))
    return ""


def whereabouts(agent: Agent, data: bytes) -> str:
    """The answer of the worker that was asked."""
    key = _decode_key(data)
    for session in agent.peers.sessions():
        if (int(session.member.incarnation), session.number) == key[:2]:
            return _in_session(agent, session, key)
    return "has not got it: no connection of the caller has arrived there"


def _in_session(agent: Agent, session: Session, key: Key) -> str:
    request_id = key[2]
    if request_id in session.requests.replies:
        return "has run it, and the reply is on its way: it is large, or the network is slow"
    found = session.requests.running.get(request_id)
    if found is not None:
        kind, since = found
        seconds = _seconds(time.monotonic() - since)
        report = activities(agent)
        thread = next((thread for thread in report.threads if thread.serves == key), None)
        if thread is not None:
            return f"has been running it for {seconds}{_what_it_does(report, thread)}"
        if kind is RRefFetch:
            return f"has waited {seconds} for that value to be made{_who_makes_values(report)}"
        return f"has been running it for {seconds}, as a coroutine, or for a future or a value that is not done"
    before = [frame for frame in session.waiting_requests() if frame.request_id < request_id]
    if len(before) < len(session.waiting_requests()):
        running = len(session.requests.running)
        return f"has got it and not begun: {running} calls of the same worker run there, {len(before)} wait before it"
    return "has not got it yet: it is still on its way there, or waits to be sent"


def _what_it_does(report: Report, thread: Activity) -> str:
    where = f", now at {thread.where}" if thread.where else ""
    asked = next((asked for asked in report.asked if asked.key == thread.waits_for), None)
    return where if asked is None else f"{where}, where it has waited {_seconds(asked.seconds)} for {asked.what}"


def _who_makes_values(report: Report) -> str:
    """Whether calls of `remote` run, and where they are."""
    made = {served.key for served in report.served if served.message == PythonRemoteCall.__name__}
    places = [thread.where for thread in report.threads if thread.serves in made and thread.where]
    at = f", now at {', '.join(places)}" if places else ""
    calls = "a call of `remote` runs" if len(made) == 1 else f"{len(made)} calls of `remote` run"
    return f"; {calls} there{at}" if made else ""


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
