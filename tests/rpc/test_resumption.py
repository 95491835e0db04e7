"""A link and its session through every order of events: asked, taken, run, answered, cut off, dialled again.

The two ends are real, `Link` and `Session`; the connections between them are queues that the test moves on by hand, one
message at a time. Wherever one end sends, anything else may happen before the message is on its way, as it may with
threads. A cut leaves what was sent to be read still, for as long as the reader does not notice, also after the next
connection has begun. Whatever the order: no request is run twice, every caller gets its own answer once, every notice
is taken once, and no answer is kept after it is known to have arrived.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest

from telegrad.ids import Incarnation, WorkerId
from telegrad.rpc.client.link import Link
from telegrad.rpc.client.outcomes import Dialled, Unanswered
from telegrad.rpc.client.pending import FOREVER, Slot
from telegrad.rpc.layer import Layer
from telegrad.rpc.request import Request
from telegrad.rpc.server.session import Session, SessionTurn
from telegrad.rpc.workers import Member
from telegrad.wire.frames import HEADER, Frame, FrameKind, decode_record
from telegrad.wire.messages import Ack, AnyMessage, CancelCall, CleanupAutogradContext, Ping
from tests.exploring import Chance, explore
from tests.rpc.quiet import Events, QuietCopier, QuietStream, quiet_runtime, serve_with

CALLER = Member("caller", WorkerId(0), Incarnation(1), (), 0)
CALLEE = Member("callee", WorkerId(1), Incarnation(2), (), 0)

DEPTH = 1  # how many things may go on inside one another

Content = tuple[int, int, int, AnyMessage, bytes]


class Wire:
    """What both ends of one connection have sent and not yet read."""

    def __init__(self, number: int, pause: Callable[[Hashable], None]) -> None:
        self.number = number
        self.to_callee: deque[Content] = deque()
        self.to_caller: deque[Content] = deque()
        self.is_cut = False
        self.caller = End(self, self.to_callee, pause)
        self.callee = End(self, self.to_caller, pause)


class End:
    """One end of a connection, with as much of `Connection` as links and sessions use."""

    def __init__(self, wire: Wire, sent: deque[Content], pause: Callable[[Hashable], None]) -> None:
        self.wire = wire
        self.sent = sent
        self.pause = pause  # what may happen before a message is on its way
        self.held: list[Content] = []
        self.closed = False
        self.stream = QuietStream(wire.number)
        self.after_hold: Callable[[], None] = lambda: None
        self.flush_within: Callable[[float], None] = lambda seconds: None
        self.on_blocked: Callable[[], None] = lambda: None
        self.copier = QuietCopier()
        self.came: list[Frame] = []  # what there is to read
        self.outbox = ()  # the test flushes
        self.reserved = 0  # nothing is large

    def send(
        self,
        kind: int,
        request_id: int,
        ack: int,
        message: AnyMessage,
        payload: bytes = b"",
        *_: Any,
        hold: bool = False,
        deadline: float | None = None,
        in_place: Any = None,
    ) -> bytes | None:
        content = (kind, request_id, ack, message, payload)
        if type(message) is not CancelCall:  # word that nobody waits any more changes nothing about who asks again
            self.held.append(content)
        if not hold:
            self.flush()
            if self.closed or self.wire.is_cut:
                raise ConnectionResetError("cut")
        return None

    def mention(self, message: AnyMessage, ack: int = 0, within: float = 0.0, payload: bytes = b"") -> None:
        self.send(FrameKind.NOTICE, 0, ack, message, payload, hold=True)
        if type(message) is not Ack:  # that goes with the next message
            self.flush()

    def send_encoded(self, frame: bytes, deadline: float | None = None, hold: bool = False) -> None:
        found = decode_record(frame[HEADER.size :])
        self.send(found.kind, found.request_id, found.ack, found.message, found.payload, hold=hold)

    def flush(self) -> None:
        if self.held:
            if any(type(message) is not Ack for _, _, _, message, _ in self.held):  # what an Ack says was true before
                self.pause((self.wire.number, self is self.wire.caller, tuple(self.held)))
            held, self.held = self.held, []
            if not (self.closed or self.wire.is_cut):
                self.sent.extend(held)

    def receive(self) -> list[Frame]:
        return self.came

    def close(self) -> None:
        self.closed = self.wire.is_cut = True


class LateReplies(Layer):
    """Counts replies that nobody waits for any more."""

    def __init__(self, late: Counter[int]) -> None:
        self._late = late

    def on_late_reply(self, frame: Frame, sender: WorkerId) -> None:
        self._late[frame.request_id] += 1


class World(Events):
    """A caller and a callee, what they have still to do, and what came of it."""

    def __init__(
        self, chance: Chance, *, requests: int, notices: int = 0, cuts: int, deadlines: int = 0, by_name: bool = False
    ) -> None:
        self.chance = chance
        self.by_name = by_name  # whether each reply is acknowledged at once, by its number
        self.left = Counter(ask=requests, tell=notices, cut=cuts, deadline=deadlines)
        self.numbers = itertools.count(1)
        self.wires: list[Wire] = []
        self.slots: dict[int, Slot] = {}
        self.running: dict[int, Request] = {}
        self.ran: Counter[int] = Counter()
        self.noticed: Counter[int] = Counter()
        self.outcomes: dict[int, list[str]] = {}
        self.late: Counter[int] = Counter()
        self.suspended: list[Hashable] = []  # what is about to be sent, and waits until something else has happened
        self.told = notices
        self.lost_links: deque[str] = deque()  # what the agents have been told and have yet to act on
        shared, quiet = quiet_runtime()
        quiet.layers.install(LateReplies(self.late))
        serve_with(quiet, self.serve, CleanupAutogradContext, deferrable=True)
        serve_with(quiet, self.serve, Ping)
        self.tasks = quiet.io_threads.tasks
        self.link = Link(shared, self, CALLEE, 1)
        self.session = Session(shared, self, CALLER, False)

    # --- what the agents do ---

    def link_lost(self, link: Link) -> None:
        self.lost_links.append("redial")

    def dial(self, link: Link, deadline: float) -> Dialled | Unanswered:
        wire = Wire(len(self.wires) + 1, self.pause)
        self.wires.append(wire)
        self.session.attach(wire.callee)
        return Dialled(wire.caller, False)

    def serve(self, request: Request) -> None:
        if type(request.message) is Ping:
            self.session.reply(FrameKind.REPLY, request.frame.request_id, Ack())
            return
        number = request.message.context_id
        if request.frame.kind == FrameKind.NOTICE:
            self.noticed[number] += 1
            return
        self.ran[number] += 1
        self.running[number] = request

    # --- what can happen ---

    def events(self) -> dict[str, Callable[[], None]]:
        """What can happen now. While the caller dials, nothing happens that needs the same lock."""
        again = [number for number, times in self.ran.items() if times > 1]
        assert not again, f"request {again} was run again"
        free = not self.link.dialling
        found: dict[str, Callable[[], None]] = {}
        if free and self.left["ask"]:
            found["ask"] = self.ask
        if free and self.left["tell"]:
            found["tell"] = self.tell
        if free and self.lost_links:
            found["redial"] = self.redial
        for wire in self.wires:
            if wire.to_callee:
                found[f"take {wire.number}"] = lambda wire=wire: self.take(wire)
            if wire.to_caller and free and self.link.current is wire.caller:
                found[f"read {wire.number}"] = lambda wire=wire: self.read(wire)
            if not wire.is_cut and self.left["cut"]:
                found[f"cut {wire.number}"] = lambda wire=wire: self.cut(wire)
            if wire.is_cut and free and self.link.current is wire.caller:
                found[f"caller notices {wire.number}"] = lambda wire=wire: self.link.lost(wire.caller)
            if wire.is_cut and not wire.callee.closed:
                found[f"callee notices {wire.number}"] = lambda wire=wire: self.callee_notices(wire)
            if wire.to_callee and wire.callee.closed:  # replaced before all was read
                found[f"miss the rest of {wire.number}"] = wire.to_callee.clear
        for number in self.running:
            found[f"answer {number}"] = lambda number=number: self.answer(number)
        if self.left["deadline"]:
            for slot in self.link.pending.snapshot()[:1]:
                found[f"deadline of {slot.request_id}"] = lambda slot=slot: self.deadline(slot)
        return found

    def ask(self) -> None:
        self.left["ask"] -= 1
        number = next(self.numbers)
        self.outcomes[number] = []
        self.slots[number] = self.link.send(
            CleanupAutogradContext(number, ()),  # any message will do
            timeout=0.0,
            what="a call",
            complete=lambda slot: self.outcomes[number].append(_outcome(slot)),
        )

    def tell(self) -> None:
        self.left["tell"] -= 1
        self.link.notify(CleanupAutogradContext(100 + self.left["tell"], ()))

    def redial(self) -> None:
        self.lost_links.popleft()
        self.link.resume(FOREVER)

    def take(self, wire: Wire) -> None:
        """As a session does with one frame."""
        turn = SessionTurn(self.session)
        self.session.take(_frame(wire.to_callee.popleft()), turn)
        self.session.serve_deferred(turn)

    def read(self, wire: Wire) -> None:
        """As the reader of replies does with one frame."""
        frame = _frame(wire.to_caller.popleft())
        receiver, read = self.link.replies.receiver, []
        wire.caller.came = [frame]
        receiver.receive(wire.caller, read)
        self.link.completion.by_io_thread(read)
        if self.by_name:
            receiver.acknowledge(wire.caller)
        wire.caller.flush()

    def cut(self, wire: Wire) -> None:
        self.left["cut"] -= 1
        wire.is_cut = True

    def callee_notices(self, wire: Wire) -> None:
        self.session.ended(wire.callee)
        wire.to_callee.clear()

    def answer(self, number: int) -> None:
        request = self.running.pop(number)
        self.session.reply(FrameKind.REPLY, request.frame.request_id, CleanupAutogradContext(number, ()))

    def deadline(self, slot: Slot) -> None:
        self.left["deadline"] -= 1
        slot.deadline = 0.0
        self.link.expire()
        self.tasks.popleft()()

    # --- the course of things ---

    def pause(self, content: Hashable) -> None:
        """One end is about to send: anything else may happen first, in other threads."""
        if len(self.suspended) == DEPTH:
            return
        self.suspended.append(content)
        while found := self.events():
            self.chance.seen(self.state())
            choice = self.chance.choose(["(send)", *found])
            if choice == "(send)":
                break
            found[choice]()
        self.suspended.pop()

    def run(self) -> None:
        while found := self.events():
            self.chance.seen(self.state())
            found[self.chance.choose(list(found))]()

    def state(self) -> Hashable:
        """All that decides what can happen from here on."""
        link, session = self.link, self.session
        return (
            tuple(self.suspended),
            tuple(sorted(self.left.items())),
            tuple(
                (tuple(w.to_callee), tuple(w.to_caller), w.is_cut, w.caller.closed, w.callee.closed) for w in self.wires
            ),
            tuple(tuple(w.caller.held) + tuple(w.callee.held) for w in self.wires),
            tuple(self.running),
            tuple(map(tuple, self.outcomes.values())),
            tuple(sorted(self.late.items())),
            tuple(sorted(self.noticed.items())),
            link.pending.numbers(),
            (link.replies.receiver.unacknowledged, link.replies.state, link.kept_notices, len(self.lost_links)),
            session.requests.numbers(),
            (link.current is None, session.connection is None),
        )


def _frame(content: Content) -> Frame:
    kind, request_id, ack, message, payload = content
    return Frame(kind, request_id, ack, message, (), payload)


def _outcome(slot: Slot) -> str:
    if slot.error is not None:
        return type(slot.error).__name__
    assert slot.frame is not None
    return f"reply {slot.frame.message.context_id}"


def settle(world: World) -> None:
    """Let all that is left happen, and one more call, without harm."""
    world.chance = Chance((), set())
    world.left["ask"] = 1
    while found := world.events():
        next(iter(found.values()))()


def check(world: World) -> None:
    for number, outcomes in world.outcomes.items():
        given_up = outcomes == ["RpcTimeout"]
        assert given_up or outcomes == [f"reply {number}"], f"the caller of {number} got {outcomes}"
        assert world.ran[number] == 1 or given_up
        assert world.late[number] == given_up, "a reply that comes too late is heard of once, any other never"
    assert set(world.noticed.values()) <= {1}
    assert len(world.link.pending) == 0
    assert not world.link.pending.given_up
    settle(world)
    last = max(world.outcomes)
    assert world.outcomes[last] == [f"reply {last}"]
    requests = world.session.requests
    assert (set(requests.replies) | set(requests.running)) <= {world.slots[last].request_id}
    assert len(world.noticed) == world.told


SCENARIOS = {
    "one call, two cuts": {"requests": 1, "cuts": 2},
    "two calls, one cut": {"requests": 2, "cuts": 1},
    "a call that is given up, one cut": {"requests": 1, "cuts": 1, "deadlines": 1},
    "a call that is acknowledged by name, one cut": {"requests": 1, "cuts": 1, "by_name": True},
    "a call and a notice, one cut": {"requests": 1, "notices": 1, "cuts": 1},
}
LONG_SCENARIOS = {
    "two calls, one cut, acknowledged by name": {"requests": 2, "cuts": 1, "by_name": True},
    "two calls, one is given up, one cut": {"requests": 2, "cuts": 1, "deadlines": 1},
    "two calls, both are given up, one cut": {"requests": 2, "cuts": 1, "deadlines": 2},
}


class Told(Chance):
    """Makes the choices it was told, and then the first."""

    def __init__(self, *story: str) -> None:
        super().__init__((), set())
        self._told = deque(story)

    def choose(self, options: Sequence[str]) -> str:
        if not self._told:
            return options[0]
        assert self._told[0] in options
        return self._told.popleft()


def test_a_call_that_is_given_up_while_others_are_sent_again() -> None:
    """Neither sent again nor asked after, it would be waited for until the next connection."""
    lost = ("ask", "(send)", "ask", "(send)", "cut 1", "caller notices 1", "callee notices 1")
    world = World(Told(*lost, "redial", "deadline of 1", "deadline of 2"), requests=2, cuts=1, deadlines=2)
    world.run()
    check(world)


@pytest.mark.slow
@pytest.mark.timeout(300)  # it takes seconds, but a machine may be busy
@pytest.mark.parametrize(
    "given",
    [
        *(pytest.param(given, id=name) for name, given in SCENARIOS.items()),
        *(pytest.param(given, id=name, marks=pytest.mark.long) for name, given in LONG_SCENARIOS.items()),
    ],
)
def test_every_order(given: dict[str, Any]) -> None:
    def run(chance: Chance) -> None:
        world = World(chance, **given)
        world.run()
        check(world)

    assert explore(run) > 10


class Forgetful(dict[int, Any]):
    """What a session would remember its replies in if it did not."""

    def __setitem__(self, *_: Any) -> None:
        pass


def test_a_session_that_forgets_is_found_out() -> None:
    def run(chance: Chance) -> None:
        world = World(chance, requests=1, cuts=1)
        world.session.requests.replies = Forgetful()
        world.run()

    with pytest.raises(AssertionError, match="was run again"):
        explore(run)


def test_a_link_that_acknowledges_too_early_is_found_out() -> None:
    def run(chance: Chance) -> None:
        world = World(chance, requests=2, cuts=1)
        pending = world.link.pending
        admit = pending.admit
        pending.admit = lambda slot: admit(slot) + 1
        world.run()
        check(world)

    with pytest.raises(AssertionError, match="got"):
        explore(run)
