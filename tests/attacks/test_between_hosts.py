"""Between hosts a secret is required: who is refused, what it is told, and what goes without."""

import logging
from pathlib import Path

import pytest

from telegrad import rpc
from telegrad.compat.rpc.options import TensorPipeRpcBackendOptions
from telegrad.errors import AuthenticationError
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.trust.job import trust_for
from telegrad.rpc.trust.secret import Source

ELSEWHERE, HERE = "10.1.2.3", "127.0.0.1"


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TELEGRAD_SECRET", "TELEGRAD_SECRET_FILE", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("options", "store", "is_here", "source"),
    [
        ({}, None, True, Source.USER),  # a file
        ({}, HERE, True, Source.USER),
        ({}, "localhost", True, Source.USER),
        ({}, "this-very-host", True, Source.USER),  # torchrun gives the name of the host
        ({"secret": "given to all of them"}, ELSEWHERE, False, Source.GIVEN),
        ({"insecure": True}, HERE, True, Source.USER),  # on one host nothing need be given up
        ({"insecure": True}, ELSEWHERE, False, Source.PUBLISHED),
        ({"insecure": True, "host": "10.1.2.4"}, HERE, True, Source.PUBLISHED),
    ],
)
def test_where_the_secret_comes_from(
    options: dict[str, object], store: str | None, is_here: bool, source: Source
) -> None:
    trust = trust_for(RpcBackendOptions(**options), store, is_here)
    assert trust.secret.source is source
    assert bool(trust.published) == (source is Source.PUBLISHED)


@pytest.mark.parametrize(
    ("options", "store"), [({}, ELSEWHERE), ({"host": "0.0.0.0"}, None), ({"host": "10.1.2.4"}, HERE)]
)
def test_without_a_secret_it_stays_on_the_host(options: dict[str, object], store: str | None) -> None:
    with pytest.raises(AuthenticationError, match=r"several hosts.*TELEGRAD_SECRET.*insecure=True"):
        trust_for(RpcBackendOptions(**options), store, False)


def test_init_rpc_refuses() -> None:
    options = rpc.RpcBackendOptions(init_method="tcp://192.0.2.1:29500", rendezvous_timeout=5)
    with pytest.raises(AuthenticationError, match="has no secret"):
        rpc.init_rpc("worker1", rank=1, world_size=2, rpc_backend_options=options)


def test_the_stand_in_goes_without_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    trust = trust_for(TensorPipeRpcBackendOptions(), ELSEWHERE, False)
    assert trust.secret.source is Source.PUBLISHED
    assert caplog.text.count("can run code as you") == 1
    assert trust_for(TensorPipeRpcBackendOptions(), HERE, True).secret.source is Source.USER


def test_a_secret_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text("of sixteen bytes at least\n")
    monkeypatch.setenv("TELEGRAD_SECRET_FILE", str(path))
    assert trust_for(RpcBackendOptions(), ELSEWHERE, False).secret == (b"of sixteen bytes at least", Source.GIVEN)
    path.write_text("short")
    with pytest.raises(AuthenticationError, match="guessed"):
        trust_for(RpcBackendOptions(), ELSEWHERE, False)
    with pytest.raises(AuthenticationError, match="cannot be read"):
        trust_for(RpcBackendOptions(secret_file=str(tmp_path / "none")), HERE, True)


def test_a_secret_is_not_shown() -> None:
    assert "hidden" not in repr(RpcBackendOptions(secret="hidden"))
    assert "hidden" not in repr(trust_for(RpcBackendOptions(secret="hidden"), HERE, True))
