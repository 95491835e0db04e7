"""When a worker that serves durable runs may go: agents in one process, each of which knows whom it was told of."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from telegrad.durable.serve import _somebody_shuts_down as somebody_shuts_down
from telegrad.errors import TelegradError
from telegrad.rpc.job.barrier import barrier
from tests.rpc.agents import agents, introduce, office, start_agent
from tests.waiting import wait_until


def wait_in_shutdown(name: str) -> int:
    """Wait where all do in a graceful shutdown."""
    return barrier(agents[name], "shutdown/0", 1, time.monotonic() + 60)


def test_nobody_shuts_down_while_the_coordinator_has_not_heard_of_all() -> None:
    """A driver that is joining has read the records of some. The others are not missing there, and do not shut down."""
    with office("driver", "w1"):
        agents["w2"] = start_agent("w2", 2)
        for name in ("w1", "w2"):
            agents[name].peers.learn([agent.member for agent in agents.values()])
        assert agents["driver"].directory.by_name("w2") is None
        assert not somebody_shuts_down(agents["w1"])
        assert not somebody_shuts_down(agents["w2"])


def test_nobody_shuts_down_while_the_coordinator_has_not_heard_that_one_is_back() -> None:
    with office("driver", "w1", "w2"):
        agents["driver"].lost(agents["w2"].member, "killed")
        agents.pop("w2").close()
        agents["w2"] = start_agent("w2", 2)
        for name in ("w1", "w2"):
            agents[name].peers.learn([agent.member for agent in agents.values()])
        assert not somebody_shuts_down(agents["w1"])


def test_nobody_shuts_down_who_did_so_before_it_was_started_again() -> None:
    """Where it had arrived it is still noted."""
    with office("driver", "w1", "w2"), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_in_shutdown, "w2")
        wait_until(lambda: somebody_shuts_down(agents["w1"]))
        agents.pop("w2").close()
        assert isinstance(waiting.exception(60), TelegradError)
        agents["w2"] = start_agent("w2", 2)
        introduce()
        assert not somebody_shuts_down(agents["w1"])


@pytest.mark.parametrize("first", ["driver", "w2"], ids=["who coordinates", "another"])
def test_whoever_waits_in_a_shutdown_is_seen_until_it_is_over(first: str) -> None:
    with office("driver", "w1", "w2"), ThreadPoolExecutor(3) as pool:
        assert not somebody_shuts_down(agents["w1"])
        waiting = [pool.submit(wait_in_shutdown, first)]
        wait_until(lambda: somebody_shuts_down(agents["w1"]))
        waiting += [pool.submit(wait_in_shutdown, name) for name in agents if name != first]
        assert [each.result(60) for each in waiting] == [3, 3, 3]
        assert not somebody_shuts_down(agents["w1"])
