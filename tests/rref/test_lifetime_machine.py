"""Four workers, a network that reorders, delays and repeats, and deaths at any moment: what must hold all the same.

`World` is a shell as small as can be: it performs the ledgers' actions by putting messages into a bag. Hypothesis picks
what happens next. A value's own history (was it created, by whom is it named, what is in flight) is kept beside the
ledgers, so that the checks do not ask the code they test.
"""

import itertools
import random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from telegrad.ids import ForkId, PeerId, RRefId, make_id
from telegrad.rref.ledger import actions as lt
from telegrad.rref.ledger.owner import OwnerLedger
from telegrad.rref.ledger.user import UserLedger

WORKERS = [PeerId(n) for n in range(4)]


class Handle(msgspec.Struct, frozen=True):
    rref_id: RRefId
    fork_id: ForkId | None  # None on the owner
    owner: PeerId


class Carrier(msgspec.Struct, frozen=True):
    """A call with a handle among its arguments."""

    to: PeerId
    handle: Handle


class HomeCall(msgspec.Struct, frozen=True):
    """A call to the owner with the id of a value among its arguments. Its sender keeps the handle until the answer."""

    to: PeerId
    handle: Handle


class Answer(msgspec.Struct, frozen=True):
    """The answer to a `HomeCall`, however late it is."""

    to: PeerId
    handle: Handle


class Creation(msgspec.Struct, frozen=True):
    to: PeerId
    rref_id: RRefId
    fork_id: ForkId


Message = lt.Send | Carrier | HomeCall | Answer | Creation


class Worker:
    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.alive = True
        self.owner = OwnerLedger(me, WORKERS)
        self.user = UserLedger(me)
        self.knows_dead: set[PeerId] = set()
        self.values: dict[RRefId, str] = {}
        self.handles: list[Handle] = []
        self.kept: list[Handle] = []  # those of calls that are not answered, once for each
        self.rref_ids = itertools.count(1)
        self.fork_ids = itertools.count(1)

    def new_rref_id(self) -> RRefId:
        return RRefId(make_id(self.me, next(self.rref_ids)))

    def new_fork_id(self) -> ForkId:
        return ForkId(make_id(self.me, next(self.fork_ids)))


class World:
    def __init__(self) -> None:
        self.workers = {w: Worker(w) for w in WORKERS}
        self.bag: list[tuple[PeerId, Message]] = []
        self.created: dict[RRefId, PeerId] = {}  # values that came to exist, and where

    def living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive]

    def perform(self, at: Worker, actions: lt.Actions) -> None:
        for action in actions:
            match action:
                case lt.Send(to):
                    assert to not in at.knows_dead, f"{action} needs a worker known to be dead"
                    assert to != at.me, f"{action} to oneself"
                    self.bag.append((at.me, action))
                case lt.Forget(rref_id):
                    at.values.pop(rref_id, None)
                case lt.FailValue(rref_id):
                    assert at.values.get(rref_id) != "value", "an error must not replace a value"
                    at.values[rref_id] = "error"
                case lt.MarkLost(rref_id, fork_id, died):
                    assert died in at.knows_dead
                    at.handles = [h for h in at.handles if h.fork_id != fork_id]
                    at.kept = [h for h in at.kept if h.fork_id != fork_id]
                case lt.Refuse(_):
                    pass
                case _:
                    raise AssertionError(action)

    # What programs do

    def make_local(self, at: Worker) -> None:
        rref_id = at.new_rref_id()
        at.values[rref_id] = "value"
        self.created[rref_id] = at.me
        at.handles.append(Handle(rref_id, None, at.me))
        self.perform(at, at.owner.hold(rref_id))

    def remote(self, at: Worker, to: PeerId) -> None:
        rref_id, fork_id = at.new_rref_id(), at.new_fork_id()
        at.handles.append(Handle(rref_id, fork_id, to))
        self.perform(at, at.user.create(rref_id, fork_id, to))
        self.bag.append((at.me, Creation(to, rref_id, fork_id)))

    def fail_creation(self, index: int) -> None:
        """A creation still queued at its caller can no longer be sent."""
        src, message = self.bag.pop(index)
        assert isinstance(message, Creation)
        at = self.workers[src]
        self.perform(at, at.user.creation_failed(message.fork_id))

    def share(self, at: Worker, handle: Handle, to: PeerId, *, sent: bool = True) -> None:
        child = at.new_fork_id()
        if handle.fork_id is None:
            self.perform(at, at.owner.share(handle.rref_id, child, to))
        else:
            self.perform(at, at.user.share(handle.fork_id, child, to))
        if sent:
            self.bag.append((at.me, Carrier(to, Handle(handle.rref_id, child, handle.owner))))
        elif handle.fork_id is None:
            self.perform(at, at.owner.share_unsent(handle.rref_id, child, to))
        else:
            self.perform(at, at.user.share_unsent(child))

    def call_home(self, at: Worker, handle: Handle) -> None:
        """Only with a handle that the owner is known to know."""
        at.kept.append(handle)
        self.bag.append((at.me, HomeCall(handle.owner, handle)))

    def drop(self, at: Worker, handle: Handle) -> None:
        at.handles.remove(handle)
        self._let_go(at, handle)

    def _let_go(self, at: Worker, handle: Handle) -> None:
        if handle.fork_id is None:
            self.perform(at, at.owner.drop(handle.rref_id))
        elif handle not in at.handles and handle not in at.kept:
            self.perform(at, at.user.drop(handle.fork_id))

    # What the network and the operator do

    def kill(self, worker: Worker) -> None:
        """What it has sent may still arrive."""
        worker.alive = False
        self.bag = [(src, message) for src, message in self.bag if message.to != worker.me]

    def notice(self, at: Worker, dead: PeerId) -> None:
        at.knows_dead.add(dead)
        self.perform(at, at.owner.worker_died(dead))
        self.perform(at, at.user.worker_died(dead))

    def deliver(self, index: int, *, repeat: bool) -> None:
        src, message = self.bag[index]
        if not repeat or isinstance(message, Carrier | HomeCall | Answer | Creation):
            self.bag[index] = self.bag[-1]
            self.bag.pop()
        at = self.workers[message.to]
        if not at.alive:
            return
        match message:
            case HomeCall(_, handle):
                self.come_home(at, src, handle)
            case Answer(_, handle):
                if handle in at.kept:  # else it was lost meanwhile
                    at.kept.remove(handle)
                    self._let_go(at, handle)
            case _:
                self.perform(at, self.react(at, src, message))

    def come_home(self, at: Worker, src: PeerId, handle: Handle) -> None:
        if at.owner.come_home(handle.rref_id, src):
            at.handles.append(Handle(handle.rref_id, None, at.me))
        else:
            assert src in at.knows_dead, f"{handle} came home too late"
        if src not in at.knows_dead:
            self.bag.append((at.me, Answer(src, handle)))

    def react(self, at: Worker, src: PeerId, message: lt.Send | Carrier | Creation) -> lt.Actions:
        match message:
            case Creation(_, rref_id, fork_id):
                actions = at.owner.on_create(src, rref_id, fork_id)
                if lt.Refuse(rref_id) in actions:
                    return actions
                at.values[rref_id] = "value"
                self.created[rref_id] = at.me
                return (*actions, lt.SendAck(src, rref_id, fork_id))  # the reply
            case Carrier(_, handle):
                assert handle.fork_id is not None
                if handle.owner == at.me:
                    home = Handle(handle.rref_id, None, at.me)
                    actions = at.owner.receive(handle.rref_id, handle.fork_id)
                    if not any(isinstance(action, lt.MarkLost) for action in actions):
                        at.handles.append(home)
                    return actions
                at.handles.append(handle)
                return at.user.receive(handle.rref_id, handle.fork_id, handle.owner)
            case lt.SendForkRequest(_, rref_id, fork_id, holder):
                return at.owner.on_fork_request(src, rref_id, fork_id, holder)
            case lt.SendDelete(_, rref_id, fork_id):
                return at.owner.on_delete(src, rref_id, fork_id)
            case lt.SendCreationFailed(_, rref_id, fork_id):
                return at.owner.on_creation_failed(src, rref_id, fork_id)
            case lt.SendFlushed(_, dead, forks):
                return at.owner.on_flushed(src, dead, forks)
            case lt.SendAck(_, rref_id, fork_id):
                return at.user.on_ack(src, rref_id, fork_id)
            case lt.SendChildAccept(_, fork_id):
                return at.user.on_child_accept(fork_id)
            case lt.SendFlush(_, dead):
                return at.user.on_flush(src, dead)
        raise AssertionError(message)

    # What must hold

    def check_nothing_named_is_forgotten(self) -> None:
        for worker in self.living():
            for handle in worker.handles:
                self._check_kept(handle, f"a handle on {worker.me}")
        for src, message in self.bag:
            to = self.workers[message.to]
            if isinstance(message, Carrier | HomeCall) and to.alive and src not in to.knows_dead:
                self._check_kept(message.handle, f"a call from {src} to {message.to}")

    def _check_kept(self, handle: Handle, because: str) -> None:
        owner = self.workers[handle.owner]
        if owner.alive and handle.rref_id in self.created:
            assert handle.rref_id in owner.values, f"{handle} is forgotten but named by {because}"

    def quiesce(self) -> None:
        """Everyone hears of every death and every message arrives, newest first."""
        for at in self.living():
            for dead in self.workers.values():
                if not dead.alive and dead.me not in at.knows_dead:
                    self.notice(at, dead.me)
        for _ in range(10_000):
            if not self.bag:
                return
            self.deliver(len(self.bag) - 1, repeat=False)
            self.check_nothing_named_is_forgotten()
        raise AssertionError("the protocol does not come to rest")

    def check_end(self) -> None:
        """At rest every handle can be answered; once all are dropped, no table has anything left."""
        self.quiesce()
        for at in self.living():
            for handle in at.handles:
                assert handle.rref_id in self.workers[handle.owner].values, f"to_here on {handle} would wait for ever"
                assert handle.fork_id is None or at.user.confirmed(handle.fork_id)
        for at in self.living():
            for handle in list(at.handles):
                self.drop(at, handle)
        self.quiesce()
        for at in self.living():
            assert at.values == {}
            assert at.owner.leaks() == [] and at.user.leaks() == []
            assert not any(at.owner.counts().values()), at.owner.counts()
            assert not any(at.user.counts().values()), at.user.counts()
            assert at.kept == []


class RRefContext(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    def pick(self, data: st.DataObject, options: list[Any]) -> Any:
        return options[data.draw(st.integers(0, len(options) - 1))]

    @rule(data=st.data(), to=st.sampled_from(WORKERS))
    def remote(self, data: st.DataObject, to: PeerId) -> None:
        at = self.pick(data, self.world.living())
        if at.me == to:
            self.world.make_local(at)
        elif to not in at.knows_dead:
            self.world.remote(at, to)

    def handles(self) -> list[tuple[Worker, Handle]]:
        return [(at, handle) for at in self.world.living() for handle in at.handles]

    @precondition(lambda self: self.handles())
    @rule(data=st.data(), to=st.sampled_from(WORKERS), then_drop=st.booleans())
    def share(self, data: st.DataObject, to: PeerId, then_drop: bool) -> None:
        at, handle = self.pick(data, self.handles())
        if to not in at.knows_dead:
            self.world.share(at, handle, to)
        if then_drop:
            self.world.drop(at, handle)

    def known(self) -> list[tuple[Worker, Handle]]:
        return [(at, h) for at, h in self.handles() if h.fork_id is not None and at.user.confirmed(h.fork_id)]

    @precondition(lambda self: self.known())
    @rule(data=st.data(), then_drop=st.booleans())
    def call_home(self, data: st.DataObject, then_drop: bool) -> None:
        at, handle = self.pick(data, self.known())
        if handle.owner not in at.knows_dead:
            self.world.call_home(at, handle)
        if then_drop:
            self.world.drop(at, handle)

    @precondition(lambda self: self.handles())
    @rule(data=st.data(), to=st.sampled_from(WORKERS))
    def share_but_not_sent(self, data: st.DataObject, to: PeerId) -> None:
        at, handle = self.pick(data, self.handles())
        self.world.share(at, handle, to, sent=False)

    @precondition(lambda self: self.handles())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.world.drop(*self.pick(data, self.handles()))

    @precondition(lambda self: self.world.bag)
    @rule(data=st.data(), repeat=st.booleans())
    def deliver(self, data: st.DataObject, repeat: bool) -> None:
        self.world.deliver(data.draw(st.integers(0, len(self.world.bag) - 1)), repeat=repeat)

    def queued_creations(self) -> list[int]:
        bag, workers = self.world.bag, self.world.workers
        return [n for n, (src, message) in enumerate(bag) if isinstance(message, Creation) and workers[src].alive]

    @precondition(lambda self: self.queued_creations())
    @rule(data=st.data())
    def fail_creation(self, data: st.DataObject) -> None:
        self.world.fail_creation(self.pick(data, self.queued_creations()))

    @precondition(lambda self: len(self.world.living()) > 2)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        self.world.kill(self.pick(data, self.world.living()))

    @precondition(lambda self: any(not worker.alive for worker in self.world.workers.values()))
    @rule(data=st.data())
    def lose_what_the_dead_sent(self, data: st.DataObject) -> None:
        sent = [n for n, (src, _) in enumerate(self.world.bag) if not self.world.workers[src].alive]
        if sent:
            self.world.bag.pop(self.pick(data, sent))

    def news(self) -> list[tuple[Worker, PeerId]]:
        dead = [worker.me for worker in self.world.workers.values() if not worker.alive]
        return [(at, d) for at in self.world.living() for d in dead if d not in at.knows_dead]

    @precondition(lambda self: self.news())
    @rule(data=st.data())
    def notice(self, data: st.DataObject) -> None:
        self.world.notice(*self.pick(data, self.news()))

    @invariant()
    def nothing_named_is_forgotten(self) -> None:
        self.world.check_nothing_named_is_forgotten()

    def teardown(self) -> None:
        self.world.check_end()


@pytest.mark.slow
def test_no_order_of_messages_and_deaths_breaks_the_guarantees() -> None:
    run_state_machine_as_test(
        RRefContext,
        settings=settings(
            max_examples=300,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def walk(seed: int) -> None:
    """One random life around a handle that is shared, dropped at once, and whose sender dies."""
    choose = random.Random(seed)
    world = World()
    for _ in range(2):
        world.remote(world.workers[WORKERS[1]], WORKERS[0])
    if choose.random() < 0.7:
        world.quiesce()
    for _ in range(choose.choice([8, 15, 40])):
        at = choose.choice(world.living())
        news = [w for w in WORKERS if not world.workers[w].alive and w not in at.knows_dead]
        known = [h for h in at.handles if h.fork_id is not None and at.user.confirmed(h.fork_id)]
        what = ["share", "share", "home", "drop", "deliver", "deliver", "repeat", "kill", "notice", "notice"]
        match choose.choice(what):
            case "home" if known:
                handle = choose.choice(known)
                if handle.owner not in at.knows_dead:
                    world.call_home(at, handle)
                if choose.random() < 0.5:
                    world.drop(at, handle)
            case "share" if at.handles:
                handle, to = choose.choice(at.handles), choose.choice(WORKERS)
                if to not in at.knows_dead:
                    world.share(at, handle, to)
                if choose.random() < 0.5:
                    world.drop(at, handle)
            case "drop" if at.handles:
                world.drop(at, choose.choice(at.handles))
            case "deliver" | "repeat" as how if world.bag:
                world.deliver(choose.randrange(len(world.bag)), repeat=how == "repeat")
            case "kill" if len(world.living()) > 2 and at.me != WORKERS[0]:
                world.kill(at)
            case "notice" if news:
                world.notice(at, choose.choice(news))
        world.check_nothing_named_is_forgotten()
    world.check_end()


@pytest.mark.slow
def test_ten_thousand_lives_around_a_dying_sender() -> None:
    for seed in range(10_000):
        walk(seed)
