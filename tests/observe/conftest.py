"""What holds for all tests of observing: a worker gets the time to answer, however slow the machine."""

from collections.abc import Iterator

import pytest

from telegrad.observe import asking

PATIENCE = 30.0  # seconds instead of two; one that is stopped or killed is given up by the heartbeat, long before


@pytest.fixture(autouse=True, scope="module")
def patience() -> Iterator[None]:
    """Those that this process asks are given up later."""
    with pytest.MonkeyPatch.context() as patch:
        for each in (asking.ask, asking.ask_all):
            patch.setattr(each, "__defaults__", (b"", PATIENCE))
        yield
