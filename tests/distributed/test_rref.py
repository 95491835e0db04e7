"""References between real workers: made, fetched, shared, dropped, and what fails."""

import gc
import io
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.errors import RpcTimeout, RRefError, SerializationError
from telegrad.ids import RRefId
from telegrad.rpc.current import require_agent
from telegrad.rpc.futures import Future
from telegrad.rpc.round_trip import start_call
from telegrad.rpc.torch_modes import stand_in
from telegrad.rref import debug_info, handles, rrefs_of
from telegrad.rref.travel import come_home
from telegrad.transport.outgoing import Outgoing
from tests.cluster import Cluster, cluster
from tests.waiting import stop_process

# --- what runs on the workers ---


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, by: int) -> int:
        self.count += by
        return self.count

    @staticmethod
    def double(x: int) -> int:
        return 2 * x

    @classmethod
    def kind(cls) -> str:
        return cls.__name__

    @rpc.functions.async_execution
    def add_elsewhere(self, to: str, x: int) -> torch.futures.Future[int]:
        return rpc.rpc_async(to, Counter.double, (x,)).then(lambda done: done.wait() + self.count)

    async def add_later(self, x: int) -> int:
        return self.count + x


def add(x: Any, y: Any) -> Any:
    return x + y


def fail(text: str) -> None:
    raise ValueError(text)


def fetch(rref: "rpc.RRef[Any]") -> Any:
    return rref.to_here()


def local(rref: "rpc.RRef[Any]") -> Any:
    assert rref.is_owner()
    return rref.local_value()


def same(first: Any, second: Any) -> bool:
    return first is second


def confirmed(rref: "rpc.RRef[Any]") -> bool:
    return rref.confirmed_by_owner()


def make_and_return(to: str, value: Any) -> "rpc.RRef[Any]":
    return rpc.remote(to, add, (value, 0))


def hold_here(value: Any) -> "rpc.RRef[Any]":
    return rpc.RRef(value)


def forward_chain(names: list[str], rref: "rpc.RRef[Any]") -> Any:
    return [rpc.remote(names[0], forward_chain, (names[1:], rref))] if names else rref.to_here()


_kept: list[Any] = []
_gates: dict[str, threading.Event] = {}


def keep(value: Any) -> None:
    _kept.append(value)


def keep_at_home(owner: str, rref: "rpc.RRef[Any]") -> None:
    assert rref.confirmed_by_owner()
    rpc.rpc_sync(owner, keep, (rref,))


def fetch_kept() -> Any:
    return _kept[-1].to_here(60)


def let_go() -> None:
    _kept.clear()


def gated(name: str, result: Any) -> Any:
    _gates.setdefault(name, threading.Event()).wait(120)
    return result


def open_gate(name: str) -> None:
    _gates.setdefault(name, threading.Event()).set()


def tables() -> dict[str, int]:
    """What references occupy on this worker."""
    references = rrefs_of(require_agent())
    references.sweep()
    counts = {**references.owned.counts(), **references.used.counts()}
    del counts["awaiting"]
    return {**counts, "values": len(references.values), "lost": len(references.lost)}


class Unsendable:
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


# --- helpers ---


def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds} s: {condition}")
        time.sleep(0.005)
    return value


def all_empty(names: list[str]) -> bool:
    return not any(any(rpc.rpc_sync(name, tables).values()) for name in names)


@pytest.fixture(scope="module")
def trio() -> Iterator[Cluster]:
    """Three workers."""
    with cluster(3) as made:
        yield made


@pytest.fixture
def clean(trio: Cluster) -> Iterator[Cluster]:
    """Three workers with nothing left of any reference when the test is over."""
    yield trio
    for name in trio.names:
        rpc.rpc_sync(name, let_go)
    gc.collect()  # errors that a test caught hold its frame
    eventually(lambda: all_empty(trio.names))


# --- making and fetching ---


def test_a_value_made_elsewhere(clean: Cluster) -> None:
    rref = rpc.remote("worker1", add, (torch.ones(2), 1))
    assert torch.equal(rref.to_here(), torch.full((2,), 2.0))
    assert not rref.is_owner()
    assert (rref.owner(), rref.owner_name()) == (rpc.get_worker_info("worker1"), "worker1")
    assert rref.confirmed_by_owner()
    with pytest.raises(
        RRefError, match=r"can't call localValue\(\) on user WorkerInfo\(id=0, name=worker0\). Call it on"
    ):
        rref.local_value()


def test_a_value_made_here(clean: Cluster) -> None:
    value = object()
    rref = rpc.RRef(value)
    assert rref.to_here() is rref.local_value() is value
    assert rref.is_owner() and rref.confirmed_by_owner() and rref.owner() == rpc.get_worker_info()


def test_remote_to_oneself_does_not_wait(clean: Cluster) -> None:
    rref = rpc.remote("worker0", gated, ("self", 3))
    with pytest.raises(RpcTimeout, match="RPC ran for more than"):
        rref.to_here(timeout=0.01)
    open_gate("self")
    assert rref.is_owner() and rref.to_here() == rref.local_value() == 3


def test_subscripts(clean: Cluster) -> None:
    assert rpc.RRef[int](3).local_value() == 3


def test_a_fetch_waits_for_the_value_without_a_thread(clean: Cluster) -> None:
    rref = rpc.remote("worker1", gated, ("slow", "there"))
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(rref.to_here())) for _ in range(20)]
    for thread in threads:
        thread.start()
    with pytest.raises(RpcTimeout, match="RPC ran for more than"):
        rref.to_here(timeout=0.01)
    assert rpc.rpc_sync("worker1", add, (1, 2)) == 3
    rpc.rpc_sync("worker1", open_gate, ("slow",))
    for thread in threads:
        thread.join()
    assert results == ["there"] * 20


def test_async_functions_and_coroutines_make_values(clean: Cluster) -> None:
    counter = rpc.remote("worker1", Counter, (1,))
    assert counter.remote().add_elsewhere("worker2", 4).to_here() == 9
    assert counter.remote().add_later(6).to_here() == 7


# --- sending ---


def test_to_a_third_worker_home_and_to_oneself(clean: Cluster) -> None:
    rref = rpc.remote("worker1", add, ("a", "b"))
    assert rpc.rpc_sync("worker2", fetch, (rref,)) == "ab"
    assert rpc.rpc_sync("worker1", local, (rref,)) == "ab"
    assert rpc.rpc_sync("worker0", fetch, (rref,)) == "ab"
    mine = rpc.RRef([1])
    assert rpc.rpc_sync("worker2", fetch, (mine,)) == [1]
    assert rpc.rpc_sync("worker0", local, (mine,)) == [1]
    assert rpc.remote("worker2", fetch, (mine,)).to_here() == [1]


def test_a_call_home_names_no_other_handle(clean: Cluster) -> None:
    rref = rpc.remote("worker1", add, (1, 1))
    eventually(rref.confirmed_by_owner)  # the value may be here before that word is
    future = rpc.rpc_async("worker1", gated, ("home", {"at": [rref, rref]}))
    assert tables()["children"] == 0
    del rref
    gc.collect()
    tables()
    assert rpc.rpc_sync("worker1", tables)["forks"] == 1  # the call has it
    rpc.rpc_sync("worker1", open_gate, ("home",))
    first, second = future.wait()["at"]
    assert first is second
    assert first.to_here() == 2


def test_what_came_home_is_kept_there(clean: Cluster) -> None:
    rref = rpc.remote("worker1", add, (1, 1))
    rref.to_here()
    rpc.rpc_sync("worker1", keep, (rref,))
    del rref
    eventually(lambda: tables()["users"] == 0)
    assert rpc.rpc_sync("worker1", fetch_kept) == 2


def test_a_call_home_before_the_value_is_known_to_be_there(clean: Cluster) -> None:
    rref = rpc.remote("worker1", gated, ("unmade", 5))
    future = rpc.rpc_async("worker1", fetch, (rref,))
    rpc.rpc_sync("worker1", open_gate, ("unmade",))
    assert future.wait() == 5


def test_a_call_home_before_the_creation_has_arrived(clean: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    creations: list[Callable[[], Any]] = []

    def hold_back(*args: Any, **kwargs: Any) -> None:
        creations.append(partial(start_call, *args, **kwargs))

    with monkeypatch.context() as patch:
        patch.setattr(handles, "start_call", hold_back)
        rref = rpc.remote("worker1", add, (1, 1))
    rpc.rpc_sync("worker2", keep_at_home, ("worker1", rref))
    creations.pop()()
    assert rpc.rpc_sync("worker1", fetch_kept) == 2


def test_a_call_home_that_was_given_up_still_has_its_reference(clean: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "in_force", stand_in.TORCHS)  # where a call whose time is up still runs
    rref = rpc.remote("worker1", add, (1, 1))
    rref.to_here()
    pid = clean.processes[0].pid
    assert pid is not None
    stop_process(pid)
    try:
        with pytest.raises(RpcTimeout):
            rpc.rpc_sync("worker1", keep, (rref,), timeout=0.05)
        del rref
        gc.collect()
        assert tables()["users"] == 1
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: tables()["users"] == 0)
    assert rpc.rpc_sync("worker1", fetch_kept) == 2


class NeverHad:
    """Claims to be a reference that was never here."""

    def __reduce__(self) -> Any:
        return come_home, (RRefId(12345),)


def test_a_call_that_was_given_up_and_lost_counts_no_reference(clean: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not sent again, since nobody waits for it: what it would have brought has to be taken back."""
    rref = rpc.remote("worker2", add, (1, 1))
    rref.to_here()
    send = Outgoing.send_encoded

    def lose(connection: Any, frame: bytes, deadline: float | None = None, hold: bool = False) -> None:
        if b"lost" not in frame:
            send(connection, frame, deadline, hold)

    monkeypatch.setattr(Outgoing, "send_encoded", lose)
    with pytest.raises(RpcTimeout):
        rpc.rpc_sync("worker1", gated, ("lost", rref), timeout=0.1)
    monkeypatch.undo()
    assert tables()["children"] == 1
    require_agent().link(require_agent().find("worker1")).current.stream.abort()
    eventually(lambda: rpc.rpc_sync("worker1", add, (1, 1)) == 2)
    eventually(lambda: tables()["children"] == 0)
    assert rref.to_here() == 2


ran: list[int] = []


def called_first(x: int) -> list[int]:
    ran.append(x)
    return ran


def test_a_call_that_was_given_up_and_lost_has_defined_its_function(
    clean: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later calls have its number alone."""
    with monkeypatch.context() as patch:
        patch.setattr(Outgoing, "send_encoded", lambda *_, **__: None)
        with pytest.raises(RpcTimeout):
            rpc.rpc_sync("worker1", called_first, (1,), timeout=0.1)
    require_agent().link(require_agent().find("worker1")).current.stream.abort()
    assert rpc.rpc_sync("worker1", called_first, (2,)) == [2]


def test_a_call_home_that_could_not_be_sent_lets_go(clean: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    rref = rpc.remote("worker1", add, (1, 1))
    rref.to_here()

    def refuse(*_: Any) -> None:
        raise TimeoutError("the peer does not read what is sent to it")  # as nothing was written, more can follow

    monkeypatch.setattr(Outgoing, "send_encoded", refuse)
    with pytest.raises(RpcTimeout, match="has not taken in all"):
        rpc.rpc_sync("worker1", keep, (rref,), timeout=0.1)
    monkeypatch.undo()
    pending = require_agent().link(require_agent().find("worker1")).pending
    assert not pending.given_up and rpc.rpc_sync("worker1", add, (1, 1)) == 2
    assert pending.lowest() == pending.asked + 1, "else no reply is ever known to have arrived"


def test_a_reference_that_was_never_there_does_not_come_home(clean: Cluster) -> None:
    with pytest.raises(RRefError, match=r"'worker1' keeps no value .* for worker 'worker0' any more"):
        rpc.rpc_sync("worker1", local, (NeverHad(),))


def test_returned_from_a_call(clean: Cluster) -> None:
    assert rpc.rpc_sync("worker1", make_and_return, ("worker2", 5)).to_here() == 5
    assert rpc.rpc_sync("worker1", make_and_return, ("worker1", 6)).to_here() == 6
    assert rpc.rpc_sync("worker1", make_and_return, ("worker0", 7)).local_value() == 7
    assert rpc.rpc_async("worker1", hold_here, (8,)).wait().to_here() == 8


def test_one_reference_twice_in_a_message_is_one(clean: Cluster) -> None:
    rref = rpc.remote("worker1", add, (1, 1))
    assert rpc.rpc_sync("worker2", same, (rref, rref))


def test_a_received_reference_is_confirmed(clean: Cluster) -> None:
    rref = rpc.remote("worker1", add, (1, 1))
    assert rpc.rpc_sync("worker2", confirmed, (rref,))
    assert rpc.remote("worker2", confirmed, (rref,)).to_here()


def test_chains(clean: Cluster) -> None:
    value: Any = forward_chain(["worker1", "worker2", "worker0"] * 3, rpc.remote("worker1", add, (20, 1)))
    while isinstance(value, list):
        value = value[0].to_here()
    assert value == 21


def test_the_value_outlives_its_first_reference(clean: Cluster) -> None:
    rref = rpc.remote("worker1", add, (1, 1))
    rpc.rpc_sync("worker2", keep, (rref,))
    del rref
    eventually(lambda: rpc.rpc_sync("worker0", tables)["users"] == 0)
    assert rpc.rpc_sync("worker2", fetch_kept) == 2


def test_a_value_is_forgotten_with_its_last_reference(clean: Cluster) -> None:
    rref = rpc.remote("worker1", add, (1, 1))
    rref.to_here()
    assert rpc.rpc_sync("worker1", tables)["values"] == 1
    del rref
    eventually(lambda: rpc.rpc_sync("worker1", tables)["values"] == 0)


def test_a_reference_in_a_call_that_cannot_be_sent_is_taken_back(clean: Cluster) -> None:
    mine, theirs = rpc.RRef(1), rpc.remote("worker1", add, (1, 1))
    for rref in (mine, theirs):
        with pytest.raises(SerializationError, match="not this one"):
            rpc.rpc_sync("worker2", same, (rref, Unsendable()))
        with pytest.raises(SerializationError, match="not this one"):
            rpc.remote("worker2", same, (rref, Unsendable()))
    # The fixture sees that nothing is left.


def test_a_reference_in_a_reply_that_came_too_late_is_let_go(clean: Cluster) -> None:
    held = rpc.rpc_sync("worker1", hold_here, (1,))
    rpc.rpc_sync("worker1", keep, (held,))
    with pytest.raises(RpcTimeout):
        rpc.rpc_sync("worker1", gated_hold, ("late",), timeout=0.01)
    rpc.rpc_sync("worker1", open_gate, ("late",))


class NotHere:
    """Can be sent, but not be put together again where it arrives."""

    def __init__(self, inside: Any = None) -> None:
        self.inside = inside

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise LookupError("no room for this one")


def hold_and_not_here() -> Any:
    return rpc.RRef(1), NotHere(rpc.RRef(2)), {"more": [rpc.RRef(3)]}


def remote_to_here(*call: Any) -> Any:
    return rpc.remote(*call).to_here()


@pytest.mark.parametrize("make", [rpc.rpc_sync, remote_to_here])
def test_references_in_a_message_that_cannot_be_unpacked_are_let_go(clean: Cluster, make: Any) -> None:
    mine, theirs, inside = rpc.RRef(1), rpc.remote("worker1", add, (1, 1)), rpc.remote("worker2", add, (1, 1))
    for rref in (mine, theirs):
        for args in ((rref, NotHere(inside)), (NotHere(inside), rref), ({"a": rref}, [NotHere()], {rref, inside})):
            with pytest.raises(SerializationError, match="no room for this one"):
                make("worker2", same, args)
    # The fixture sees that nothing is left.


def test_references_in_a_reply_that_cannot_be_unpacked_are_let_go(clean: Cluster) -> None:
    with pytest.raises(SerializationError, match="no room for this one"):
        rpc.rpc_sync("worker1", hold_and_not_here)


def test_references_for_a_function_that_is_not_there_are_let_go(clean: Cluster) -> None:
    mine, theirs = rpc.RRef(1), rpc.remote("worker1", add, (1, 1))
    rpc.rpc_sync("worker2", hide, ("hidden",))
    try:
        for rref in (mine, theirs):
            with pytest.raises(SerializationError, match="hidden"):
                rpc.rpc_sync("worker2", hidden, (rref, torch.ones(3)))
    finally:
        rpc.rpc_sync("worker2", show, ("hidden",))


def hidden(*args: Any) -> None:
    """Is taken away from a worker."""


def hide(name: str) -> None:
    _hidden[name] = globals().pop(name)


def show(name: str) -> None:
    globals()[name] = _hidden.pop(name)


_hidden: dict[str, Any] = {}


def gated_hold(name: str) -> "rpc.RRef[int]":
    gated(name, None)
    return rpc.RRef(3)


def test_pickling_outside_a_call(clean: Cluster) -> None:
    rref = rpc.RRef(1)
    with pytest.raises(
        RuntimeError, match="Can not pickle rref in python pickler, rref can only be pickled when using RPC"
    ):
        pickle.dumps(rref)
    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
        torch.save(rref, io.BytesIO())


# --- methods ---


@pytest.mark.parametrize("owner", ["worker1", "worker0"])
def test_proxies(clean: Cluster, owner: str) -> None:
    counter = rpc.remote(owner, Counter, (10,))
    assert counter.rpc_sync().add(1) == 11
    assert counter.rpc_async().add(by=1).wait() == 12
    assert counter.remote().add(1).to_here() == 13
    assert counter.rpc_sync().double(4) == 8
    assert counter.rpc_sync().kind() == "Counter"
    assert counter.rpc_sync().add_elsewhere("worker2", 4) == 21
    assert counter.rpc_async().add_elsewhere("worker2", 4).wait() == 21
    assert counter.rpc_sync().add_later(2) == 15


@pytest.mark.parametrize("owner", ["worker1", "worker0"])
def test_methods_of_pythons_own_by_name(clean: Cluster, owner: str) -> None:
    table, layer = rpc.remote(owner, dict), rpc.remote(owner, torch.nn.Linear, (3, 2))
    table.rpc_sync().__setitem__("key", 3)
    assert table.rpc_sync().__len__() == 1 and table.rpc_async().__contains__("key").wait()
    assert table.remote().__getitem__("key").to_here() == 3
    assert layer.rpc_sync().__call__(torch.ones(1, 3)).shape == (1, 2)
    with pytest.raises(AttributeError, match="'__array__' is none that is called by name; call a function"):
        layer.rpc_sync().__array__()


def test_proxies_of_what_does_not_exist(clean: Cluster) -> None:
    counter = rpc.remote("worker1", Counter, (10,))
    for call in (
        lambda: counter.rpc_sync().nothing(),
        lambda: counter.rpc_async().nothing().wait(),
        lambda: counter.remote().nothing(),
    ):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            call()


def test_proxies_time_out_while_the_value_is_made(clean: Cluster) -> None:
    rref = rpc.remote("worker1", gated, ("proxy", 7))
    for call in (
        lambda: rref.rpc_sync(timeout=0.01).bit_length(),
        lambda: rref.rpc_async(timeout=0.01).bit_length().wait(),
        lambda: rref.remote(timeout=0.01).bit_length(),
    ):
        with pytest.raises(RpcTimeout, match="RPC ran for more than"):
            call()
    rpc.rpc_sync("worker1", open_gate, ("proxy",))
    assert rref.rpc_sync().bit_length() == 3


def test_types(clean: Cluster) -> None:
    rref = rpc.remote("worker1", Counter, (1,))
    assert rref._get_type() is Counter
    assert rref._get_type(blocking=False) is rref._get_type(blocking=False)
    assert rref._get_type(blocking=False).wait() is Counter
    assert rpc.RRef(torch.ones(1))._get_type() is torch.Tensor
    with pytest.raises(ValueError, match="no type"):
        rpc.remote("worker1", fail, ("no type",))._get_type()


def test_a_type_that_could_not_be_told_is_asked_for_again(clean: Cluster) -> None:
    rref = rpc.remote("worker1", Counter, (1,))
    failed: Future[type] = Future()
    failed.set_exception(RpcTimeout("as before"))
    rref._handle.type = failed
    assert rref._get_type() is Counter
    with pytest.raises(RpcTimeout, match="as before"):
        failed.wait()


# --- what fails ---


@pytest.mark.parametrize("owner", ["worker1", "worker0"])
def test_a_creation_that_fails_is_a_value_too(clean: Cluster, owner: str) -> None:
    rref = rpc.remote(owner, fail, ("as expected",))
    with pytest.raises(ValueError, match=rf"as expected\nOn worker '{owner}' \(id {owner[-1]}\)"):
        rref.to_here()
    with pytest.raises(ValueError, match="as expected"):
        rpc.rpc_sync("worker2", fetch, (rref,))
    with pytest.raises(ValueError, match="as expected"):
        rpc.rpc_sync(owner, local, (rref,))
    with pytest.raises(ValueError, match="as expected"):
        rref.rpc_sync().anything()
    rref._get_future().wait()  # the call has run


def test_arguments_that_cannot_be_used(clean: Cluster) -> None:
    with pytest.raises(TypeError, match="callable"):
        rpc.remote("worker1", 3)
    with pytest.raises(ValueError, match="nobody"):
        rpc.remote("nobody", add)
    with pytest.raises(RuntimeError, match="type_hint"):
        rpc.RRef(1, type_hint=int)


@pytest.mark.parametrize("owner", ["worker1", "worker0"])
def test_a_creation_that_takes_too_long(clean: Cluster, owner: str) -> None:
    name = f"too long on {owner}"
    rref = rpc.remote(owner, gated, (name, 1), timeout=0.01)
    with pytest.raises(RpcTimeout, match="RPC ran for more than"):
        rref._get_future().wait()
    with pytest.raises(RuntimeError, match="RRef creation"):
        rref.to_here()
    with pytest.raises(RuntimeError, match="RRef creation"):
        rpc.rpc_async("worker2", fetch, (rref,))
    rpc.rpc_sync(owner, open_gate, (name,))


def test_backward_without_a_context(clean: Cluster) -> None:
    leaf = torch.ones(3, requires_grad=True)
    rpc.RRef((2 * leaf).sum()).backward()
    assert torch.equal(leaf.grad, torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match=r"RRef should contain a tensor for \.backward\(\)"):
        rpc.RRef("text").backward()
    with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id' to be specified"):
        rpc.remote("worker1", add, (1, 1)).backward()


def test_counts(clean: Cluster) -> None:
    references = rrefs_of(require_agent())
    mine = rpc.RRef(1)
    assert debug_info(references)["num_owner_rrefs"] == "0"  # known to nobody else
    rpc.rpc_sync("worker1", keep, (mine,))
    expected = {"num_owner_rrefs": "1", "num_pending_users": "0", "num_forks": "1", "num_pending_futures": "0"}
    eventually(lambda: debug_info(references) == expected)


# --- how many ---


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_grows(clean: Cluster, request: pytest.FixtureRequest) -> None:
    total = 100_000 if request.config.getoption("--hypothesis-profile") == "long" else 2_000
    for start in range(0, total, 100):
        made = [rpc.remote(f"worker{1 + n % 2}", add, (n, 1)) for n in range(start, start + 100)]
        rpc.rpc_sync("worker2", keep, (made,))
        assert rpc.rpc_sync("worker1", sum_of, (made,)) == sum(range(start + 1, start + 101))
        rpc.rpc_sync("worker2", let_go)
    # The fixture sees that all tables are empty.


def sum_of(rrefs: "list[rpc.RRef[int]]") -> int:
    return sum(rref.to_here() for rref in rrefs)
