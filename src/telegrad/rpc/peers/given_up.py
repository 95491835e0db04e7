"""Asks callers whom this worker reads no more which of their calls they have given up.

A session reads no more while too many requests of its caller run (`MOST_RUNNING`). Word that the caller has cancelled
some of them then waits behind requests that nobody reads, and all might wait for what never ends. So the worker asks,
over its own link to the caller, until the session reads on.
"""

import functools
import logging
import time
from collections.abc import Mapping
from typing import Any

from telegrad.errors import TelegradError
from telegrad.rpc.client.pending import Slot
from telegrad.rpc.client.replies import reply_frame
from telegrad.rpc.layer import Layer, Served
from telegrad.rpc.peers.peers import Peers
from telegrad.rpc.request import Request
from telegrad.rpc.runtime import Runtime
from telegrad.rpc.server.session import Session
from telegrad.rpc.torch_modes import stand_in
from telegrad.wire.messages import GivenUp

log = logging.getLogger("telegrad.rpc")

_LOOK_SECONDS = 0.2
_MOST_NAMED = 16384  # requests in one answer; whoever still waits asks again


class GivenUpCalls(Layer):
    """One agent's questions to callers that it does not read, and its answers to such questions."""

    def __init__(self, runtime: Runtime, peers: Peers) -> None:
        self._runtime = runtime
        self._peers = peers
        self._looked_at: set[Session] = set()  # one operation at a time: a race costs one more question

    def messages(self) -> Mapping[type[Any], Served]:
        """The question, which is also the answer."""
        return {GivenUp: Served(self._serve, counts_as_work=False)}

    def session_paused(self, session: Session) -> None:
        """A session reads no more: in a moment, if it still does not, its caller is asked. One that is busy with short
        calls comes here often."""
        if session not in self._looked_at:
            self._looked_at.add(session)
            self._ask_later(session)

    def _ask_later(self, session: Session) -> None:
        ask = functools.partial(self._runtime.io_threads.attend, functools.partial(self._ask, session))
        self._runtime.timer.at(time.monotonic() + _LOOK_SECONDS, ask)

    def _ask(self, session: Session) -> None:
        self._looked_at.discard(session)
        if not session.paused or session.closed or self._runtime.closing:
            return
        self._looked_at.add(session)
        try:
            self._peers.link(session.member).send(
                GivenUp(session.number, ()),
                timeout=self._runtime.patience,
                what="which calls it has given up",
                complete=functools.partial(self._heard, session),
            )
        except (TelegradError, OSError) as error:
            log.debug("%s could not be asked what it has given up: %s", session.member.name, error)
            self._ask_later(session)

    def _heard(self, session: Session, slot: Slot) -> None:
        try:
            answer = reply_frame(slot).message
            if type(answer) is GivenUp:
                session.cancel(answer.request_ids[:_MOST_NAMED])
        except TelegradError as error:
            log.debug("%s did not say what it has given up: %s", session.member.name, error)
        self._ask_later(session)  # if it still reads no more

    def _serve(self, request: Request) -> None:
        message = request.message
        assert type(message) is GivenUp
        given_up: list[int] = []
        if stand_in.in_force.cancels_at_timeout:  # in torch, what is past its timeout still runs
            for link in self._peers.links():
                if link.number == message.link and link.member.incarnation == request.caller.incarnation:
                    given_up = link.pending.overdue()
        request.reply(GivenUp(message.link, tuple(given_up[:_MOST_NAMED])))
