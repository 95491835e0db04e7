"""Who optimizes what, decided without any worker."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from telegrad.optim.shares import Told, changed_options, options_of, parameter_groups, split_by_owner


@dataclass(frozen=True)
class Reference:
    """Stands for an RRef: what `shares` asks of one."""

    owner: str
    name: str

    def owner_name(self) -> str:
        return self.owner


A, B, C, D = Reference("ps0", "a"), Reference("ps1", "b"), Reference("ps0", "c"), Reference("ps1", "d")


def test_parameters_are_numbered_in_the_order_given() -> None:
    groups, grouped = parameter_groups([A, B, C])
    assert not grouped
    shares = split_by_owner(groups)
    assert {owner: [(share.indices, share.params) for share in mine] for owner, mine in shares.items()} == {
        "ps0": [((0, 2), (A, C))],
        "ps1": [((1,), (B,))],
    }


def test_each_owner_gets_the_groups_it_has_parameters_of() -> None:
    groups, grouped = parameter_groups(iter([{"params": A, "lr": 1.0}, {"params": [B, C]}, {"params": [D], "lr": 3.0}]))
    assert grouped
    shares = split_by_owner(groups)
    assert [(share.group, share.indices, share.options) for share in shares["ps0"]] == [
        (0, (0,), {"lr": 1.0}),
        (1, (2,), {}),
    ]
    assert [(share.group, share.indices, share.options) for share in shares["ps1"]] == [
        (1, (1,), {}),
        (2, (3,), {"lr": 3.0}),
    ]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ([], ValueError, "empty parameter list"),
        (A, TypeError, "put it in a list"),
        (torch.zeros(1), TypeError, "put it in a list"),
        ([1.5], TypeError, "not float; make one with RRef"),
        ([{"params": [A]}, B], TypeError, "group 1 is Reference"),
        ([{"lr": 1.0}], TypeError, "group 0"),
    ],
)
def test_what_cannot_be_optimized_is_refused(given: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        parameter_groups(given)


def test_only_what_changed_is_told() -> None:
    told = [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.1}]
    groups = [
        {"params": [A], "lr": 0.1, "betas": (0.8, 0.99)},
        {"params": [B], "lr": 0.1, "initial_lr": 0.1},
    ]
    assert changed_options(groups, told) == {0: {"betas": (0.8, 0.99)}, 1: {"initial_lr": 0.1}}
    assert changed_options(groups, [options_of(group) for group in groups]) == {}


def test_a_tensor_changed_in_place_is_a_change() -> None:
    group = {"params": [A], "lr": torch.tensor(0.1)}
    told = [options_of(group)]
    assert changed_options([group], told) == {}
    group["lr"].fill_(0.2)
    assert changed_options([group], told) == {0: {"lr": torch.tensor(0.2)}}


@pytest.mark.parametrize(
    ("option", "change"),
    [
        ((torch.tensor(0.9), 0.99), lambda betas: betas[0].fill_(0.1)),
        ([0.9, 0.99], lambda betas: betas.__setitem__(0, 0.1)),
        ({"beta": 0.9}, lambda betas: betas.update(beta=0.1)),
        ((0.9, [0.99]), lambda betas: betas[1].append(0.1)),
    ],
)
def test_what_is_changed_within_an_option_is_a_change(option: Any, change: Callable[[Any], object]) -> None:
    group = {"params": [A], "betas": option}
    told = Told([group])
    assert changed_options(Told([group]).options, told.options) == {}
    change(option)
    assert not told.are_still([group])
    assert 0 in changed_options(Told([group]).options, told.options)


def test_a_switch_is_not_the_number_it_equals() -> None:
    assert changed_options([{"maximize": True}], [{"maximize": 1}]) == {0: {"maximize": True}}


def test_groups_that_stay_as_they_are_need_no_comparison() -> None:
    groups = [{"params": [A], "lr": 0.1, "betas": (0.9, 0.99)}, {"params": [B], "lr": 0.2}]
    told = Told(groups)
    assert told.are_still(groups)
    groups[1]["lr"] = 0.3
    assert not told.are_still(groups)
    assert changed_options(Told(groups).options, told.options) == {1: {"lr": 0.3}}
    groups[1]["lr"] = told.options[1]["lr"]
    assert told.are_still(groups)
    groups.append({"params": [C]})
    assert not told.are_still(groups)
    told.add(groups[2])
    assert told.are_still(groups)


def test_what_perhaps_not_all_have_taken_is_told_again() -> None:
    groups: list[dict[str, Any]] = [{"params": [A], "lr": 0.1, "momentum": 0.9}, {"params": [B], "lr": 0.2}]
    told = Told(groups)
    told.doubt({})
    assert told.are_still(groups)
    told.doubt({0: {"lr": 0.3}})
    assert not told.are_still(groups)
    assert changed_options(groups, told.options) == {0: {"lr": 0.1}}


@pytest.mark.parametrize("change", [lambda group: group.update(foreach=None), lambda group: group.pop("lr")])
def test_an_option_more_or_less_is_seen(change: Callable[[dict[str, Any]], object]) -> None:
    group: dict[str, Any] = {"params": [A], "lr": None}
    told = Told([group])
    change(group)
    assert not told.are_still([group])


def test_an_option_of_another_name_is_seen() -> None:
    assert not Told([{"params": [A], "maximize": None}]).are_still([{"params": [A], "foreach": None}])


def test_a_tensor_among_the_options_is_always_compared() -> None:
    groups = [{"params": [A], "lr": torch.tensor(0.1)}]
    told = Told(groups)
    assert not told.are_still(groups)
    groups[0]["lr"].mul_(2)  # type: ignore[attr-defined] # a tensor
    assert 0 in changed_options(Told(groups).options, told.options)
