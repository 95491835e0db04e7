"""Clocks are aligned so that nothing arrives before it was sent, and as well as the messages allow."""

from hypothesis import given
from hypothesis import strategies as st

from telegrad.observe.timeline.clocks import Bounds, Ping, align, tighten

seconds = st.floats(0.0, 1.0)
delays = st.floats(1e-5, 0.1)


def test_one_ping_gives_the_midpoint_and_half_the_round_trip():
    offset = align(0, {1: [Ping(10.0, 115.5, 11.0)]})[1]
    assert abs(offset.ahead - 105.0) < 1e-9
    assert abs(offset.error - 0.5) < 1e-9


def test_a_quick_ping_decides_over_a_slow_one():
    offset = align(0, {1: [Ping(0.0, 105.0, 10.0), Ping(20.0, 120.1, 20.2)]})[1]
    assert abs(offset.ahead - 100.0) < 1e-9
    assert abs(offset.error - 0.1) < 1e-9


def test_a_clock_that_drifts_is_taken_at_its_best_ping():
    offset = align(0, {1: [Ping(0.0, 100.0, 0.002), Ping(10.0, 110.5, 10.001)]})[1]
    assert abs(offset.ahead - 100.4995) < 1e-6


def test_a_worker_that_was_never_asked_is_aligned_by_its_messages():
    bounds: Bounds = {}
    tighten(bounds, 1, 2, 100.0, 50.1)
    tighten(bounds, 2, 1, 50.2, 100.3)
    offsets = align(0, {1: [Ping(0.0, 100.0, 0.0)]}, bounds)
    assert abs(offsets[2].ahead - 50.0) < 0.11


@given(
    st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), seconds, delays), max_size=30),
    st.lists(st.tuples(seconds, delays, delays), min_size=1, max_size=4),
)
def test_no_message_arrives_before_it_was_sent(ahead, messages, pings):
    workers = len(ahead) + 1
    truth = [0.0, *ahead]
    bounds: Bounds = {}
    sent = []
    for a, b, when, delay in messages:
        a, b = a % workers, b % workers  # noqa: PLW2901 - brought into range
        if a != b:
            sent.append((a, b, when + truth[a], when + delay + truth[b]))
            tighten(bounds, *sent[-1])
    asked = {
        worker: [Ping(when, when + there + truth[worker], when + there + back) for when, there, back in pings]
        for worker in range(1, workers)
    }
    offsets = align(0, asked, bounds)
    for a, b, left, came in sent:
        assert (came - offsets[b].ahead) - (left - offsets[a].ahead) > -1e-6
    for worker in range(1, workers):
        assert abs(offsets[worker].ahead - truth[worker]) <= offsets[worker].error + 1e-6
