"""Whom a worker that was started again waits for as it joins."""

import os

import msgspec
import pytest

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
