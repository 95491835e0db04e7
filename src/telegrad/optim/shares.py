"""`shares.py` decides which owner optimizes which parameters. It calls nobody.

A trainer numbers its parameters in the order given, as torch.optim does in a state dict. Those numbers name a parameter
between trainer and owners, so whatever is gathered from the owners can be put back into the order of one process.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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

    def local_params(self) -> list[torch.Tensor]:
        """The parameters themselves; only their owner can ask."""
        return [param.local_value() for param in self.params]


def parameter_groups(params_rref: Iterable[Any]) -> tuple[list[dict[str, Any]], bool]:
    """`params_rref` as groups, each a dict with its `params` as a list of references; and whether it came in groups.

    Takes what torch.optim takes: references, or dicts of references with their own options. A tensor of this process
    stands for a reference to itself.
    """
    if _is_one(params_rref):
        raise TypeError(
            f"DistributedOptimizer takes a list of references to parameters, not one {type(params_rref).__name__}; "
            "put it in a list"
        )
    entries = list(params_rref)
    if not entries:
        raise ValueError("optimizer got an empty parameter list: give it references to the parameters to train")
    grouped = isinstance(entries[0], Mapping)
    groups = entries if grouped else [{"params": entries}]
    return [_one_group(number, group) for number, group in enumerate(groups)], grouped


def _one_group(number: int, group: Any) -> dict[str, Any]:
    if not isinstance(group, Mapping) or "params" not in group:
        raise TypeError(
            f"parameter group {number} is {type(group).__name__}, not a dict with 'params'; "
            "give either references only, or dicts only"
        )
    params = group["params"]
    if _is_one(params):
        params = [params]
    return {**group, "params": [_reference(param) for param in params]}


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


def split_by_owner(groups: Sequence[Mapping[str, Any]]) -> dict[str, list[GroupShare]]:
    """For each owner's name, its share of every group that has parameters there, in the order owners are met."""
    shares: dict[str, list[GroupShare]] = {}
    first_index = 0
    for number, group in enumerate(groups):
        options = {key: value for key, value in group.items() if key != "params"}
        by_owner: dict[str, list[int]] = {}
        for position, param in enumerate(group["params"]):
            by_owner.setdefault(param.owner_name(), []).append(position)
        for owner, positions in by_owner.items():
            shares.setdefault(owner, []).append(
                GroupShare(
                    group=number,
                    indices=tuple(first_index + position for position in positions),
                    params=tuple(group["params"][position] for position in positions),
                    options=options,
                )
            )
        first_index += len(group["params"])
    return shares


def changed_options(groups: Sequence[Options], known: Sequence[Options]) -> dict[int, Options]:
    """What the owners do not know yet: for each group, the options that differ from the ones last told them."""
    changes = {}
    for number, (group, told) in enumerate(zip(groups, known, strict=True)):
        changed = {
            key: value for key, value in group.items() if key != "params" and not _same(value, told.get(key, _UNTOLD))
        }
        if changed:
            changes[number] = changed
    return changes


def options_of(group: Options) -> Options:
    """A snapshot of a group's options: a tensor, such as a capturable learning rate, is changed in place by others."""
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


_UNTOLD = object()


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor) or isinstance(theirs, torch.Tensor):
        return isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor) and torch.equal(ours, theirs)
    return type(ours) is type(theirs) and bool(ours == theirs)
