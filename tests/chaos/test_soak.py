"""Half an hour of mixed load from eight workers: no error, and memory that stays flat."""

import os

import pytest

from tests.chaos.soak import soak


@pytest.mark.slow
@pytest.mark.long
def test_soak() -> None:
    assert soak(float(os.environ.get("TELEGRAD_SOAK_MINUTES", "30"))) > 0
