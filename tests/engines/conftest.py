"""Tests on real engines run by `make test-engines`, which installs what it can; elsewhere they are left out."""

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TELEGRAD_TEST_ENGINES") != "1":
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="runs with `make test-engines`"))
