"""What each thread of this worker runs and waits for, read off the threads' own stacks: nothing is noted beforehand.

A thread that waits for a reply stands in `ReplyReader.wait`, which knows the request; one that serves stands in
`Session.serve`; one in a pass in `LocalPass._run` or `RootPass.wait`. The user's code is the innermost frame that is
neither Telegrad's nor torch's nor of the standard library.
"""

import os
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
import torch

from telegrad.engine.local.local_pass import LocalPass
from telegrad.engine.root_pass import RootPass
from telegrad.engine.service import PassService
from telegrad.rpc.agent import Agent
from telegrad.rpc.client.reply_reader import ReplyReader
from telegrad.rpc.server.session import Session
from telegrad.wire.messages import DebugWaits, Observe

Key = tuple[int, int, int]  # a request: incarnation of its caller, link, number

_LIBRARIES = (str(Path(__file__).parents[1]) + os.sep, str(Path(str(torch.__file__)).parent) + os.sep)
_STANDARD = (sysconfig.get_path("stdlib") + os.sep, str(Path(os.__file__).parent) + os.sep, "<frozen")
_WAIT = ReplyReader.wait.__code__
_SERVE = Session.serve.__code__
_RUN_PASS = LocalPass._run.__code__
_WAIT_PASS = RootPass.wait.__code__
_OWN = {Observe, DebugWaits}


class Activity(msgspec.Struct, array_like=True):
    """One thread."""

    name: str
    serves: Key | None = None
    waits_for: Key | None = None
    runs_pass: int = -1  # the context of a pass whose nodes it runs
    awaits_pass: int = -1  # the context of a pass it began, and whose end it waits for
    where: str = ""  # in the user's code
    sleeps: bool = False  # in the kernel: for a lock, a file, a while


class Asked(msgspec.Struct, array_like=True):
    """A request of this worker without a reply."""

    key: Key
    to: int
    what: str
    seconds: float


class InService(msgspec.Struct, array_like=True):
    """A request of another worker that is being served here."""

    key: Key
    caller: str
    message: str
    seconds: float


class PassState(msgspec.Struct, array_like=True):
    """A backward pass that has not ended here: who began it, and whose gradients it waits for."""

    context: int
    root: int
    waits_for: list[int]


class Report(msgspec.Struct, array_like=True):
    """All of it, of one worker."""

    name: str
    worker_id: int
    incarnation: int
    exhausted: bool  # no thread is left, nor may one be added
    threads: list[Activity]
    asked: list[Asked]
    served: list[InService]
    passes: list[PassState]
    others: list[tuple[str, int]]  # what layers wait for beside these


decode = msgspec.msgpack.Decoder(Report).decode


def activities(agent: Agent) -> Report:
    """What this worker does, right now."""
    now = time.monotonic()
    me = agent.member
    asked, served = [], []
    for link in agent.peers.links():
        for slot in link.pending.snapshot():
            if not slot.resend or type(slot.resend[0]) not in _OWN:
                key = (int(me.incarnation), link.number, slot.request_id)
                asked.append(Asked(key, int(link.member.worker_id), slot.what(), now - slot.since))
    for session in agent.peers.sessions():
        for request_id, (kind, since) in list(session.requests.running.items()):
            if kind not in _OWN:
                key = (int(session.member.incarnation), session.number, request_id)
                served.append(InService(key, session.member.name, kind.__name__, now - since))
    service = agent.find_layer(PassService)
    passes = [
        PassState(int(p.context.context_id), int(p.root), [int(peer) for _, peer in p.waits()])
        for p in (service.passes() if service is not None else [])
        if not p.finished
    ]
    others = [(text, int(worker)) for layer in agent.layers if layer is not service for text, worker in layer.waits()]
    full = agent.io_threads.exhausted and agent.io_threads.full > 0
    threads = [found for found in _threads(agent) if found.where or found.serves or found.waits_for]
    return Report(me.name, int(me.worker_id), int(me.incarnation), full, threads, asked, served, passes, others)


def _threads(agent: Agent) -> list[Activity]:
    names = {thread.ident: (thread.name, thread.native_id) for thread in threading.enumerate()}
    here = threading.get_ident()
    found = []
    for ident, frame in sys._current_frames().items():
        if ident != here and ident in names:
            name, native_id = names[ident]
            activity = _activity(agent, name, frame)
            activity.sleeps = _sleeps(native_id)
            found.append(activity)
    return found


def _sleeps(native_id: int | None) -> bool:
    try:
        with open(f"/proc/self/task/{native_id}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "S"
    except (OSError, IndexError):
        return False


def _activity(agent: Agent, name: str, innermost: FrameType) -> Activity:
    activity = Activity(name)
    frame: FrameType | None = innermost
    while frame is not None:
        code = frame.f_code
        if code is _WAIT and activity.waits_for is None:
            activity.waits_for = _of_slot(agent, frame.f_locals.get("slot"))
        elif code is _SERVE:
            activity.serves = _of_request(frame.f_locals.get("request"))
        elif code is _RUN_PASS and activity.runs_pass < 0:
            activity.runs_pass = _context_of(frame)
        elif code is _WAIT_PASS and activity.awaits_pass < 0:
            activity.awaits_pass = _context_of(frame)
        elif not activity.where and _is_the_users(code):
            activity.where = f"{_shortened(code.co_filename)}:{frame.f_lineno}, in {code.co_qualname}"
        frame = frame.f_back
    return activity


def _of_slot(agent: Agent, slot: Any) -> Key | None:
    if slot is None or slot.done:
        return None
    return (int(agent.member.incarnation), slot.link.number, slot.request_id)


def _of_request(request: Any) -> Key | None:
    if request is None or type(request.message) in _OWN:
        return None
    return (int(request.session.member.incarnation), request.session.number, request.frame.request_id)


def _context_of(frame: FrameType) -> int:
    pass_ = frame.f_locals.get("self")
    context = getattr(pass_, "context", None)
    return -1 if context is None else int(context.context_id)


def _is_the_users(code: CodeType) -> bool:
    path = code.co_filename
    return not path.startswith(_LIBRARIES) and ("site-packages" in path or not path.startswith(_STANDARD))


def _shortened(path: str) -> str:
    here = os.getcwd() + os.sep
    return path.removeprefix(here)
