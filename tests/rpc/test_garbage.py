"""What the garbage collector has found alive in a worker once is not walked again until that worker leaves."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from telegrad import rpc


class Knot:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_set_aside() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def join(folder: Path) -> None:
    options = rpc.RpcBackendOptions(init_method=f"file://{folder}/meeting")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)


def test_what_lives_is_set_aside_and_what_comes_later_is_collected(tmp_path: Path) -> None:
    before, garbage = Knot(), Knot()
    ended: list[str] = []
    kept = [weakref.finalize(before, ended.append, "before"), weakref.finalize(garbage, ended.append, "garbage")]
    del garbage
    join(tmp_path)
    try:
        gc.collect()
        assert gc.get_freeze_count() > 10_000
        assert ended == ["garbage"], "what was garbage by then is not kept"
        during = Knot()
        kept.append(weakref.finalize(during, ended.append, "during"))
        del before, during
        gc.collect()
        assert ended == ["garbage", "during"]
    finally:
        rpc.shutdown()
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert ended == ["garbage", "during", "before"]


def test_joining_walks_nothing(tmp_path: Path) -> None:
    before = gc.get_stats()[2]["collections"]
    gc.disable()  # not by itself, either
    try:
        join(tmp_path)
        assert gc.get_stats()[2]["collections"] == before
    finally:
        gc.enable()
        rpc.shutdown()


def test_what_the_program_has_set_aside_itself_stays_so(tmp_path: Path) -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    join(tmp_path)
    late = Knot()
    ended = weakref.finalize(late, int)
    del late
    gc.collect()
    assert not ended.alive
    rpc.shutdown()
    assert gc.get_freeze_count() >= frozen - 100  # some of it has been freed


def test_a_program_may_take_it_back(tmp_path: Path) -> None:
    before = Knot()
    ended = weakref.finalize(before, int)
    join(tmp_path)
    gc.collect()
    gc.unfreeze()
    del before
    gc.collect()
    assert not ended.alive
    rpc.shutdown()
