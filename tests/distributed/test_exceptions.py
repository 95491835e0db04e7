"""Exceptions on their way home: own type, attributes, the worker's name, both stacks; and futures that fail unseen."""

import asyncio
import functools
import gc
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import RemoteError, SerializationError, TelegradError
from tests.cluster import Cluster
from tests.waiting import wait_until


class Told(Exception):
    """Rebuilt from its own arguments, with attributes beside them."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason


class Closed(Exception):
    """Cannot be pickled: it holds a lock."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Stubborn(Exception):
    """Its arguments are not those of its class, so pickle alone could not rebuild it."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.one = one


class Undecodable(UnicodeDecodeError):
    """A builtin that keeps its fields outside `args` and `__dict__`."""


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("not even its text can be had")


def fail(error: BaseException) -> None:
    raise error


def fail_closed() -> None:
    raise Closed("cannot travel")


def fail_stubborn() -> None:
    raise Stubborn(1, 2)


def fail_mute() -> None:
    raise Mute


def fail_with_a_cause() -> None:
    try:
        raise KeyError("the first")
    except KeyError as first:
        raise ValueError("the second") from first


def fail_told() -> None:
    raise Told(7, "seven")


def fail_with_tensor() -> None:
    raise Told(7, torch.ones(2))


def leave() -> None:
    sys.exit(3)


def interrupt() -> None:
    raise KeyboardInterrupt


def relay(to: str) -> None:
    rpc.rpc_sync(to, fail_told)


def unsendable() -> threading.Lock:
    return threading.Lock()


async def fail_later() -> None:
    raise Told(8, "eight")


def local_line(to: str) -> None:
    rpc.rpc_sync(to, fail_with_a_cause)


def until_done(future: rpc.Future[None]) -> None:
    """Wait without looking at the error."""
    deadline = time.monotonic() + 60
    while not future.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("kind", [ValueError, KeyError, OSError, ZeroDivisionError, AttributeError, RuntimeError])
def test_builtin_types(pair: Cluster, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        rpc.rpc_sync("worker1", fail, (kind("what happened"),))
    shown = "".join(traceback.format_exception(caught.value))
    assert "what happened" in shown
    assert "worker1" in shown
    assert "in fail" in shown  # the remote line
    assert "in test_builtin_types" in shown  # the local one


def test_the_text_names_the_worker_and_holds_the_remote_traceback(pair: Cluster) -> None:
    with pytest.raises(ValueError, match=r"(?s)the second.*worker1.*KeyError: 'the first'.*fail_with_a_cause"):
        rpc.rpc_sync("worker1", fail_with_a_cause)


def test_causes_chain_and_the_local_line_is_visible(pair: Cluster) -> None:
    with pytest.raises(ValueError, match="second") as caught:
        local_line("worker1")
    assert str(caught.value) == "the second"  # as it was raised: programs compare texts
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.index("KeyError: 'the first'") < shown.index("which led to:")
    assert "in local_line" in shown


def hop(through: list[str]) -> None:
    if not through:
        raise Stubborn(1, 2)
    rpc.rpc_sync(through[0], hop, (through[1:],))


@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_a_traceback_shows_the_frames_of_each_worker_once(pair: Cluster, hops: int) -> None:
    with pytest.raises(Stubborn) as caught:
        hop([f"worker{(n + 1) % 2}" for n in range(hops)])
    shown = "".join(traceback.format_exception(caught.value)).splitlines()
    sections = [line for line in shown if line.startswith("On worker")]
    assert sections == [f"On worker 'worker{(n + 1) % 2}' (id {(n + 1) % 2}):" for n in range(hops)]
    assert len(shown) <= 25 + 12 * (hops - 1)
    assert sum("raise Stubborn(1, 2)" in line for line in shown) == 1
    assert "raise Stubborn(1, 2)" in shown[-1]  # the innermost is last
    assert (caught.value.one, str(caught.value)) == (1, "1 and 2")


def deep(depth: int) -> None:
    if depth == 0:
        raise Told(0, "deep down")
    deep(depth - 1)


def fail_in_backward(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda _: fail_stubborn())
    return y


def yield_and_fail() -> Iterator[int]:
    yield 1
    fail_stubborn()


class Failing:
    def method(self) -> None:
        fail_stubborn()


def in_backward() -> None:
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", fail_in_backward, (torch.ones(2, requires_grad=True),))
        autograd.backward(context_id, [y.sum()])


def awaited() -> None:
    async def main() -> None:
        await rpc.rpc_async("worker1", fail_stubborn)

    asyncio.run(main())


def streamed_to_a_coroutine() -> None:
    async def main() -> None:
        async for _ in rpc.stream("worker1", yield_and_fail):
            pass

    asyncio.run(main())


WAYS_HOME: dict[str, Callable[[], object]] = {
    "rpc_sync": lambda: rpc.rpc_sync("worker1", fail_stubborn),
    "wait": lambda: rpc.rpc_async("worker1", fail_stubborn).wait(),
    "await": awaited,
    "to_here": lambda: rpc.remote("worker1", fail_stubborn).to_here(),
    "a method": lambda: rpc.remote("worker1", Failing).rpc_sync().method(),
    "a method's future": lambda: rpc.remote("worker1", Failing).rpc_async().method().wait(),
    "gather": lambda: rpc.gather(fail_stubborn, workers=["worker1"]),
    "map": lambda: list(rpc.map(lambda _: fail_stubborn(), [1])),
    "stream": lambda: list(rpc.stream("worker1", yield_and_fail)),
    "async for": streamed_to_a_coroutine,
    "backward": in_backward,
}


@pytest.mark.parametrize("way", WAYS_HOME)
def test_each_way_home_shows_the_frames_of_the_user(pair: Cluster, way: str) -> None:
    with pytest.raises(Stubborn, match="1 and 2") as caught:
        WAYS_HOME[way]()
    shown = "".join(traceback.format_exception(caught.value))
    assert len(shown.splitlines()) <= 25
    assert os.path.join("telegrad", "") + "rpc" not in shown
    assert f"in {fail_stubborn.__name__}" in shown


def test_an_error_that_is_raised_again_does_not_grow(pair: Cluster) -> None:
    future = rpc.rpc_async("worker1", fail_stubborn)
    shown = []
    for _ in range(3):
        with pytest.raises(Stubborn) as caught:
            future.wait()
        shown.append(len(traceback.format_exception(caught.value)))
    assert shown[0] == shown[1] == shown[2]


def test_a_value_that_could_not_be_made_says_so_each_time(pair: Cluster) -> None:
    failed = rpc.remote("worker1", fail_stubborn)
    for _ in range(3):
        with pytest.raises(Stubborn, match="1 and 2"):
            failed.to_here()
    with pytest.raises(Stubborn, match="1 and 2"):
        failed.rpc_sync().method()


def fail_in_a_group() -> None:
    failed = []
    for each in (fail_told, fail_stubborn):
        try:
            each()
        except Exception as error:
            failed.append(error)
    raise ExceptionGroup("both", failed)


def test_groups_keep_what_they_hold(pair: Cluster) -> None:
    told, stubborn = [], []
    try:
        rpc.rpc_sync("worker1", fail_in_a_group)
    except* Told as group:
        told = [(error.code, error.reason) for error in group.exceptions]  # type: ignore[union-attr]
    except* Stubborn as group:
        stubborn = [error.one for error in group.exceptions]  # type: ignore[union-attr]
        shown = "".join(traceback.format_exception(group))
    assert told == [(7, "seven")]
    assert stubborn == [1]
    assert "of which Stubborn: 1 and 2" in shown
    assert "in fail_stubborn" in shown


def test_many_frames_are_counted(pair: Cluster) -> None:
    with pytest.raises(Told) as caught:
        rpc.rpc_sync("worker1", deep, (30,))
    note = caught.value.__notes__[-1]
    assert "(26 more frames; TELEGRAD_TRACEBACK=full shows all)" in note
    assert len(note.splitlines()) <= 12


def show_all_frames(yes: bool) -> None:
    if yes:
        os.environ["TELEGRAD_TRACEBACK"] = "full"
    else:
        del os.environ["TELEGRAD_TRACEBACK"]


def test_all_frames_on_request(pair: Cluster) -> None:
    rpc.rpc_sync("worker1", show_all_frames, (True,))
    try:
        with pytest.raises(Told) as caught:
            rpc.rpc_sync("worker1", relay, ("worker0",))
    finally:
        rpc.rpc_sync("worker1", show_all_frames, (False,))
    assert "in rpc_sync" in caught.value.__notes__[-1]


def fail_with_a_note() -> None:
    error = ValueError("noted")
    error.add_note("said by the user")
    raise error


def test_notes_of_the_user_stay(pair: Cluster) -> None:
    with pytest.raises(ValueError, match="noted") as caught:
        rpc.rpc_sync("worker1", fail_with_a_note)
    assert caught.value.__notes__[0] == "said by the user"


def fail_undecodable() -> None:
    raise Undecodable("utf-8", b"\xff", 0, 1, "no such start")


def test_fields_of_builtins_stay(pair: Cluster) -> None:
    with pytest.raises(Undecodable) as caught:
        rpc.rpc_sync("worker1", fail_undecodable)
    assert (caught.value.encoding, caught.value.reason) == ("utf-8", "no such start")


@pytest.mark.parametrize("how", ["rpc_sync", "wait", "value"])
def test_own_types_keep_their_attributes(pair: Cluster, how: str) -> None:
    if how == "rpc_sync":
        call = functools.partial(rpc.rpc_sync, "worker1", fail_told)
    else:
        future = rpc.rpc_async("worker1", fail_told)
        until_done(future)
        call = getattr(future, how)
    with pytest.raises(Told) as caught:
        call()
    assert (caught.value.code, caught.value.reason, caught.value.args) == (7, "seven", (7, "seven"))
    assert "worker1" in "".join(traceback.format_exception(caught.value))


def test_tensors_in_exceptions(pair: Cluster) -> None:
    with pytest.raises(Told) as caught:
        rpc.rpc_sync("worker1", fail_with_tensor)
    assert torch.equal(caught.value.reason, torch.ones(2))


@pytest.mark.parametrize(
    ("func", "name"),
    [(fail_closed, "Closed"), (leave, "SystemExit"), (interrupt, "KeyboardInterrupt")],
)
def test_what_cannot_be_rebuilt_is_a_remote_error(pair: Cluster, func: object, name: str) -> None:
    with pytest.raises(RemoteError, match=rf"(?s){name}.*worker1.*in {func.__name__}"):
        rpc.rpc_sync("worker1", func)
    assert rpc.rpc_sync("worker1", int) == 0


def test_an_exception_without_a_text(pair: Cluster) -> None:
    with pytest.raises((Mute, RemoteError)):
        rpc.rpc_sync("worker1", fail_mute)


def test_local_exception_classes(pair: Cluster) -> None:
    class Local(Exception):
        pass

    def fail_local() -> None:
        raise Local("here")

    with pytest.raises((Local, RemoteError), match="here"):
        rpc.rpc_sync("worker1", fail_local)


def test_results_that_cannot_be_sent(pair: Cluster) -> None:
    with pytest.raises(SerializationError, match=r"(?s)lock.*worker1"):
        rpc.rpc_sync("worker1", unsendable)


def test_through_two_workers(pair: Cluster) -> None:
    with pytest.raises(Told) as caught:
        rpc.rpc_sync("worker1", relay, ("worker0",))
    shown = "".join(traceback.format_exception(caught.value))
    assert "in relay" in shown
    assert "in fail_told" in shown


def test_from_coroutines(pair: Cluster) -> None:
    with pytest.raises(Told) as caught:
        rpc.rpc_sync("worker1", fail_later)
    assert caught.value.code == 8


def test_errors_of_telegrad_keep_their_type(pair: Cluster) -> None:
    with pytest.raises(TelegradError, match="nobody"):
        rpc.rpc_sync("worker1", relay, ("nobody",))


# --- futures ---


def test_then_and_callbacks(pair: Cluster) -> None:
    future = rpc.rpc_async("worker1", torch.add, (torch.ones(2), 1))
    assert isinstance(future, torch.futures.Future)
    assert torch.equal(future.then(lambda f: f.wait() * 2).then(lambda f: f.value() + 1).wait(), torch.full((2,), 5.0))
    seen = threading.Event()
    future.add_done_callback(lambda f: seen.set() if f.done() else None)
    assert seen.wait(20)
    failed = rpc.rpc_async("worker1", fail_told)
    with pytest.raises(RuntimeError, match="seven"):
        failed.then(lambda f: f.wait()).wait()
    assert failed.then(lambda f: "handled").wait() == "handled"


def test_wait_all_and_collect_all(pair: Cluster) -> None:
    futures = [rpc.rpc_async("worker1", pow, (i, 2)) for i in range(20)]
    assert torch.futures.wait_all(futures) == [i * i for i in range(20)]
    collected = torch.futures.collect_all([rpc.rpc_async("worker1", pow, (i, 2)) for i in range(20)]).wait()
    assert [f.wait() for f in collected] == [i * i for i in range(20)]
    for waiting in (torch.futures.wait_all, lambda futures: torch.futures.collect_all(futures).wait()):
        with pytest.raises(Told):
            waiting([rpc.rpc_async("worker1", int), rpc.rpc_async("worker1", fail_told)])


def test_await_from_asyncio(pair: Cluster) -> None:
    import asyncio

    async def work() -> list[int]:
        ones = await asyncio.gather(*(_one(i) for i in range(20)))
        with pytest.raises(Told):
            await rpc.rpc_async("worker1", fail_told)
        return ones

    async def _one(i: int) -> int:
        return await rpc.rpc_async("worker1", pow, (i, 2))

    assert asyncio.run(work()) == [i * i for i in range(20)]


def test_a_failure_nobody_looks_at_is_logged(pair: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "telegrad"):
        future = rpc.rpc_async("worker1", fail_told)
        rpc.rpc_sync("worker1", int)  # replies come in order: the failure is here
        until_done(future)
        del future
        # The thread that completed it may hold it for another moment.
        wait_until(lambda: any("fail_told" in r.getMessage() and "seven" in r.getMessage() for r in caplog.records))


def fail_here_only() -> None:
    """Not called by other tests, of whose futures some may be dropped at any time."""
    raise Told(9, "nine")


def test_a_failure_somebody_looked_at_is_not(pair: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "telegrad"):
        future = rpc.rpc_async("worker1", fail_here_only)
        with pytest.raises(Told):
            future.wait()
        chained = rpc.rpc_async("worker1", fail_here_only).then(lambda f: None)
        chained.wait()
        with pytest.raises(Told):
            torch.futures.wait_all([rpc.rpc_async("worker1", fail_here_only)])
        del future, chained
        gc.collect()
    assert not [r for r in caplog.records if "fail_here_only" in r.getMessage()]


def test_a_result_can_be_set_by_a_user(pair: Cluster) -> None:
    future: rpc.Future[int] = rpc.Future()
    child = future.then(lambda f: f.wait() + 1)
    future.set_result(1)
    assert child.wait() == 2


def test_a_failed_future_keeps_nothing_alive(pair: Cluster) -> None:
    freed = threading.Event()

    class Held:
        def __del__(self) -> None:
            freed.set()

    def step() -> None:
        held = Held()
        future = rpc.rpc_async("worker1", fail_told)
        with pytest.raises(Told):
            future.wait()
        del held

    step()
    wait_until(lambda: gc.collect() >= 0 and freed.is_set())


def test_a_callback_that_failed_keeps_nothing_alive() -> None:
    freed = threading.Event()

    class Held:
        def __del__(self) -> None:
            freed.set()

    def step() -> list[str]:
        held = Held()

        def looks_up_nothing(_: object) -> None:
            assert held
            raise LookupError("nothing")

        future: rpc.Future[int] = rpc.Future()
        child = future.then(looks_up_nothing)
        future.set_result(1)
        with pytest.raises(RuntimeError, match="LookupError: nothing") as caught:
            child.wait()
        return traceback.format_exception(caught.value)

    assert "in looks_up_nothing" in "".join(step())
    wait_until(lambda: gc.collect() >= 0 and freed.is_set(), 10)
