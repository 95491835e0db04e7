"""What is not urgent goes to a worker in one message, however many references it is about."""

from typing import Any

from telegrad.ids import ForkId, RRefId
from telegrad.rpc.workers import peer_of
from telegrad.rref import RRefContext
from telegrad.rref import install as install_references
from telegrad.rref.ledger.actions import SendChildAccept, SendDelete
from telegrad.wire.messages import RRefChildAccept, RRefUserDelete
from tests.rpc.agents import office


def test_accepts_and_deletes_go_together() -> None:
    with office("a", "b", "c") as agents:
        install_references(agents["a"])
        rrefs: Any = agents["a"].layer(RRefContext)
        told: list[tuple[Any, Any]] = []
        rrefs.tell = lambda peer, message: told.append((peer, message))
        rrefs._schedule = lambda urgent: None
        b, c = (peer_of(agents[name].member) for name in "bc")
        ids = [ForkId(number) for number in range(1, 9)]
        for fork_id in ids:
            rrefs.perform([SendChildAccept(b, fork_id), SendDelete(c, RRefId(7), fork_id)])
        rrefs.perform([SendChildAccept(c, ForkId(9))])
        rrefs.sweep()
    assert sorted(told, key=repr) == sorted(
        [
            (b, RRefChildAccept(tuple(ids))),
            (c, RRefChildAccept((ForkId(9),))),
            (c, RRefUserDelete(tuple((RRefId(7), fork_id) for fork_id in ids))),
        ],
        key=repr,
    )
