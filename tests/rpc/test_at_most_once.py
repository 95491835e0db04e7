"""What became of a request decides what is done when it comes again."""

from hypothesis import given
from hypothesis import strategies as st

from telegrad.rpc.client.connecting import KEPT_NOTICES
from telegrad.rpc.server.at_most_once import NEW, AtMostOnce


def answer(requests: AtMostOnce, request_id: int) -> None:
    requests.replies[request_id] = ("reply", request_id)
    requests.running.pop(request_id)


def run(requests: AtMostOnce, *request_ids: int) -> None:
    for request_id in request_ids:
        assert requests.take(request_id, str) is NEW
        answer(requests, request_id)


def test_a_request_that_is_running_is_left_to_who_runs_it() -> None:
    requests = AtMostOnce()
    assert requests.take(1, str) is NEW
    assert requests.take(1, str) is None
    assert [kind for kind, _ in requests.running.values()] == [str]


def test_a_request_that_was_answered_is_answered_again() -> None:
    requests = AtMostOnce()
    run(requests, 1)
    assert requests.take(1, str) == ("reply", 1)
    assert not requests.running


def test_one_that_is_about_to_be_answered_is_answered_again() -> None:
    """Its reply may have gone over a connection that is lost; it runs until that is sent, and is not run again."""
    requests = AtMostOnce()
    requests.take(1, str)
    requests.replies[1] = ("reply", 1)
    assert requests.take(1, str) == ("reply", 1)
    assert list(requests.running) == [1]


def test_what_is_acknowledged_in_order_is_one_number() -> None:
    requests = AtMostOnce()
    run(requests, 1, 2, 3)
    requests.acknowledge(3)
    assert list(requests.replies) == [3]
    assert requests.take(1, str) is None
    assert requests.take(2, str) is None
    assert requests.take(3, str) == ("reply", 3)
    assert requests.take(4, str) is NEW


def test_what_is_acknowledged_by_name_is_not_run_again() -> None:
    requests = AtMostOnce()
    assert requests.take(1, str) is NEW  # the old one that still runs
    run(requests, 2, 3)
    requests.acknowledge_named([2, 3, 4])
    assert not requests.replies
    assert requests.take(2, str) is None
    assert requests.take(3, str) is None
    assert requests.take(4, str) is NEW, "it was named, but had not been answered"
    requests.acknowledge(4)
    assert requests.numbers() == ((1, 4), (), 4, "<Ranges >"), "what is done is one number again"
    assert requests.take(2, str) is None


def test_notices_are_taken_once_and_the_latest_are_remembered() -> None:
    requests = AtMostOnce()
    assert requests.is_news(1)
    assert not requests.is_news(1)
    assert requests.is_news(0)
    assert requests.is_news(0), "one without a number is never sent again"
    for notice_id in range(2, 5 * KEPT_NOTICES):
        assert requests.is_news(notice_id)
    assert not any(requests.is_news(notice_id) for notice_id in range(4 * KEPT_NOTICES, 5 * KEPT_NOTICES))
    assert len(requests._noticed) == 4 * KEPT_NOTICES


def test_a_reply_acknowledged_while_its_request_comes_again() -> None:
    """Two threads: between two looks of the one that takes it, the other hears that the reply has arrived."""
    requests = AtMostOnce()
    run(requests, 1)

    class HearsMeanwhile(dict[int, tuple[type, float]]):
        def __contains__(self, request_id: object) -> bool:
            requests.acknowledge(2)
            return super().__contains__(request_id)

    requests.running = HearsMeanwhile()
    assert requests.take(1, str) is None
    assert not requests.running


@given(st.lists(st.tuples(st.sampled_from(["take", "answer", "all", "named"]), st.integers(1, 8)), max_size=60))
def test_never_run_twice_in_any_order(steps: list[tuple[str, int]]) -> None:
    """A caller acknowledges what was answered, and all below a number only if all below were."""
    requests = AtMostOnce()
    ran: set[int] = set()
    answered: set[int] = set()
    for step, number in steps:
        if step == "take":
            reply = requests.take(number, str)
            assert (reply is NEW) == (number not in ran)
            ran.add(number)
        elif step == "answer" and number in requests.running:
            answer(requests, number)
            answered.add(number)
        elif step == "all" and number > requests.acknowledged and answered >= set(range(1, number)):
            requests.acknowledge(number)
        elif step == "named" and number in answered:
            requests.acknowledge_named([number])
        assert set(requests.replies) <= answered
