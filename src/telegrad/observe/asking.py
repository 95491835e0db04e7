"""How a worker is asked about itself: one message with a question, one with the answer, nothing of it pickled.

Questions go to all workers at once, and a worker that does not answer in time is left out.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from telegrad.errors import TelegradError
from telegrad.rpc.agent import Agent
from telegrad.rpc.client.pending import Slot
from telegrad.rpc.workers import Member
from telegrad.wire.messages import Observe, Observed

ANSWER_SECONDS = 2.0

# What is asked, by name: takes the data of the question, gives that of the answer.
Answer = Callable[[Agent, bytes], bytes]


def ask_all(
    agent: Agent, members: Iterable[Member], what: str, data: bytes = b"", seconds: float = ANSWER_SECONDS
) -> dict[int, bytes | None]:
    """The answers of workers, by incarnation; None from one that did not answer."""
    asked: list[tuple[Member, Slot | None]] = []
    answers: dict[int, bytes | None] = {}
    for member in members:
        slot = None
        if member.incarnation != agent.member.incarnation and not agent.is_dead(member):
            with contextlib.suppress(TelegradError, OSError):
                slot = _send(agent, member, what, data, seconds)
        asked.append((member, slot))
    for member, slot in asked:
        answers[member.incarnation] = None
        if slot is not None:
            with contextlib.suppress(TelegradError):
                answers[member.incarnation] = _answer(agent, slot)
    return answers


def ask(agent: Agent, member: Member, what: str, data: bytes = b"", seconds: float = ANSWER_SECONDS) -> bytes:
    """The answer of one worker; raises if there is none."""
    return _answer(agent, _send(agent, member, what, data, seconds))


def _send(agent: Agent, member: Member, what: str, data: bytes, seconds: float) -> Slot:
    return agent.send(
        member,
        Observe(what, data),
        timeout=seconds,
        what=lambda: f"{what} of worker {member.name!r}",
        complete=_nothing,  # read when it comes: whoever asks may still be dialling another worker, one that is stopped
    )


def _answer(agent: Agent, slot: Slot) -> bytes:
    slot.wait()
    reply = agent.reply_frame(slot).message
    assert type(reply) is Observed
    return reply.data


def _nothing(_: Any) -> None:
    """Whoever asks comes for it."""
