"""Real workers of which one cannot seal, as dialler and as listener: both ends of its connections stay with TLS."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.rpc.current import require_agent
from telegrad.transport.stripes import seal
from telegrad.transport.stripes.seal import can_seal
from telegrad.transport.tls_stream import TlsStream
from tests.attacks.test_on_the_network import make_authority
from tests.cluster import end, join, process
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not can_seal(), reason="needs the extra `tls`")

SIZE = 2**20  # elements: 4 MB
WITHOUT = "worker1"  # the one that cannot seal; worker0, the test, and worker2 can


class Job(NamedTuple):
    lacks: str  # what it has of the package
    connections: int | None

    @property
    def beside_tls(self) -> list[str]:
        """What is beside a connection that keeps to TLS."""
        return ["TlsStream"] * (self.connections - 1) if self.connections else []


# Without the package there must be certificates, since it is what makes keys.
JOBS = {"missing": Job("missing", 3), "too old, by default": Job("too old", None)}


def _join(folder: str, rank: int, job: Job) -> None:
    name = f"worker{rank}"
    cert, key, ca = (f"{folder}/{file}" for file in (f"{name}.pem", f"{name}.key", "authority.pem"))
    options: dict[str, Any] = {"transports": ("tcp",), "secret": "told to all, and long"}
    options["tls"] = rpc.Tls(cert, key, ca) if job.lacks == "missing" else True
    join(name, rank, 3, f"file://{folder}/meeting", {**options, "tcp_connections": job.connections})


def _serve(folder: str, rank: int, job: Job) -> None:
    if f"worker{rank}" == WITHOUT:
        if job.lacks == "missing":
            sys.modules["cryptography"] = None  # type: ignore[assignment] # whoever imports it has an ImportError
        else:
            seal._SINCE = 10**6
        can_seal.cache_clear()  # this module has asked already
    _join(folder, rank, job)
    rpc.shutdown()


@pytest.fixture(scope="module", params=JOBS)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    made: Job = JOBS[request.param]
    folder: Path = tmp_path_factory.mktemp("sealing")
    make_authority(folder, "worker0", "worker1", "worker2")
    others = [process(_serve, str(folder), rank, made) for rank in (1, 2)]
    try:
        _join(str(folder), 0, made)
        yield made
        rpc.shutdown(timeout=20)
    finally:
        end(others, patience=5)


def beside(name: str, expected: list[str]) -> list[str]:
    """What is beside the connection to a worker once large tensors went there and back."""
    x = torch.randn(SIZE)
    agent = require_agent()

    def found() -> list[str] | None:
        assert torch.equal(rpc.rpc_sync(name, torch.neg, args=(x,), timeout=20), -x)
        current = agent.link(agent.find(name)).current
        assert current is not None and type(current.stream) is TlsStream
        return None if current.stripes is None else [type(side).__name__ for side in current.stripes._sides]

    if expected:
        wait_until(found)
    return found() or []


def seals() -> bool:
    return can_seal()


@pytest.mark.slow
def test_it_is_the_only_one_that_cannot(job: Job) -> None:
    assert rpc.rpc_sync(WITHOUT, seals) is False
    assert rpc.rpc_sync("worker2", seals) is True
    sealed = beside("worker2", ["SealedStream"])
    assert sealed and set(sealed) == {"SealedStream"}


@pytest.mark.slow
def test_large_tensors_to_a_listener_that_cannot_seal(job: Job) -> None:
    assert beside(WITHOUT, job.beside_tls) == job.beside_tls
    x = torch.randn(SIZE, requires_grad=True)
    with autograd.context() as context:
        y = rpc.rpc_sync(WITHOUT, torch.mul, args=(x, x), timeout=20)
        autograd.backward(context, [y.sum()], timeout=20)
        assert torch.equal(autograd.get_gradients(context)[x], 2 * x.detach())


@pytest.mark.slow
def test_large_tensors_from_a_dialler_that_cannot_seal(job: Job) -> None:
    assert rpc.rpc_sync(WITHOUT, beside, args=("worker2", job.beside_tls), timeout=60) == job.beside_tls
