"""A worker that has left names nothing, though what it held is kept until the others have answered for it."""

from typing import Any

from telegrad.ids import ForkId, RRefId
from telegrad.rpc.workers import peer_of
from telegrad.rref import References
from telegrad.rref import install as install_references
from telegrad.rref.closing import leak_report
from tests.rpc.agents import office


def test_one_that_has_left_does_not_count_as_a_holder() -> None:
    with office("a", "b", "c") as agents:
        owner, holder = agents["a"], agents["b"]
        install_references(owner)
        references: Any = owner.layer(References)
        rref_id, fork_id = RRefId(references.new_id()), ForkId(references.new_id())
        references.feed(references.owned.hold, rref_id)
        references.feed(references.owned.share, rref_id, fork_id, peer_of(holder.member))
        references.feed(references.owned.drop, rref_id)
        assert "still name" in leak_report(references)
        references.tell = lambda *_: None  # the third worker is slow to say that it knows of the end
        owner.lost(holder.member, "worker 'b' has shut down", departed=True)
        assert leak_report(references) == ""
        # Whatever of it arrives now changes nothing.
        references.feed(
            references.owned.on_fork_request, peer_of(holder.member), rref_id, fork_id, peer_of(holder.member)
        )
        assert leak_report(references) == ""
