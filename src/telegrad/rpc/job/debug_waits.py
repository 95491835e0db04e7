"""What a worker waits for, in words: the answer to "why does it hang?", here or along the chain across workers.

    w0 call 17 to w2: forward() on worker 'w2', for 12.1 s
      w2 backward of context 5, begun by w0, waits for w1 (message 3)
        w1 serves a PythonCall of w2, for 11.9 s

Each layer says what it waits for, and for whom; `chains` ties the answers of all workers together, and is pure.
"""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from telegrad.cuda import order
from telegrad.errors import TelegradError
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import current_agent, require_agent
from telegrad.rpc.layer import Layer, Served
from telegrad.rpc.request import Request
from telegrad.wire.messages import DebugWaits, WaitsReply

_ANSWER_SECONDS = 2.0
_NOBODY = -1
_DEEPEST = 16


class Wait(NamedTuple):
    """One thing that a worker waits for, and the id of the worker that can end it."""

    text: str
    worker_id: int = _NOBODY


def debug_waits(cluster: bool = False) -> str:
    """What this worker waits for, one line each; with `cluster` followed across workers to where it ends.

    It asks nothing of the code that hangs: a worker is described by its tables, and one that does not answer within two
    seconds is named as such. SIGUSR1 prints the same, unless the program has a use of its own for that signal.

    Examples:
        >>> text = rpc.debug_waits(cluster=True)  # one line for each wait, on all workers
    """
    agent = require_agent()
    if not cluster:
        lines = [wait.text for wait in waits_of(agent)]
        return "\n".join(lines) or f"worker {agent.info.name!r} waits for nothing"
    names = {int(member.worker_id): member.name for member in agent.peers.everyone()}
    answers: dict[int, Sequence[Wait] | None] = {**_ask_all(agent), int(agent.info.id): waits_of(agent)}
    lines = chains(names, answers, int(agent.info.id))
    others = [i for i in sorted(names) if i != agent.info.id and not any(names[i] in line for line in lines)]
    for worker_id in others:
        lines += chains(names, answers, worker_id)
    return "\n".join(lines) or "no worker waits for anything"


def waits_of(agent: Agent) -> list[Wait]:
    """What the worker of an agent waits for."""
    now = time.monotonic()
    waits = [
        Wait(
            f"call {slot.request_id} to {link.member.name}: {slot.what()}, for {now - slot.since:.1f} s",
            link.member.worker_id,
        )
        for link in agent.peers.links()
        for slot in link.pending.snapshot()
        if type(slot.resend[0]) is not DebugWaits
    ]
    for session in agent.peers.sessions():
        for kind, since in session.served():
            if kind is not DebugWaits:
                waits.append(Wait(f"serves a {kind.__name__} of {session.member.name}, for {now - since:.1f} s"))
    if order.active:
        waits += _lent_device_memory(agent)
    for layer in agent.layers:
        waits += [Wait(*wait) for wait in layer.waits()]
    return waits


def _lent_device_memory(agent: "Agent") -> list[Wait]:
    """Memory of GPUs that other workers may still read or write: blocks they have not copied out, for which this worker
    may come to wait, and memory granted to them for tensors that have yet to come, which nobody waits for."""
    ends = [(link.member, link.current) for link in agent.peers.links()]
    ends += [(session.member, session.connection) for session in agent.peers.sessions()]
    found = []
    for member, connection in ends:
        channel = None if connection is None else connection.devices
        if channel is None:
            continue
        count, nbytes = channel.lender.lent()
        if count:
            text = f"has lent {count} blocks of device memory, {nbytes / 2**20:.1f} MB, to {member.name}"
            found.append(Wait(text, member.worker_id))
        count, nbytes = channel.landing.granted
        if count:
            text = f"has granted {member.name} device memory for {count} tensors to come, {nbytes / 2**20:.1f} MB"
            found.append(Wait(text))
    return found


def chains(names: Mapping[int, str], answers: Mapping[int, Sequence[Wait] | None], start: int) -> list[str]:
    """The waits of worker `start`, each followed to the worker it waits for, and on. Pure."""
    lines: list[str] = []

    def follow(worker_id: int, path: tuple[int, ...]) -> None:
        indent = "  " * len(path)
        name = names.get(worker_id, str(worker_id))
        waits = answers.get(worker_id)
        if worker_id in path:
            lines.append(f"{indent}{name} again: they wait for each other")
        elif waits is None:
            lines.append(f"{indent}{name} does not answer")
        elif not waits and path:
            lines.append(f"{indent}{name} waits for nothing: its answer is on the way, or was never asked for")
        elif len(path) < _DEEPEST:
            followed: set[int] = set()
            for wait in waits:
                lines.append(f"{indent}{name} {wait.text}")
                if wait.worker_id not in (_NOBODY, worker_id) and wait.worker_id not in followed:
                    followed.add(wait.worker_id)  # once: what a worker waits for is the same whoever waits for it
                    follow(wait.worker_id, (*path, worker_id))

    follow(start, ())
    return lines


def _ask_all(agent: Agent) -> dict[int, list[Wait] | None]:
    """The answers of all other living workers; None for one that does not answer."""
    asked = []
    for member in agent.directory.members():
        if member.worker_id != agent.member.worker_id and not agent.is_dead(member):
            try:
                slot = agent.send(
                    member, DebugWaits(), timeout=_ANSWER_SECONDS, what=lambda: "what it waits for", complete=_nothing
                )
            except (TelegradError, OSError):
                slot = None
            asked.append((member, slot))
    answers: dict[int, list[Wait] | None] = {}
    for member, slot in asked:
        answers[int(member.worker_id)] = None
        if slot is not None:
            with contextlib.suppress(TelegradError):
                slot.wait()
                reply = agent.reply_frame(slot).message
                if type(reply) is WaitsReply:
                    answers[int(member.worker_id)] = [Wait(*wait) for wait in reply.waits]
    return answers


def _nothing(_: Any) -> None:
    """Whoever asks waits itself."""


class Waits(Layer):
    """Answers others who ask what this worker waits for, and SIGUSR1."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        # What is printed on SIGUSR1; a layer above may know more.
        self.describe: Callable[[], str] = lambda: debug_waits(cluster=True)
        self._restore_signal = _install_signal(agent)

    def messages(self) -> Mapping[type[Any], Served]:
        """The question of `debug_waits(cluster=True)`."""
        return {DebugWaits: Served(self._serve, counts_as_work=False)}

    def _serve(self, request: Request) -> None:
        waits = tuple([(wait.text, wait.worker_id) for wait in waits_of(self._agent)])
        self._agent.reply(request, WaitsReply(waits))

    def on_close(self) -> None:
        """Give the signal back."""
        self._restore_signal()


def _install_signal(agent: Agent) -> Callable[[], None]:
    """Print on SIGUSR1, if nobody else has a use for it; what undoes that."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGUSR1"):
        return lambda: None
    if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return lambda: None

    def on_signal(_: int, __: FrameType | None) -> None:
        # By another thread: the interrupted one may hold any lock.
        agent.io_threads.submit(_print)

    def restore() -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGUSR1) is on_signal:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    signal.signal(signal.SIGUSR1, on_signal)
    return restore


def _print() -> None:
    agent = current_agent()
    if agent is not None:
        sys.stderr.write(f"--- {agent.info.name} ---\n{agent.layer(Waits).describe()}\n")
        sys.stderr.flush()
