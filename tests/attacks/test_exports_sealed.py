"""Large tensors between parties that do not trust each other, over TLS: sealed, and the rules are those of any call."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import CallRefused
from telegrad.rpc.current import require_agent
from telegrad.transport.stripes.seal import can_seal
from telegrad.transport.stripes.sealed_stream import SealedStream
from tests.cluster import end, join, process
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not can_seal(), reason="needs the extra `tls`")

SIZE = 2**20  # elements: 4 MB
OPTIONS: dict[str, Any] = {
    "exports_only": True,
    "secret": "of both parties, which is long",
    "transports": ("tcp",),
    "tls": True,
    "limits": rpc.Limits(kept_bytes=24 << 20),
}


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def company(meeting: str) -> None:
    rpc.export(double)
    join("company", 1, 2, meeting, OPTIONS)
    rpc.shutdown()


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    meeting = f"file://{tmp_path_factory.mktemp('sealed')}/meeting"
    other = process(company, meeting)
    join("hospital", 0, 2, meeting, OPTIONS)
    try:
        yield
        rpc.shutdown(timeout=60)
    finally:
        end([other], patience=30)


def is_sealed() -> bool:
    agent = require_agent()
    current = agent.link(agent.find("company")).current
    stripes = current.stripes if current is not None and current._striped else None
    return stripes is not None and all(isinstance(side, SealedStream) for side in stripes._sides)


@pytest.mark.slow
def test_a_pass_with_large_tensors_and_a_limit(hospital: None) -> None:
    x = torch.randn(SIZE, requires_grad=True)

    def step() -> None:
        with autograd.context() as context:
            y = rpc.rpc_sync("company", "double", args=(x,))
            autograd.backward(context, [y.sum()])
            assert torch.equal(autograd.get_gradients(context)[x], torch.full((SIZE,), 2.0))
        assert torch.equal(y.detach(), 2 * x.detach())

    def steps_are_sealed() -> bool:
        step()
        return is_sealed()

    wait_until(steps_are_sealed)
    with pytest.raises(CallRefused, match="bytes"):
        rpc.rpc_sync("company", "double", args=(torch.ones(7 * SIZE),))
    step()
    assert is_sealed()
