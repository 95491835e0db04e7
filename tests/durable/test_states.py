"""States are exact: what was saved comes back in every bit, and shares no memory with what goes on changing."""

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from telegrad import durable
from telegrad.durable.snapshot import disk
from telegrad.durable.snapshot.copies import copy_aside, find_unplain
from telegrad.durable.snapshot.generators import load_generators, save_generators
from telegrad.durable.snapshot.names import Snapshot
from telegrad.durable.snapshot.states import access_to
from telegrad.errors import DurableError


class Everything(nn.Module):
    """A module with all that a module can have, beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.register_buffer("late", None)
        self.note = "new"

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state


def changed() -> Everything:
    module = Everything()
    module.norm.eval()
    module.layer.weight.requires_grad_(False)
    module.seen += 3
    module.late = torch.tensor([5.0])
    module.note = "old"
    return module


def test_a_module_comes_back_with_what_its_state_dict_leaves_out() -> None:
    module = changed()
    state = copy_aside(access_to(module).save(module))
    fresh = Everything()
    weight = fresh.layer.weight
    access_to(fresh).load(fresh, state)
    assert fresh.layer.weight is weight  # an optimizer holds it
    assert torch.equal(weight, module.layer.weight) and not weight.requires_grad
    assert not fresh.norm.training and fresh.layer.training and fresh.layer.bias.requires_grad
    assert fresh.seen.item() == 3 and fresh.late.item() == 5 and fresh.note == "old"


def test_a_copy_is_written_over_an_older_one_and_shares_nothing_with_its_source() -> None:
    source = {"a": torch.ones(3), "b": [torch.zeros(2), 7], "c": OrderedDict(x={1, 2})}
    first = copy_aside(source)
    source["a"] += 1
    source["c"]["x"].add(3)
    assert first["a"].tolist() == [1, 1, 1] and first["c"]["x"] == {1, 2} and type(first["c"]) is OrderedDict
    memory = first["a"].data_ptr()
    second = copy_aside(source, first)
    assert second["a"].data_ptr() == memory and second["a"].tolist() == [2, 2, 2]
    assert copy_aside({"a": torch.ones(4)}, second)["a"].data_ptr() != memory


def test_a_transposed_tensor_is_copied_as_it_lies() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    first = copy_aside(tensor)
    again = copy_aside(tensor, first)
    assert again is first and torch.equal(again, tensor) and again.stride() == tensor.stride()


class KeepsFloats(torch.optim.SGD):
    """Keeps a state in another dtype than its parameters, which torch would cast when it loads."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param]["sum"] = torch.full((2,), 1 / 3, dtype=torch.float32)


def test_an_optimizer_keeps_the_dtype_of_its_state() -> None:
    optimizers = [KeepsFloats([torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)]) for _ in range(2)]
    optimizers[0].step()
    access = access_to(optimizers[0])
    access.load(optimizers[1], copy_aside(access.save(optimizers[0])))
    [loaded] = optimizers[1].state.values()
    assert loaded["sum"].dtype is torch.float32 and loaded["sum"][0] == torch.tensor(1 / 3)


@given(st.integers(0, 2**31), st.integers(0, 5))
def test_generators_go_on_where_they_were(seed: int, drawn: int) -> None:
    numpy = pytest.importorskip("numpy")
    before = save_generators()
    try:
        own = [torch.Generator().manual_seed(seed), random.Random(seed), numpy.random.default_rng(seed)]
        draw = [lambda: torch.rand(1, generator=own[0]).item(), own[1].random, own[2].random]
        draw += [lambda: torch.rand(1).item(), random.random, numpy.random.rand]
        for each in draw * drawn:
            each()
        states = [copy_aside(access_to(generator).save(generator)) for generator in own]
        shared = copy_aside(save_generators())
        expected = [each() for each in draw * 3]
        for generator, state in zip(own, states, strict=True):
            access_to(generator).load(generator, state)
        load_generators(shared)
        assert [each() for each in draw * 3] == expected
    finally:
        load_generators(before)


def test_what_has_no_state_says_what_to_give() -> None:
    with pytest.raises(TypeError, match=r"a set has no state_dict.*`save=`"):
        access_to(set())


# --- on disk ---


def part(**values: Any) -> dict[str, Any]:
    return {"values": values, "generators": save_generators()}


def test_a_part_is_read_as_it_was_written(tmp_path: Path) -> None:
    module = changed()
    snapshot = Snapshot(40, 1, 255)
    written = part(module=copy_aside(access_to(module).save(module)))
    disk.write_part(tmp_path, snapshot, "w1", written)
    read = disk.read_part(tmp_path, snapshot, "w1")
    load_generators(read["generators"])
    fresh = Everything()
    access_to(fresh).load(fresh, read["values"]["module"])
    assert fresh.late.item() == 5
    with pytest.raises(DurableError, match=r"worker 'w2' does not find .*40.1.ff/w2.pt"):
        disk.read_part(tmp_path, snapshot, "w2")
    (tmp_path / "40.1.ff" / "w1.pt").write_bytes(b"no")
    with pytest.raises(DurableError, match="cannot be read"):
        disk.read_part(tmp_path, snapshot, "w1")


def test_only_whole_snapshots_count_and_the_two_newest_stay(tmp_path: Path) -> None:
    members = ("w0", "w1")
    for step in (10, 9, 30, 20):
        snapshot = Snapshot(step, 1, 7)
        disk.write_part(tmp_path, snapshot, "w0", part())
        if step != 30:
            disk.seal(tmp_path, snapshot, members)
    assert sorted(snapshot.step for snapshot in disk.sealed(tmp_path, members)) == [10, 20]
    with pytest.raises(DurableError, match="another directory, or another name"):
        disk.sealed(tmp_path, ("w0",))


def test_what_a_file_cannot_hold_is_named(tmp_path: Path) -> None:
    assert find_unplain({"a": [torch.ones(1), (1, "x", None)]}, "it") is None
    with pytest.raises(DurableError, match=r"the state of durable value 'losses'\['x'\]\[1\] is a PosixPath"):
        disk.write_part(tmp_path, Snapshot(1, 1, 1), "w", part(losses={"x": [1, tmp_path]}))


def test_what_a_run_needs_is_checked_first() -> None:
    with pytest.raises(ValueError, match="needs a directory"):
        durable.Run("x", copies=0)
    with pytest.raises(ValueError, match="every=0"):
        durable.Run("x", every=0)
