"""Stands in for `torch.distributed.rpc._utils`: turns that workers of an open job take when they join or leave."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TOKEN = "RpcGroupManagementToken"


@contextmanager
def _group_membership_management(store: Any, name: str, is_join: bool) -> Iterator[None]:
    """Hold the job's one token. Telegrad's own workers need none; programs guard their own joining with it."""
    mine = f"Token_for_{name}_{'join' if is_join else 'leave'}"
    while True:
        holder = store.compare_set(_TOKEN, "", mine).decode()
        if holder == mine:
            break
        store.wait([holder])
    yield
    store.set(_TOKEN, "")
    store.set(mine, "Done")
