"""What holds for every test: it ends, it leaves nothing running, and chance is the same each time.

- Hangs: pytest-timeout fails a test by a signal. A main thread that waits inside C++ never sees that signal, so a
  watchdog of the interpreter, which needs neither signals nor the GIL, ends the whole run a little later and prints
  the stack of every thread.
- Leftovers: child processes, non-daemon threads and an agent that outlive the test, module or session that had started
  them.
- Profiles of hypothesis: `ci` (the default) is short and repeats itself exactly, `long` is random and 40 times as
  large. Tests marked `long` run in the latter only, and those that grow with the profile get the time to do so.
"""

import faulthandler
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from pytest_timeout import Settings as TimeoutSettings

from tests import leftovers

CI_EXAMPLES = 50
LONG_EXAMPLES = 40 * CI_EXAMPLES
LONG_TIMEOUT = 2 * 60 * 60.0
GRACE = 15.0  # for the failed test's fixtures to clean up before the watchdog ends the run

# Before torch is loaded, here and in every program a test starts: dozens of processes share the cores, and OpenMP's
# threads of each would spin on those of the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# No deadline per example: the suite's timeout holds, and a shared machine makes single examples slow at random.
_common = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", _common, max_examples=CI_EXAMPLES, derandomize=True, database=None)
settings.register_profile("long", _common, max_examples=LONG_EXAMPLES)
settings.load_profile("ci")

# A shell that starts the suite in the background has it ignore Ctrl-C, and so would every program a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_real_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_real_stderr] = os.dup(2)  # capturing is suspended here, so this is the terminal
    leftovers.adopt_orphans()


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_real_stderr])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long = _is_long()
    for item in items:
        if long and (item.get_closest_marker("chaos") or item.get_closest_marker("long")):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT), append=False)
        elif not long and item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="runs with --hypothesis-profile=long"))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: TimeoutSettings) -> None:
    """Arm the watchdog; returning None lets pytest-timeout set its own timer as well."""
    if settings.timeout:
        faulthandler.dump_traceback_later(settings.timeout + GRACE, exit=True, file=item.config.stash[_real_stderr])


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def long_profile() -> bool:
    """Whether a test that counts by itself (kills, minutes) should run at full length."""
    return _is_long()


# One per scope: each is set up before, and torn down after, the other fixtures of its scope, so a cluster shared by a
# module is seen by the module's check and not held against the first test that uses it.
@pytest.fixture(autouse=True, scope="session")
def session_leaves_nothing_running() -> Iterator[None]:
    yield from _leaves_nothing_running("the session")


@pytest.fixture(autouse=True, scope="module")
def module_leaves_nothing_running(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from _leaves_nothing_running(request.node.name)


@pytest.fixture(autouse=True)
def leaves_nothing_running(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from _leaves_nothing_running(request.node.name)


def _leaves_nothing_running(who: str) -> Iterator[None]:
    before, agent = leftovers.running_now(), leftovers.agent_now()
    yield
    if (forgotten := leftovers.agent_now()) is not None and forgotten is not agent:
        leftovers.end_agent()
        pytest.fail(f"{who} left {forgotten}", pytrace=False)
    if left := leftovers.left_since(before):
        report = str(left)
        leftovers.kill(left)
        pytest.fail(f"{who} left running:\n{report}", pytrace=False)


def _is_long() -> bool:
    return settings.default is not None and settings.default.max_examples >= LONG_EXAMPLES
