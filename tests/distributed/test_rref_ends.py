"""The ends of references on real workers: deaths, shutdown, and what is left behind."""

import gc
import logging
from typing import Any

import pytest

from telegrad import rpc
from telegrad.errors import RpcTimeout, SerializationError, WorkerDied
from telegrad.rpc.current import require_agent
from telegrad.rpc.torch_modes import stand_in
from telegrad.rref import RRefContext
from tests.cluster import cluster, process, serve
from tests.distributed.test_rref import (
    Counter,
    _kept,
    add,
    all_empty,
    eventually,
    fetch,
    fetch_kept,
    gated,
    keep,
    let_go,
    tables,
)


def test_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference says where its value is, and what if that is known; in the stand-in it speaks as torch does."""
    with cluster(2):
        first, second = rpc.RRef(0), rpc.remote("worker1", add, (1, 1))
        assert str(first) == "<RRef 0.0 of 'worker0': int>"
        assert str(second) == "<RRef 0.1 of 'worker1': made by add()>"
        assert second.to_here() == 2
        assert str(second) == "<RRef 0.1 of 'worker1': int>"
        assert str(rpc.remote("worker1", list)).endswith(" of 'worker1': list>")  # a class tells
        assert second.rpc_sync().bit_length() == 2
        assert str(second) == "<RRef 0.1 of 'worker1': int>"
        assert "bit_length" in dir(second.rpc_sync())
        assert "__add__" not in dir(second.rpc_sync())
        monkeypatch.setattr(stand_in, "in_force", stand_in.TORCHS)
        assert str(first) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))"
        assert str(second) == (
            "UserRRef(RRefId = GloballyUniqueId(created_on=0, local_id=1), "
            "ForkId = GloballyUniqueId(created_on=0, local_id=2))"
        )


# --- who dies ---


@pytest.mark.slow
def test_the_owner_dies(request: pytest.FixtureRequest) -> None:
    with cluster(3) as job:
        # No error on the way may hold the frames that hold it: a handle ends when it is let go, not at a collection.
        rpc.rpc_sync("worker2", gc.disable)
        request.addfinalizer(gc.enable)
        gc.disable()
        rref, slow = rpc.remote("worker1", add, (1, 1)), rpc.remote("worker1", gated, ("never", 1))
        rpc.rpc_sync("worker2", keep, (rref,))
        incarnation = require_agent().find("worker1").incarnation
        job.kill("worker1")
        for use in (rref.to_here, slow.to_here, rref.rpc_sync().bit_length):
            with pytest.raises(WorkerDied, match="worker1"):
                use()
        with pytest.raises(WorkerDied, match="worker1"):
            rpc.rpc_sync("worker2", fetch_kept)
        with pytest.raises(WorkerDied, match="worker1") as sent:
            rpc.rpc_sync("worker2", keep, (rref,))
        assert sent.value.worker == "worker1" and isinstance(sent.value, SerializationError)
        assert sent.value.incarnation == incarnation, "it says which one: another may have been started since"
        with pytest.raises(WorkerDied, match="worker1") as sent_on:  # comes home as what it is
            rpc.rpc_sync("worker2", share_kept, ("worker0",))
        assert sent_on.value.worker == "worker1" and isinstance(sent_on.value, SerializationError)
        assert sent_on.value.incarnation == incarnation
        del sent, sent_on
        rpc.rpc_sync("worker2", let_go)
        del rref, slow, use
        eventually(lambda: all_empty(["worker0", "worker2"]))


@pytest.mark.slow
def test_the_owner_dies_before_it_answers_a_call_home_that_was_given_up() -> None:
    with cluster(2) as job:
        rref = rpc.remote("worker1", add, (1, 1))
        assert rref.to_here() == 2
        with pytest.raises(RpcTimeout):
            rpc.rpc_sync("worker1", gated, ("never", rref), timeout=0.05)
        job.kill("worker1")
        with pytest.raises(WorkerDied, match="worker1"):
            rref.to_here()
        del rref
        gc.collect()  # errors that were caught hold this frame
        eventually(lambda: all_empty(["worker0"]))


@pytest.mark.slow
def test_a_future_that_failed_over_a_lost_reference_keeps_it_no_longer() -> None:
    with cluster(3) as job:
        rref = rpc.remote("worker1", add, (1, 1))
        assert rref.to_here() == 2
        owner = require_agent().find("worker1")
        job.kill("worker1")
        eventually(lambda: require_agent().is_dead(owner))
        future = rpc.rpc_async("worker2", keep, (rref,))
        with pytest.raises(WorkerDied, match="worker1"):
            future.wait()
        del future, rref
        gc.collect()  # errors that were caught hold this frame
        eventually(lambda: all_empty(["worker0"]))


@pytest.mark.slow
def test_a_user_dies() -> None:
    with cluster(4) as job:
        shared, only = rpc.RRef("shared"), rpc.RRef("only")
        rpc.rpc_sync("worker1", keep, ((shared, only),))
        rpc.rpc_sync("worker1", share_kept, ("worker2",))
        del shared, only
        eventually(lambda: rpc.rpc_sync("worker0", tables)["forks"] == 4)
        job.kill("worker1")
        # What worker2 has from the dead is kept; what only the dead had is forgotten.
        eventually(lambda: rpc.rpc_sync("worker0", tables)["forks"] == 2)
        assert rpc.rpc_sync("worker2", fetch_first_kept) == "shared"
        rpc.rpc_sync("worker2", let_go)
        eventually(lambda: all_empty(["worker0", "worker2", "worker3"]))


@pytest.mark.slow
def test_a_worker_is_started_again() -> None:
    with cluster(3) as job:
        mine = rpc.RRef("mine")
        rpc.rpc_sync("worker1", keep, (mine,))
        rpc.rpc_sync("worker2", keep, (rpc.remote("worker1", add, (1, 1)),))
        theirs = rpc.remote("worker1", add, (2, 2))
        before = rpc.rpc_sync("worker1", make_one)
        job.kill("worker1")
        eventually(lambda: rpc.rpc_sync("worker0", tables)["forks"] == 0)
        job.processes[0] = process(serve, "worker1", 1, 3, job.meeting, {})
        rpc.rpc_sync("worker1", add, (1, 1), retries=1, timeout=90)
        after = rpc.rpc_sync("worker1", make_one)
        assert str(after).split(", ForkId")[0] == str(before).split(", ForkId")[0]  # both count from 0
        assert after.to_here() == "one"
        for lost in (theirs, before):
            with pytest.raises(WorkerDied, match="worker1"):
                lost.to_here()
        with pytest.raises(WorkerDied, match="worker1"):
            rpc.rpc_sync("worker2", fetch_kept)
        assert rpc.rpc_sync("worker1", fetch, (mine,)) == "mine"
        assert rpc.rpc_sync("worker2", fetch, (after,)) == "one"
        rpc.rpc_sync("worker2", let_go)
        del mine, theirs, before, after, lost
        gc.collect()  # errors that were caught hold this frame
        eventually(lambda: all_empty(job.names))


def make_one() -> "rpc.RRef[str]":
    return rpc.RRef("one")


def share_kept(to: str) -> None:
    rpc.rpc_sync(to, keep, (_kept[-1],))


def fetch_first_kept() -> Any:
    return _kept[-1][0].to_here(60)


# --- the end ---


def test_a_reference_after_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "telegrad.rref"), cluster(2):
        rref, mine = rpc.remote("worker1", Counter, (1,)), rpc.RRef(5)
        rref.to_here()
    assert "worker 'worker0' shuts down while it holds references to worker1: 1 Counter" in caplog.text
    with pytest.raises(RuntimeError, match=r"Cannot call to_here\(\) on it after deletion."):
        rref.to_here()
    assert mine.local_value() == 5


@pytest.mark.slow
def test_values_still_named_at_the_end_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RRefContext, "ignore_leaks", False)
    monkeypatch.setattr("telegrad.rref.closing._PATIENCE", 0.2)
    with pytest.raises(RuntimeError, match=r"Leaking RRef: worker 'worker0'.*a int, by worker1"):
        leave_a_value_behind()


def leave_a_value_behind() -> None:
    with cluster(2):
        mine = rpc.RRef(5)
        rpc.rpc_sync("worker1", keep_and_never_release, (mine,))


def keep_and_never_release(rref: Any) -> None:
    _kept.append(rref)
    from telegrad.rref import closing

    closing.release_handles = lambda _: None
