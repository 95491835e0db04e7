"""Everything that calls others, between parties that do not trust each other: it works under the rules, or is refused
and the rule is named; and what one party's code says of its data stays with it.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import autograd, durable, nn, optim, rpc
from telegrad.errors import AutogradError, CallRefused, RemoteError, RpcTimeout, SerializationError, TelegradError
from telegrad.observe import record
from telegrad.rpc.current import require_agent
from telegrad.rpc.trust.guard import Guard
from telegrad.rpc.trust.rate import TokenBucket
from telegrad.rref.rref_context import rrefs_of
from tests.cluster import end, join, process
from tests.waiting import wait_until

OPTIONS: dict[str, Any] = {"exports_only": True, "secret": "of both parties, which is long"}
WEIGHT = torch.ones(3, 3, requires_grad=True)


def forward(x: torch.Tensor) -> torch.Tensor:
    return x @ WEIGHT


def fails_in_the_pass(x: torch.Tensor) -> torch.Tensor:
    def hook(_: torch.Tensor) -> None:
        raise ValueError("label 7 of patient 12 is wrong")

    y = x @ WEIGHT
    y.register_hook(hook)
    return y * 2


async def wait_for(path: str) -> None:
    await __import__("asyncio").to_thread(wait_until, Path(path).exists)


class NoTokens:
    """A bucket that is empty, and counts who comes."""

    def __init__(self) -> None:
        self.refused = 0

    def take(self) -> bool:
        self.refused += 1
        return False


def _of_hospital() -> Any:
    """On the company: what its guard knows of the hospital."""
    look: Any = require_agent().layers.before_serving
    guard = next(cell.cell_contents for cell in look.__closure__ if isinstance(cell.cell_contents, Guard))
    return guard._peers["hospital"]


def let_nothing_go() -> None:
    _of_hospital().letting_go = NoTokens()


def refused() -> int:
    number: int = _of_hospital().letting_go.refused
    return number


def let_go() -> None:
    _of_hospital().letting_go = TokenBucket(1000.0, 2000.0)


def keeps(rref_id: int) -> bool:
    return rrefs_of(require_agent()).keeps(rref_id)


def company(meeting: str) -> None:
    for function in (forward, fails_in_the_pass, wait_for, let_nothing_go, refused, let_go, keeps):
        rpc.export(function)
    join("company", 1, 2, meeting, OPTIONS)
    rpc.shutdown()


@pytest.fixture(scope="module")
def meeting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    made = f"file://{tmp_path_factory.mktemp('features')}/meeting"
    other = process(company, made)
    rpc.export(forward)
    join("hospital", 0, 2, made, OPTIONS)
    try:
        yield made
        rpc.shutdown(timeout=60)
    finally:
        rpc.withdraw("forward")
        end([other], patience=30)


@pytest.fixture(autouse=True)
def works(meeting: str) -> Iterator[None]:
    """After whatever was refused, a call and a pass go on."""
    yield
    x = torch.ones(1, 3, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("company", "forward", (x,)).sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((1, 3), 3.0))


X = torch.ones(1, 3)


# --- what works ---


def test_one_function_on_many_workers() -> None:
    with torch.no_grad():
        got = rpc.gather("forward", (X,))  # type: ignore[arg-type] # by its name
        assert list(got) == ["hospital", "company"] and torch.equal(got["company"], X * 3)
        assert [int(y.sum()) for y in rpc.map("forward", [X, X * 2])] == [9, 18]  # type: ignore[arg-type]


def test_futures_and_references() -> None:
    with torch.no_grad():
        futures = [rpc.rpc_async("company", "forward", (X * n,)) for n in range(3)]
        assert [int(f.value().sum()) for f in rpc.as_completed(futures)].count(9) == 1
        assert torch.equal(rpc.remote("company", "forward", (X,)).to_here(), X * 3)


def test_what_was_let_go_of_too_often_is_let_go_of_later() -> None:
    """An owner refuses to hear of it so often in a second. Were it not told again, it would keep the value for ever."""
    with torch.no_grad():
        reference = rpc.remote("company", "forward", (X,))
        assert torch.equal(reference.to_here(), X * 3)
        rref_id = int(reference._handle.rref_id)
        rpc.rpc_sync("company", "let_nothing_go")
        del reference
        wait_until(lambda: rpc.rpc_sync("company", "refused") > 0)
        assert rpc.rpc_sync("company", "keeps", (rref_id,))
        rpc.rpc_sync("company", "let_go")
        wait_until(lambda: not rpc.rpc_sync("company", "keeps", (rref_id,)))


def test_calls_under_a_profiler() -> None:
    """What runs at the other party is not profiled; the call is made all the same."""
    x = torch.ones(1, 3, requires_grad=True)
    with torch.autograd.profiler.profile() as profile, autograd.context() as context_id:
        y = rpc.rpc_sync("company", "forward", (x,))
        autograd.backward(context_id, [y.sum()])
    assert torch.equal(y, X * 3) and not any(event.is_remote for event in profile.function_events or ())


def test_calls_with_spans() -> None:
    """No trace context leaves."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    from telegrad.observe.spans import CallTracing

    tracing = CallTracing(require_agent())
    tracing._tracer = TracerProvider().get_tracer("test")
    message = object()
    wrapped = tracing.wrap_call(1, message, [])  # type: ignore[arg-type] # only passed on
    assert wrapped is not None and wrapped[0] is message and trace is not None


def test_a_call_that_nobody_waits_for_is_cancelled(tmp_path: Path) -> None:
    """Its coroutine, too; and that the other party is not asked where it is, it need not refuse."""
    with torch.no_grad():
        rpc.rpc_sync("company", "forward", (X,))  # there is a connection
    with pytest.raises(RpcTimeout, match="may still be running"):
        rpc.rpc_sync("company", "wait_for", (str(tmp_path / "never"),), timeout=0.2)
    (tmp_path / "never").touch()


# --- what is refused ---


def _batch() -> None:
    with rpc.batch() as batch:
        batch.rpc_async("company", "forward", (X,)).wait()  # type: ignore[arg-type]


def _record() -> None:
    with record(os.devnull):
        rpc.rpc_sync("company", "forward", (X,))


def _optimizer() -> None:
    optim.DistributedOptimizer(torch.optim.SGD, [rpc.remote("company", "forward", (X,))], lr=0.1)


def _durable() -> None:
    durable.Run("between-parties").remote("company", forward, (X,))


REFUSED: dict[str, Callable[[], object]] = {
    "a function": lambda: rpc.rpc_sync("company", os.getpid),
    "a stream": lambda: list(rpc.stream("company", "forward", (X,))),  # type: ignore[arg-type]
    "a batch": _batch,
    "a module": lambda: nn.RemoteModule("company", torch.nn.Linear, (3, 3)),
    "a reference as an argument": lambda: rpc.rpc_sync("company", "forward", (rpc.remote("company", "forward", (X,)),)),
    "a method of a reference": lambda: rpc.remote("company", "forward", (X,)).rpc_sync().sum(),
    "an optimizer": _optimizer,
    "a durable value": _durable,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_functions_of_the_other_is_refused(what: str) -> None:
    with pytest.raises((CallRefused, SerializationError), match=r"rule '|not plain data"):
        REFUSED[what]()


def test_a_method_of_a_reference_is_refused_by_its_rule() -> None:
    with pytest.raises(CallRefused, match="rule 'exports only': a method of a reference runs what was not exported"):
        REFUSED["a method of a reference"]()


def test_gradients_of_gradients_are_refused() -> None:
    x = torch.ones(1, 3, requires_grad=True)
    with autograd.context() as context_id, pytest.raises(CallRefused, match="rule 'exports only': a WithGraph"):
        autograd.backward(context_id, [rpc.rpc_sync("company", "forward", (x,)).sum()], create_graph=True)


def test_a_timeline_has_no_part_of_the_other(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with torch.no_grad(), contextlib.suppress(TelegradError), record(str(path)):
        rpc.rpc_sync("company", "forward", (X,))
    assert not path.exists() or "run_call" not in path.read_text()


def test_a_pass_that_fails_there_says_nothing_of_the_data() -> None:
    x = torch.ones(1, 3, requires_grad=True)
    with autograd.context() as context_id, pytest.raises((RemoteError, AutogradError)) as caught:
        autograd.backward(context_id, [rpc.rpc_sync("company", "fails_in_the_pass", (x,)).sum()])
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
    assert "patient" not in told and "incident" in told
