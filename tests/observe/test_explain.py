"""Why a job waits: the pure core over reports, then real workers that hang."""

import os
import signal
import threading
import time

import pytest
import torch

from telegrad import autograd, observe, rpc
from telegrad.observe.threads import Activity, Asked, InService, PassState, Report
from telegrad.observe.waiting import explain_reports
from tests.cluster import cluster
from tests.waiting import wait_until


def report(number, threads=(), asked=(), served=(), passes=(), exhausted=False):
    return Report(f"w{number}", number, number, exhausted, list(threads), list(asked), list(served), list(passes), [])


def test_a_chain_ends_at_the_worker_that_runs():
    found = explain_reports(
        [
            report(
                0,
                [Activity("Main", waits_for=(0, 1, 1), where="a.py:1, in f")],
                [Asked((0, 1, 1), 1, "g() on w1", 5.0)],
            ),
            report(
                1,
                [Activity("io", serves=(0, 1, 1), waits_for=(1, 1, 9))],
                [Asked((1, 1, 9), 2, "h() on w2", 4.0)],
                [InService((0, 1, 1), "w0", "PythonCall", 5.0)],
            ),
            report(
                2,
                [Activity("io", serves=(1, 1, 9), where="b.py:7, in h")],
                [],
                [InService((1, 1, 9), "w1", "PythonCall", 4.0)],
            ),
        ]
    )
    assert found.deadlocks == []
    assert found.paragraphs == [
        "w0 (Main) has waited 5.0 s for g() on w1 at a.py:1, in f. w2 could end it: io runs at b.py:7, in h.",
        "w1 (io) has waited 4.0 s for h() on w2. w2 could end it: io runs at b.py:7, in h.",
    ]
    assert [(edge.worker, edge.waits_for) for edge in found.edges] == [("w0", "w1"), ("w1", "w2")]


def test_threads_that_wait_for_each_other_are_a_deadlock():
    a, b = (0, 1, 1), (1, 1, 1)
    found = explain_reports(
        [
            report(
                0, [Activity("io", serves=b, waits_for=a)], [Asked(a, 1, "g()", 5.0)], [InService(b, "w1", "C", 5.0)]
            ),
            report(
                1, [Activity("io", serves=a, waits_for=b)], [Asked(b, 0, "f()", 5.0)], [InService(a, "w0", "C", 5.0)]
            ),
        ]
    )
    assert found.deadlocks == ["w0 waits for g(); w1 waits for f(); and so on, round in a circle"]
    assert all(edge.stuck for edge in found.edges)


@pytest.mark.parametrize("exhausted", [True, False])
def test_a_request_that_no_thread_is_left_for_is_stuck(exhausted):
    first, back = (0, 1, 1), (1, 1, 1)
    found = explain_reports(
        [
            report(0, [Activity("Main", waits_for=first)], [Asked(first, 1, "g()", 5.0)], exhausted=exhausted),
            report(
                1,
                [Activity("io", serves=first, waits_for=back)],
                [Asked(back, 0, "f()", 5.0)],
                [InService(first, "w0", "C", 1)],
            ),
        ]
    )
    assert bool(found.deadlocks) == exhausted


def test_parts_of_a_pass_that_wait_for_each_other_are_a_deadlock_unless_one_runs():
    parts = [report(0, passes=[PassState(7, 0, [1])]), report(1, passes=[PassState(7, 0, [0])])]
    assert explain_reports(parts).deadlocks == [
        "w0 waits for gradients of w1; w1 waits for gradients of w0; and so on, round in a circle"
    ]
    parts[1].threads.append(Activity("io", runs_pass=7, where="hook.py:3, in hook"))
    assert explain_reports(parts).deadlocks == []


def test_a_silent_worker_is_named():
    assert "w5 did not answer" in explain_reports([report(0)], ["w5"]).paragraphs[0]


# --- real workers ---

gate = threading.Event()
lock = threading.Lock()


def stand_still():
    gate.wait(150)


def open_gate():
    gate.set()


def close_gate():
    gate.clear()


def through(name):
    return rpc.rpc_sync(name, stand_still, timeout=150)


def hold_and_call(name):
    lock.acquire()
    try:
        return rpc.rpc_sync(name, call_back, args=("worker1",), timeout=150)
    finally:
        if lock.locked():
            lock.release()


def call_back(name):
    return rpc.rpc_sync(name, want_lock, timeout=150)


def break_the_circle():
    lock.release()


def want_lock():
    with lock:
        return True


def slow_hook(gradient):
    gate.wait(150)
    return gradient


def with_hook(x):
    y = x * 2
    y.register_hook(slow_hook)
    return y


@pytest.fixture(scope="module")
def job():
    with cluster(3) as made:
        yield made


@pytest.mark.slow
def test_a_call_that_hangs_is_explained_down_to_the_users_line(job, capfd):
    waiting = threading.Thread(target=through, args=("worker2",), name="waiting")
    waiting.start()
    call = rpc.rpc_async("worker1", through, args=("worker2",), timeout=150)
    wait_until(lambda: observe.explain().count("in stand_still") >= 2)
    text = observe.explain()
    assert "worker0 (waiting) has waited" in text
    assert "worker1 (telegrad-worker1-io) has waited" in text
    assert "tests/observe/test_explain.py" in text and "in through" in text and "in stand_still" in text
    os.kill(os.getpid(), signal.SIGUSR1)
    printed = ""
    deadline = time.monotonic() + 40
    while "worker2 could end it" not in printed and time.monotonic() < deadline:
        printed += capfd.readouterr().err
        time.sleep(0.01)
    assert "worker2 could end it" in printed
    rpc.rpc_sync("worker2", open_gate)
    waiting.join()
    call.wait()
    wait_until(lambda: "stand_still" not in observe.explain())  # the workers wait at the barrier of their shutdown


@pytest.mark.slow
def test_a_circle_through_a_lock_is_named(job):
    call = rpc.rpc_async("worker1", hold_and_call, args=("worker2",), timeout=150)
    text = ""

    def is_named():
        nonlocal text
        text = observe.explain()
        return "DEADLOCK" in text

    wait_until(is_named)
    lines = [part for part in text.split("\n\n") if part.startswith("DEADLOCK")]
    assert len(lines) == 1, lines
    (line,) = lines
    assert "worker1 waits for call_back()" in line
    assert "worker2 waits for want_lock()" in line
    assert "in want_lock" in line and "most likely for a lock" in line
    rpc.rpc_sync("worker1", break_the_circle)
    assert call.wait() is True


@pytest.mark.slow
def test_a_pass_that_is_stuck_names_who_is_waited_for(job):
    rpc.rpc_sync("worker1", close_gate)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", with_hook, args=(torch.ones(1, requires_grad=True),))
        passed = autograd.backward_async(context_id, [y.sum()], timeout=150)
        wait_until(lambda: "in slow_hook" in observe.explain())
        text = observe.explain()
        assert f"backward pass of context {context_id}" in text
        assert "worker1" in text
        rpc.rpc_sync("worker1", open_gate)
        passed.wait()
