"""`collect_all` and `wait_all` over futures of calls: all values, or the first error as soon as it is known."""

import pytest
import torch

from telegrad.compat.futures import collect_all, wait_all
from telegrad.rpc.futures import Future


def futures(count: int) -> list[Future[int]]:
    return [Future(what="a call") for _ in range(count)]


def test_values_come_in_order() -> None:
    calls = futures(3)
    for value in (2, 0, 1):
        calls[value].set_result(value)
    assert wait_all(calls) == [0, 1, 2]


def test_the_first_error_is_not_kept_waiting() -> None:
    calls = futures(3)
    collected = collect_all(calls)
    calls[1].set_exception(ValueError("first"))
    assert collected.done()
    calls[2].set_exception(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        wait_all(calls)
    with pytest.raises(ValueError, match="first"):
        collected.wait()
    with pytest.raises(ValueError, match="second"):
        calls[2].wait()
    calls[0].set_result(0)
    with pytest.raises(ValueError, match="first"):
        collected.wait()


def test_a_last_value_after_an_error_changes_nothing() -> None:
    calls = futures(2)
    collected = collect_all(calls)
    calls[0].set_result(0)
    calls[1].set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        collected.wait()


def test_torchs_own_futures_are_torchs_business() -> None:
    plain: torch.futures.Future[int] = torch.futures.Future()
    plain.set_result(3)
    assert [future.wait() for future in collect_all([plain]).wait()] == [3]
    assert wait_all([plain]) == [3]
