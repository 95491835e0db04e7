"""An agent that only queues what the engine asks it to send: a test moves the messages on, in any order.

It has what the engine asks of an agent, under the same names and with the same parameters: `test_pass_orders.py` holds
`QueuedAgent` to that.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

from torch import Tensor

from telegrad.autograd.attach import AutogradLayer
from telegrad.engine import EngineLayer
from telegrad.errors import WorkerDied
from telegrad.ids import WorkerId, draw_incarnation
from telegrad.rpc.client.pending import FOREVER, Slot
from telegrad.rpc.layer import Layers
from telegrad.rpc.workers import Directory, Member
from telegrad.wire.codec import Packed
from telegrad.wire.messages import AnyMessage
from tests.rpc.quiet import QuietIoThreads

NOTHING = Packed(b"", [])


class Post(Protocol):
    """Takes what agents send, and lets whoever waits for a reply wait."""

    def put(self, kind: str, sender: "QueuedAgent", receiver: Member, content: tuple[Any, ...]) -> None: ...

    def until_done(self, slot: Slot) -> None: ...


@dataclass
class QueuedLink:
    """What a slot knows of the link that its reply comes on."""

    member: Member
    wait: Callable[[Slot], None]

    def expect(self) -> None: ...

    def poll(self, slot: Slot, seconds: float) -> bool:
        return False


@dataclass
class QueuedFrame:
    """What came with a reply."""

    message: AnyMessage
    tensors: list[Tensor]


@dataclass
class QueuedRequest:
    """A request at the worker that serves it. `slot`: who waits for the reply; None for a notice."""

    message: AnyMessage
    tensors: list[Tensor]
    slot: Slot | None
    caller: Member
    agent: "QueuedAgent"
    answered: bool = field(default=False)

    @property
    def session(self) -> Any:
        return SimpleNamespace(member=self.caller)

    def take_tensors(self) -> list[Tensor]:
        return list(self.tensors)

    def reply(self, message: AnyMessage, packed: Packed = NOTHING, *, lazy: bool = False) -> None:
        self.agent.answer(self, (message, packed.tensors, None))

    def fail(self, error: BaseException) -> None:
        self.agent.answer(self, (None, [], error))


class QueuedAgent:
    """One worker's agent, autograd and engine."""

    def __init__(self, post: Post, number: int) -> None:
        self.member = Member(f"w{number}", WorkerId(number), draw_incarnation(0), (), 0)
        self.info = self.member.info
        self.closing = False
        self.directory = Directory()  # the test enters all workers
        self.io_threads = QuietIoThreads()
        self.heard_dead: set[str] = set()
        self.asked: dict[str, list[Slot]] = {}  # without a reply yet, by worker
        self.layers = Layers()
        self.layer, self.find_layer = self.layers.layer, self.layers.find
        self._post = post
        self.layers.install(AutogradLayer(self))
        self.layers.install(EngineLayer(self))

    # --- what the engine asks of its agent ---

    def send(self, member: Member, message: AnyMessage, packed: Packed = NOTHING, **given: Any) -> Slot:
        if member.name in self.heard_dead:
            raise death_of(member)
        slot = Slot(given["what"], 0.0, FOREVER)
        slot.complete = given["complete"]
        slot.link = QueuedLink(member, self._post.until_done)
        self.asked.setdefault(member.name, []).append(slot)
        self._post.put("request", self, member, (message, packed.tensors, slot))
        return slot

    def link(self, member: Member) -> Any:
        return SimpleNamespace(send=partial(self.send, member), notify=partial(self.notify, member))

    def notify(self, member: Member, message: AnyMessage, lazy: bool = False) -> None:
        self._post.put("request", self, member, (message, [], None))

    def standing(self, worker: WorkerId) -> Any:
        return None

    def mention(self, worker: WorkerId, message: AnyMessage) -> None:
        member = self.directory.by_id(worker)
        if member is not None and not self.is_dead(member):
            self.notify(member, message)

    def answer(self, request: QueuedRequest, content: tuple[Any, ...]) -> None:
        if request.slot is not None:
            assert not request.answered, f"{request.message} was answered twice"
            request.answered = True
            self._post.put("reply", self, request.caller, (request.slot, *content))

    def reply_frame(self, slot: Slot) -> Any:
        if slot.error is not None:
            raise slot.error
        return slot.frame

    def reply_tensors(self, slot: Slot) -> list[Tensor]:
        return list(self.reply_frame(slot).tensors)

    def is_dead(self, member: Member) -> bool:
        return member.name in self.heard_dead

    # --- what happens to it ---

    def take_request(self, caller: Member, message: AnyMessage, tensors: list[Tensor], slot: Slot | None) -> None:
        """A request arrives, and is served."""
        request: Any = QueuedRequest(message, tensors, slot, caller, self)
        try:
            self.layers.served[type(message)].handler(request)
        except Exception as error:
            request.fail(error)

    def take_reply(self, callee: Member, slot: Slot, message: AnyMessage, tensors: Any, error: Any) -> None:
        """A reply arrives."""
        self.asked[callee.name].remove(slot)
        frame: Any = QueuedFrame(message, tensors)
        slot.frame, slot.error = frame, error
        _finish(slot)

    def hear_of_death(self, dead: Member) -> None:
        """What it asked the dead fails, and its layers are told."""
        self.heard_dead.add(dead.name)
        for slot in self.asked.pop(dead.name, []):
            slot.error = death_of(dead)
            _finish(slot)
        for layer in self.layers:
            layer.on_death(dead)


def _finish(slot: Slot) -> None:
    slot.done = True
    assert slot.complete is not None
    slot.complete(slot)


def death_of(member: Member) -> WorkerDied:
    """The error for what was asked of a dead worker."""
    return WorkerDied(f"worker {member.name!r} is gone.", worker=member.name, incarnation=member.incarnation)
