"""Whom a worker that was started again waits for as it joins; and what `init_rpc` refuses before anything begins."""

import os
import socket
from typing import Any

import msgspec
import numpy as np
import pytest
import torch.distributed.rpc

from telegrad import rpc
from telegrad.errors import RendezvousError
from telegrad.ids import WorkerId, draw_incarnation
from telegrad.rpc.job import membership
from telegrad.rpc.job.membership import Joining
from telegrad.rpc.workers import Member
from telegrad.transport.addresses import host_identity
from tests.rpc.agents import start_agent


@pytest.mark.parametrize("is_known_dead", [True, False], ids=["by its connection", "by its process"])
def test_the_dead_are_waited_for_a_while(monkeypatch: pytest.MonkeyPatch, is_known_dead: bool) -> None:
    """However their end was noticed. Then the job goes on without them, since others live on from before."""
    agent = start_agent("b", 1)
    mine = msgspec.structs.replace(agent.member, incarnation=draw_incarnation(1))
    living, dead = (
        Member(name, WorkerId(worker_id), draw_incarnation(0), (), pid, host=host_identity())
        for name, worker_id, pid in (("a", 0, os.getpid()), ("c", 2, os.getpid() if is_known_dead else 2**22 + 1))
    )
    try:
        joining = Joining(agent, mine, 3)
        agent.directory.update(joining.take([living, dead]))
        if is_known_dead:
            agent.peers.lost(dead, "its connection closed")
        assert joining.present() == {0, 1}
        monkeypatch.setattr(membership, "COMEBACK_SECONDS", 1e-9)
        assert joining.present() == {0, 1, 2}
    finally:
        agent.close()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"rank": "0"}, "rank must be an int, got '0'"),
        ({"rank": 0.0}, "rank must be an int, got 0.0"),
        ({"world_size": "1"}, "world_size must be an int, got '1'"),
        ({"backend": "nccl"}, "Argument backend must be a member of BackendType or None, got 'nccl'"),
        ({"backend": 0}, "got 0. There is one backend: leave it out, and give the others by name"),
    ],
    ids=str,
)
def test_what_is_no_rank_size_or_backend_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        rpc.init_rpc("a", **{"rank": 0, "world_size": 1, **given})


@pytest.mark.parametrize("backend", [None, "TENSORPIPE", torch.distributed.rpc.BackendType.TENSORPIPE], ids=str)
def test_torchs_backend_and_whole_numbers_of_any_kind_are_taken(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    for variable in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    with rpc.init_rpc("a", backend, rank=np.int64(0), world_size=np.int32(1)) as me:
        assert (type(me.id), me.id) == (int, 0)


def test_a_name_that_does_not_resolve_is_said_before_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for variable in ("TELEGRAD_SECRET", "TELEGRAD_SECRET_FILE", "TELEGRAD_HOST"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    options = rpc.RpcBackendOptions(init_method="tcp://nosuchhost.invalid:29770")
    with pytest.raises(RendezvousError, match=r"'nosuchhost.invalid' does not resolve.*\(Name or service not known\)"):
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=options)


@pytest.mark.parametrize("world_size", [1, None])
@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("foo://x", "cannot meet at 'foo://x': it must be env://, tcp://host:port or file:///path"),
        ("127.0.0.1:29712", "cannot meet at '127.0.0.1:29712': it must be env://"),
        ("tcp://localhost:abc", "cannot meet at 'tcp://localhost:abc': Port could not be cast"),
    ],
)
def test_a_place_of_no_known_form_is_refused_with_the_forms_there_are(
    where: str, text: str, world_size: int | None
) -> None:
    with pytest.raises(RendezvousError, match=text):
        rpc.init_rpc("a", rank=0, world_size=world_size, rpc_backend_options=rpc.RpcBackendOptions(init_method=where))
