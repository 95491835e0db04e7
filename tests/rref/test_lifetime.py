"""Each transition of the reference ledgers by itself: an event, and exactly the actions it must return."""

import pytest

from telegrad.ids import ForkId, PeerId, RRefId, make_id
from telegrad.rref.ledger.actions import (
    FailValue,
    Forget,
    MarkLost,
    Refuse,
    SendAck,
    SendChildAccept,
    SendCreationFailed,
    SendDelete,
    SendFlush,
    SendFlushed,
    SendForkRequest,
)
from telegrad.rref.ledger.lifetime import Leak
from telegrad.rref.ledger.owner import OwnerLedger
from telegrad.rref.ledger.user import UserLedger

OWNER, A, B, C = (PeerId(n) for n in range(4))  # the owner and three users
R = RRefId(make_id(A, 1))  # created by A, lives on OWNER
FA = ForkId(make_id(A, 10))  # A's own fork
FB = ForkId(make_id(A, 11))  # made by A for B
FC = ForkId(make_id(B, 12))  # made by B for C
FO = ForkId(make_id(OWNER, 13))  # made by the owner


@pytest.fixture
def owner() -> OwnerLedger:
    return OwnerLedger(OWNER, [OWNER, A, B, C])


@pytest.fixture
def a() -> UserLedger:
    return UserLedger(A)


@pytest.fixture
def b() -> UserLedger:
    return UserLedger(B)


def created(owner: OwnerLedger) -> OwnerLedger:
    assert owner.on_create(A, R, FA) == ()
    return owner


def confirmed(a: UserLedger) -> UserLedger:
    assert a.create(R, FA, OWNER) == ()
    assert a.on_ack(OWNER, R, FA) == ()
    return a


class TestTheUsualLife:
    def test_create_confirm_drop_costs_one_notice_beyond_the_call(self, owner: OwnerLedger, a: UserLedger) -> None:
        assert a.create(R, FA, OWNER) == ()
        assert not a.confirmed(FA)
        created(owner)
        assert a.on_ack(OWNER, R, FA) == ()  # the reply
        assert a.confirmed(FA)
        assert a.drop(FA) == (SendDelete(OWNER, R, FA),)
        assert owner.on_delete(A, R, FA) == (Forget(R),)
        assert len(owner) == len(a) == 0

    def test_dropped_before_confirmation_waits_for_it(self, a: UserLedger) -> None:
        a.create(R, FA, OWNER)
        assert a.drop(FA) == ()
        assert a.counts()["pending"] == 1
        assert a.on_ack(OWNER, R, FA) == (SendDelete(OWNER, R, FA),)

    def test_a_value_of_ones_own_needs_no_message(self, owner: OwnerLedger) -> None:
        assert owner.hold(R) == ()
        assert owner.drop(R) == (Forget(R),)
        assert owner.drop(R) == ()


class TestSharing:
    def test_owner_to_user(self, owner: OwnerLedger, b: UserLedger) -> None:
        owner.hold(R)
        assert owner.share(R, FO, B) == ()
        assert owner.drop(R) == ()  # in flight to B
        assert b.receive(R, FO, OWNER) == ()
        assert b.confirmed(FO)
        assert b.drop(FO) == (SendDelete(OWNER, R, FO),)
        assert owner.on_delete(B, R, FO) == (Forget(R),)

    def test_user_to_owner(self, owner: OwnerLedger, a: UserLedger) -> None:
        created(owner)
        confirmed(a).share(FA, FB, OWNER)
        assert a.drop(FA) == ()  # waits for its child
        assert owner.receive(R, FB) == (SendChildAccept(A, FB),)
        assert a.on_child_accept(FB) == (SendDelete(OWNER, R, FA),)
        assert owner.on_delete(A, R, FA) == ()  # the owner holds it now
        assert owner.drop(R) == (Forget(R),)

    def test_home_while_the_sender_keeps_its_own(self, owner: OwnerLedger, a: UserLedger) -> None:
        created(owner)
        assert confirmed(a).confirmed(FA)
        assert owner.come_home(R, A)
        assert a.drop(FA) == (SendDelete(OWNER, R, FA),)  # the call is answered, and its handle gone
        assert owner.on_delete(A, R, FA) == ()  # the owner holds it now
        assert owner.drop(R) == (Forget(R),)
        assert not owner.come_home(R, A)
        assert len(owner) == 0

    def test_home_from_one_that_is_known_to_be_dead(self, owner: OwnerLedger) -> None:
        created(owner)
        owner.worker_died(A)
        assert not owner.come_home(R, A)
        assert owner.come_home(R, B)

    def test_user_to_third_user(self, owner: OwnerLedger, a: UserLedger, b: UserLedger) -> None:
        created(owner)
        confirmed(a).share(FA, FB, B)
        assert a.drop(FA) == ()
        assert b.receive(R, FB, OWNER) == (SendForkRequest(OWNER, R, FB, B),)
        assert owner.on_fork_request(B, R, FB, B) == (SendAck(B, R, FB),)
        assert b.on_ack(OWNER, R, FB) == (SendChildAccept(A, FB),)
        assert a.on_child_accept(FB) == (SendDelete(OWNER, R, FA),)
        assert owner.on_delete(A, R, FA) == ()
        assert b.drop(FB) == (SendDelete(OWNER, R, FB),)
        assert owner.on_delete(B, R, FB) == (Forget(R),)

    def test_user_to_itself_leans_on_the_fork_it_has(self, a: UserLedger) -> None:
        confirmed(a)
        second, third = ForkId(make_id(A, 20)), ForkId(make_id(A, 21))
        assert a.share(FA, second, A) == ()
        assert a.drop(FA) == ()
        assert a.receive(R, second, OWNER) == ()
        assert a.confirmed(second)
        assert a.share(second, third, A) == ()
        assert a.drop(second) == ()
        assert a.receive(R, third, OWNER) == ()
        assert a.counts() == {"users": 1, "pending": 0, "children": 1, "asked": 0}  # no chain of old handles
        assert a.drop(third) == (SendDelete(OWNER, R, FA),)

    def test_owner_to_itself(self, owner: OwnerLedger) -> None:
        owner.hold(R)
        owner.share(R, FO, OWNER)
        assert owner.drop(R) == ()
        assert owner.receive(R, FO) == ()
        assert owner.drop(R) == (Forget(R),)

    def test_shared_before_its_own_creation_was_confirmed(self, owner: OwnerLedger, a: UserLedger) -> None:
        a.create(R, FA, OWNER)
        a.share(FA, FB, B)
        assert owner.on_fork_request(B, R, FB, B) == (SendAck(B, R, FB),)  # overtook the creation
        assert owner.counts()["not_created"] == 1
        created(owner)
        assert owner.counts() == {"owners": 1, "forks": 2, "not_created": 0, "unsettled": 0, "awaiting": 0}
        assert a.drop(FA) == ()
        assert a.on_child_accept(FB) == ()  # still not confirmed itself
        assert a.on_ack(OWNER, R, FA) == (SendDelete(OWNER, R, FA),)

    def test_brought_home_before_the_creation_arrived(self, owner: OwnerLedger) -> None:
        assert owner.receive(R, FB) == (SendChildAccept(A, FB),)
        created(owner)
        assert owner.on_delete(A, R, FA) == ()
        assert owner.drop(R) == (Forget(R),)

    def test_taken_back_when_the_call_could_not_be_sent(self, owner: OwnerLedger, a: UserLedger) -> None:
        confirmed(a).share(FA, FB, B)
        a.drop(FA)
        assert a.share_unsent(FB) == (SendDelete(OWNER, R, FA),)
        owner.hold(R)
        owner.share(R, FO, B)
        owner.drop(R)
        assert owner.share_unsent(R, FO, B) == (Forget(R),)


class TestRepeats:
    def test_every_message_may_come_twice(self, owner: OwnerLedger, a: UserLedger, b: UserLedger) -> None:
        created(owner)
        confirmed(a).share(FA, FB, B)
        b.receive(R, FB, OWNER)
        for _ in range(2):
            assert owner.on_fork_request(B, R, FB, B) == (SendAck(B, R, FB),)
        assert b.on_ack(OWNER, R, FB) == (SendChildAccept(A, FB),)
        assert b.on_ack(OWNER, R, FB) == ()
        assert a.on_child_accept(FB) == a.on_child_accept(FB) == ()
        assert owner.on_delete(A, R, FA) == owner.on_delete(A, R, FA) == ()

    def test_a_stale_request_after_the_delete_heals(self, owner: OwnerLedger, b: UserLedger) -> None:
        assert owner.on_fork_request(B, R, FB, B) == (SendAck(B, R, FB),)  # B dropped FB long ago
        assert b.on_ack(OWNER, R, FB) == (SendDelete(OWNER, R, FB),)
        assert owner.on_delete(B, R, FB) == (Forget(R),)
        assert len(owner) == 0

    def test_only_the_holder_deletes(self, owner: OwnerLedger) -> None:
        created(owner)
        assert owner.on_delete(B, R, FA) == ()
        assert len(owner) == 1


class TestFailedCreation:
    def test_the_error_becomes_the_value(self, owner: OwnerLedger, a: UserLedger) -> None:
        a.create(R, FA, OWNER)
        assert a.creation_failed(FA) == (SendCreationFailed(OWNER, R, FA),)
        owner.on_fork_request(B, R, FB, B)  # shared before it failed
        assert owner.on_creation_failed(A, R, FA) == (FailValue(R, None), SendAck(A, R, FA))
        assert owner.on_creation_failed(A, R, FA) == (SendAck(A, R, FA),)
        a.on_ack(OWNER, R, FA)
        assert a.drop(FA) == (SendDelete(OWNER, R, FA),)
        assert owner.on_delete(A, R, FA) == ()
        assert owner.on_delete(B, R, FB) == (Forget(R),)

    def test_a_value_that_exists_is_not_overwritten(self, owner: OwnerLedger) -> None:
        assert created(owner).on_creation_failed(A, R, FA) == (SendAck(A, R, FA),)

    def test_a_creator_that_died_first(self, owner: OwnerLedger) -> None:
        owner.on_fork_request(B, R, FB, B)
        assert owner.worker_died(A) == (FailValue(R, A),)
        assert owner.on_create(A, R, FA) == (Refuse(R),)
        assert owner.on_delete(B, R, FB) == (Forget(R),)

    def test_a_handle_of_a_creation_that_died(self, owner: OwnerLedger) -> None:
        owner.worker_died(A)
        assert owner.on_fork_request(B, R, FB, B) == (FailValue(R, A), SendAck(B, R, FB))


class TestDeathSeenByTheOwner:
    def test_its_forks_stay_until_all_others_answered(self, owner: OwnerLedger) -> None:
        assert set(created(owner).worker_died(A)) == {SendFlush(B, A), SendFlush(C, A)}
        assert owner.worker_died(A) == ()
        assert owner.on_flushed(B, A, ()) == ()
        assert owner.on_flushed(B, A, ()) == ()
        assert owner.on_flushed(C, A, ()) == (Forget(R),)
        assert not any(owner.counts().values())

    def test_an_answer_brings_the_forks_the_dead_had_protected(self, owner: OwnerLedger) -> None:
        created(owner).worker_died(A)
        owner.on_flushed(C, A, ())
        assert owner.on_flushed(B, A, [(R, FB)]) == (SendAck(B, R, FB),)
        assert owner.leaks() == [Leak(R, 0, {FB: B})]

    def test_one_that_dies_while_asked_is_settled_too(self, owner: OwnerLedger) -> None:
        """A shared to B, B to C; A and B die. Only C can say whether B's handle reached it, so C is asked about B."""
        created(owner).worker_died(A)
        assert owner.on_flushed(C, A, ()) == ()
        assert owner.worker_died(B) == (SendFlush(C, B),)
        assert owner.on_flushed(C, B, [(R, FC)]) == (SendAck(C, R, FC),)
        assert owner.leaks() == [Leak(R, 0, {FC: C})]

    def test_one_that_died_without_forks_is_settled_with_the_next(self, owner: OwnerLedger) -> None:
        created(owner)
        assert owner.worker_died(B) == ()  # nothing here depends on it yet
        assert set(owner.worker_died(A)) == {SendFlush(C, A), SendFlush(C, B)}
        assert owner.on_flushed(C, A, ()) == ()
        assert owner.on_flushed(C, B, ()) == (Forget(R),)

    def test_a_fork_reported_for_a_dead_child(self, owner: OwnerLedger) -> None:
        created(owner).worker_died(B)
        actions = owner.on_fork_request(A, R, FB, B)
        assert set(actions) == {SendAck(A, R, FB), SendFlush(A, B), SendFlush(C, B)}
        assert owner.on_delete(A, R, FB) == ()  # a repeated ack, answered by the parent
        owner.on_delete(A, R, FA)
        owner.on_flushed(A, B, ())
        assert owner.on_flushed(C, B, ()) == (Forget(R),)

    def test_a_fork_reported_after_its_holder_is_settled_is_not_kept(self, owner: OwnerLedger) -> None:
        created(owner)
        owner.share(R, FO, B)
        owner.worker_died(B)
        owner.on_flushed(A, B, ())
        owner.on_flushed(C, B, ())
        assert owner.on_fork_request(A, R, FB, B) == (SendAck(A, R, FB),)
        assert owner.leaks() == [Leak(R, 0, {FA: A})]

    def test_nobody_left_to_ask(self) -> None:
        owner = created(OwnerLedger(OWNER, [OWNER, A]))
        assert owner.worker_died(A) == (Forget(R),)

    def test_nothing_is_taken_from_the_dead(self, owner: OwnerLedger) -> None:
        owner.hold(R)
        owner.worker_died(B)
        assert owner.share(R, FO, B) == ()
        assert owner.on_fork_request(B, R, FB, B) == ()
        assert owner.on_creation_failed(B, R, FB) == ()
        assert owner.on_flushed(B, A, [(R, FB)]) == ()
        assert owner.receive(R, FC) == (MarkLost(R, FC, B),)
        assert owner.drop(R) == (Forget(R),)

    def test_a_worker_that_joins_is_asked_as_well(self, owner: OwnerLedger) -> None:
        created(owner).worker_died(A)
        late = PeerId(9)
        assert owner.worker_joined(late) == (SendFlush(late, A),)
        assert owner.worker_joined(late) == ()
        owner.on_flushed(B, A, ())
        assert owner.on_flushed(C, A, ()) == ()
        assert owner.on_flushed(late, A, ()) == (Forget(R),)


class TestDeathSeenByAUser:
    def test_handles_of_a_dead_owner_are_marked(self, a: UserLedger) -> None:
        confirmed(a)
        mine = ForkId(make_id(A, 20))
        a.share(FA, mine, A)
        a.share(FA, FB, B)
        assert a.worker_died(OWNER) == (MarkLost(R, FA, OWNER), MarkLost(R, mine, OWNER))
        assert (
            a.drop(FA) == a.drop(mine) == a.on_child_accept(FB) == a.on_ack(OWNER, R, FA) == a.creation_failed(FA) == ()
        )
        assert a.share(FA, FB, B) == ()
        assert a.receive(R, FC, OWNER) == (MarkLost(R, FC, OWNER),)
        assert a.receive(R, mine, OWNER) == (MarkLost(R, mine, OWNER),)  # was on its way to oneself
        assert a.create(R, FA, OWNER) == (MarkLost(R, FA, OWNER),)
        assert a.leaks() == []

    def test_a_dropped_handle_is_not_marked(self, a: UserLedger) -> None:
        a.create(R, FA, OWNER)
        a.drop(FA)
        assert a.worker_died(OWNER) == ()
        assert len(a) == 0

    def test_a_dead_child_is_handed_to_the_owner(self, a: UserLedger) -> None:
        confirmed(a).share(FA, FB, B)
        a.drop(FA)
        assert a.worker_died(B) == (SendForkRequest(OWNER, R, FB, B),)
        assert a.worker_died(B) == ()
        assert a.leaks() == [Leak(R, 0, {FB: B})]
        assert a.on_ack(OWNER, R, FB) == (SendDelete(OWNER, R, FA),)

    def test_a_child_of_a_dead_parent_lives_on(self, b: UserLedger) -> None:
        b.receive(R, FB, OWNER)
        assert b.worker_died(A) == ()
        assert b.on_ack(OWNER, R, FB) == ()  # no accept to the dead
        assert b.confirmed(FB)

    def test_a_handle_that_comes_after_its_senders_death(self, b: UserLedger) -> None:
        b.worker_died(A)
        assert b.receive(R, FB, OWNER) == (MarkLost(R, FB, A),)
        assert b.share(FB, FC, A) == ()
        assert len(b) == 0

    def test_an_owner_that_asks_hears_what_it_may_not_know(self, b: UserLedger) -> None:
        b.receive(R, FB, OWNER)
        b.worker_died(A)
        assert b.on_flush(OWNER, A) == (SendFlushed(OWNER, A, ((R, FB),)),)
        b.on_ack(OWNER, R, FB)
        assert b.on_flush(OWNER, A) == (SendFlushed(OWNER, A, ()),)

    def test_an_owner_that_asks_first_hears_when_the_death_is_known(self, b: UserLedger) -> None:
        assert b.on_flush(OWNER, A) == b.on_flush(OWNER, A) == ()
        b.receive(R, FB, OWNER)  # it came before the news
        assert b.worker_died(A) == (SendFlushed(OWNER, A, ((R, FB),)),)

    def test_a_dead_owner_hears_nothing(self, b: UserLedger) -> None:
        b.on_flush(OWNER, A)
        b.worker_died(OWNER)
        assert b.worker_died(A) == b.on_flush(OWNER, A) == ()


def test_a_thousand_lives_leave_nothing_behind(owner: OwnerLedger, a: UserLedger, b: UserLedger) -> None:
    for n in range(1000):
        rref, fork, child = RRefId(make_id(A, n)), ForkId(make_id(A, 2 * n)), ForkId(make_id(A, 2 * n + 1))
        a.create(rref, fork, OWNER)
        owner.on_create(A, rref, fork)
        a.on_ack(OWNER, rref, fork)
        a.share(fork, child, B)
        b.receive(rref, child, OWNER)
        owner.on_fork_request(B, rref, child, B)
        b.on_ack(OWNER, rref, child)
        a.on_child_accept(child)
        a.drop(fork)
        owner.on_delete(A, rref, fork)
        b.drop(child)
        assert owner.on_delete(B, rref, child) == (Forget(rref),)
    for ledger in (owner, a, b):
        assert not any(ledger.counts().values())
