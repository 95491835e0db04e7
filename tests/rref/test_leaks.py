"""A worker that has left names nothing, though what it held is kept until the others have answered for it."""

from typing import Any

from telegrad.ids import ForkId, RRefId
from telegrad.rpc.workers import peer_of
from telegrad.rref import RRefContext
from telegrad.rref import install as install_references
from telegrad.rref.closing import leak_report
from tests.rpc.agents import office


def test_one_that_has_left_does_not_count_as_a_holder() -> None:
    with office("a", "b", "c") as agents:
        owner, holder = agents["a"], agents["b"]
        install_references(owner)
        rrefs: Any = owner.layer(RRefContext)
        rref_id, fork_id = RRefId(rrefs.new_id()), ForkId(rrefs.new_id())
        rrefs.feed(rrefs.owned.hold, rref_id)
        rrefs.feed(rrefs.owned.share, rref_id, fork_id, peer_of(holder.member))
        rrefs.feed(rrefs.owned.drop, rref_id)
        assert "still name" in leak_report(rrefs)
        rrefs.tell = lambda *_: None  # the third worker is slow to say that it knows of the end
        owner.lost(holder.member, "worker 'b' has shut down", departed=True)
        assert leak_report(rrefs) == ""
        # Whatever of it arrives now changes nothing.
        rrefs.feed(rrefs.owned.on_fork_request, peer_of(holder.member), rref_id, fork_id, peer_of(holder.member))
        assert leak_report(rrefs) == ""
