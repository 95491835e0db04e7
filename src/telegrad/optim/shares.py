"""`shares.py` decides which owner optimizes which parameters. It calls nobody.

A trainer numbers its parameters in the order given, as torch.optim does in a state dict. Those numbers name a parameter
between trainer and owners, so whatever is gathered from the owners can be put back into the order of one process.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from telegrad import rpc

Options = dict[str, Any]


@dataclass(frozen=True)
class GroupShare:
    """The part of one parameter group that lives on one owner."""

    group: int
    indices: tuple[int, ...]
    params: tuple[Any, ...]
    options: Options
    names: tuple[str, ...] | None = None

    def local_params(self) -> list[torch.Tensor]:
        """The parameters themselves; only their owner can ask."""
        return [param.local_value() for param in self.params]

    def local_group(self) -> dict[str, Any]:
        """The parameters themselves, with names and options, as a group that torch.optim takes."""
        params = self.local_params()
        return {**self.options, "params": params if self.names is None else list(zip(self.names, params, strict=True))}


def parameter_groups(params_rref: Iterable[Any]) -> tuple[list[dict[str, Any]], bool]:
    """`params_rref` as groups, each a dict with its `params` as a list of references; and whether it came in groups.

    Takes what torch.optim takes: references, or dicts of references with their own options. A tensor of this process
    stands for a reference to itself. Pairs of a name and a reference give the group its `param_names`.
    """
    if _is_one(params_rref):
        raise TypeError(
            f"DistributedOptimizer takes a list of references to parameters, not one {type(params_rref).__name__}; "
            "put it in a list"
        )
    if isinstance(params_rref, torch.nn.Module):
        raise TypeError(
            "DistributedOptimizer takes references to parameters, not a model: pass "
            "`telegrad.nn.remote_parameters(model)`, which finds those of its RemoteModules, too"
        )
    entries = list(params_rref)
    if not entries:
        raise ValueError("optimizer got an empty parameter list: give it references to the parameters to train")
    grouped = isinstance(entries[0], Mapping)
    groups = entries if grouped else [{"params": entries}]
    checked = [one_group(number, group) for number, group in enumerate(groups)]
    check_names(checked)
    return checked, grouped


def check_names(groups: Sequence[Mapping[str, Any]]) -> None:
    """Either all groups have names for their parameters, or none has."""
    if len({"param_names" in group for group in groups}) > 1:
        raise ValueError(
            "all optimizer param groups should be with/without names; give pairs of name and reference everywhere, "
            "or references only"
        )


def one_group(number: int, group: Any) -> dict[str, Any]:
    """Parameter group `number` as a dict with its `params` as a list of references, and its `param_names` if it has."""
    if not isinstance(group, Mapping) or "params" not in group:
        raise TypeError(
            f"parameter group {number} is {type(group).__name__}, not a dict with 'params'; "
            "give either references only, or dicts only"
        )
    params = group["params"]
    params = [params] if _is_one(params) else list(params)
    names = [param[0] for param in params if isinstance(param, tuple)]
    if not names:
        return {**group, "params": [_reference(param) for param in params]}
    if len(names) < len(params):
        raise ValueError(
            "all optimizer params should be with/without names. Some param names are missing: parameter group "
            f"{number} has {len(params)} parameters and {len(names)} names"
        )
    return {**group, "params": [_reference(param) for _, param in params], "param_names": names}


def _reference(param: Any) -> Any:
    if isinstance(param, torch.Tensor):
        return rpc.RRef(param)
    if _is_one(param):
        return param
    raise TypeError(
        f"DistributedOptimizer optimizes references to parameters, not {type(param).__name__}; "
        "make one with RRef(parameter) on its owner, or take RemoteModule.remote_parameters()"
    )


def _is_one(value: Any) -> bool:
    """Whether this is one parameter, by itself or by reference, and not a collection of them."""
    return isinstance(value, torch.Tensor) or hasattr(value, "owner_name")


def split_by_owner(
    groups: Sequence[Mapping[str, Any]], first_group: int = 0, first_index: int = 0
) -> dict[str, list[GroupShare]]:
    """For each owner's name, its share of every group that has parameters there, in the order owners are met.

    Groups and parameters are numbered from those given: earlier ones were split before."""
    shares: dict[str, list[GroupShare]] = {}
    for number, group in enumerate(groups, first_group):
        names = group.get("param_names")
        by_owner: dict[str, list[int]] = {}
        for position, param in enumerate(group["params"]):
            by_owner.setdefault(param.owner_name(), []).append(position)
        for owner, positions in by_owner.items():
            shares.setdefault(owner, []).append(
                GroupShare(
                    group=number,
                    indices=tuple(first_index + position for position in positions),
                    params=tuple(group["params"][position] for position in positions),
                    options={key: value for key, value in group.items() if key not in _NOT_OPTIONS},
                    names=None if names is None else tuple(names[position] for position in positions),
                )
            )
        first_index += len(group["params"])
    return shares


class Told:
    """The options of all groups as the owners were told of them."""

    def __init__(self, groups: Sequence[Options]) -> None:
        self.options: list[Options] = []
        self._seen: list[tuple[Any, ...]] | None = []  # what each group had, to be seen at a glance; if it can be
        for group in groups:
            self.add(group)

    @classmethod
    def of(cls, options: list[Options]) -> "Told":
        """These options, which were saved."""
        told = cls(())
        told.options, told._seen = options, None
        return told

    def add(self, group: Options) -> None:
        """One more group."""
        self.options.append(options_of(group))
        if self._seen is not None:
            self._seen.append(_contents(group))
        if not all(_is_fixed(value) for key, value in group.items() if key not in _NOT_OPTIONS):
            self._seen = None  # it may be changed in place

    def doubt(self, changes: Mapping[int, Options]) -> None:
        """Owners are about to be told of these: until all are known to have taken them, none of the values is relied
        on, neither the new ones nor those before."""
        if changes:
            self._seen = None
            self.options = [
                {key: value for key, value in told.items() if key not in changes.get(number, ())}
                for number, told in enumerate(self.options)
            ]

    def are_still(self, groups: Sequence[Options]) -> bool:
        """Whether the groups have the very same values: then they need not be compared one by one."""
        seen = self._seen
        if seen is None or len(groups) != len(seen):
            return False
        for group, before in zip(groups, seen, strict=True):
            now = _contents(group)
            if len(now) != len(before) or not all(map(is_, now, before)):
                return False
        return True


def _contents(group: Options) -> tuple[Any, ...]:
    return *group, *group.values()


def changed_options(groups: Sequence[Options], known: Sequence[Options]) -> dict[int, Options]:
    """What the owners do not know yet: for each group, the options that differ from the ones last told them."""
    changes = {}
    for number, (group, told) in enumerate(zip(groups, known, strict=True)):
        changed = {
            key: value
            for key, value in group.items()
            if key not in _NOT_OPTIONS and not _same(value, told.get(key, _UNTOLD))
        }
        if changed:
            changes[number] = changed
    return changes


def options_of(group: Options) -> Options:
    """A snapshot of a group's options: a tensor, such as a capturable learning rate, is changed in place by others, and
    so may be one within a pair of betas, or a list."""
    return {key: _snapshot(value) for key, value in group.items() if key not in _NOT_OPTIONS}


def _snapshot(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is tuple or type(value) is list:
        return type(value)(map(_snapshot, value))
    if type(value) is dict:
        return {key: _snapshot(item) for key, item in value.items()}
    return value


def _is_fixed(value: Any) -> bool:
    """Whether it stays as it is, as long as it is the same object."""
    if type(value) is tuple:
        return all(map(_is_fixed, value))
    return value is None or isinstance(value, _FIXED)


_UNTOLD = object()
_FIXED = (int, float, complex, str, bytes, torch.dtype, torch.device)
_NOT_OPTIONS = ("params", "param_names")  # which parameters a group has: each owner has its own part of those


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor) or isinstance(theirs, torch.Tensor):
        return isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor) and torch.equal(ours, theirs)
    if type(ours) is not type(theirs):
        return False
    if type(ours) is tuple or type(ours) is list:
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if type(ours) is dict:
        return ours.keys() == theirs.keys() and all(_same(value, theirs[key]) for key, value in ours.items())
    return bool(ours == theirs)
