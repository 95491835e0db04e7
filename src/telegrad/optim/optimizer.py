"""`DistributedOptimizer` is the trainer's side: options and order. Parameters, gradients and state are the owners'.

    trainer                                        each owner
    step(context, max_norm) -- norms of gradients -->  LocalOptimizer.norms     (only when clipping)
                            -- changed options,    -->  LocalOptimizer.step
                               scale, shrink

The trainer keeps `param_groups` as any torch optimizer does, one per group however many owners share it. Whatever
changes there, by hand or by a scheduler of torch.optim.lr_scheduler, travels with the next step: a schedule costs no
round trip.
"""

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch

from telegrad import rpc
from telegrad.autograd.outside import warn_where_called
from telegrad.autograd.registry import within
from telegrad.optim.clip import shrink_factor, total_norm
from telegrad.optim.gradients import check_context
from telegrad.optim.owner import LocalOptimizer, create, on_owner, on_owner_by_reference
from telegrad.optim.rounds import ask_all
from telegrad.optim.shares import (
    Options,
    Told,
    changed_options,
    check_names,
    one_group,
    options_of,
    parameter_groups,
    split_by_owner,
)
from telegrad.optim.unobserved import unless_observed
from telegrad.rref.value_on_owner import id_for_owner


class DistributedOptimizer(torch.optim.Optimizer):
    """One optimizer over parameters that live on several workers.

    `optimizer_class(params, *args, **kwargs)` is made on each worker that owns any of `params_rref`: references to
    parameters, pairs of a name and a reference, or dicts of these with options of their own, as torch.optim takes
    groups. Concurrent steps, from this
    trainer or others, are each applied whole on each owner, in no set order among owners.

    It is a `torch.optim.Optimizer` to learning-rate schedulers and to anything else that reads `param_groups`.

    Examples:
        >>> layer = RemoteModule("worker1", torch.nn.Linear, args=(2, 1))
        >>> optimizer = DistributedOptimizer(torch.optim.SGD, layer.remote_parameters(), lr=0.1)
        >>> with autograd.context() as context_id:
        ...     autograd.backward(context_id, [layer(torch.ones(1, 2)).sum()])
        ...     optimizer.step(context_id)
    """

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], params_rref: Iterable[Any] = (), *args: Any, **kwargs: Any
    ) -> None:
        _check_class(optimizer_class)
        groups, grouped = parameter_groups(params_rref)
        self._how = (optimizer_class, args, kwargs)
        self._never_found = True  # whether no step yet had a gradient
        self._has_warned = False
        self._telling = threading.Lock()  # held by the one that changes what owners know of the groups, until they do
        self._shares = split_by_owner(groups)
        made = self._create_locals(grouped)
        self._locals = {owner: local for owner, (local, _, _) in made.items()}
        _, defaults, _ = next(iter(made.values()))
        for _, _, options in made.values():
            for number, resolved in options.items():
                groups[number].update(resolved)
        super().__init__(groups, defaults)
        self._told = Told(self.param_groups)

    def _create_locals(self, grouped: bool) -> dict[str, tuple[Any, Options, dict[int, Options]]]:
        """Each owner's local optimizer, as a reference, and its description."""
        optimizer_class, args, kwargs = self._how
        return ask_all(
            f"creating {getattr(optimizer_class, '__name__', optimizer_class)}",
            {owner: (create, optimizer_class, mine, grouped, args, kwargs) for owner, mine in self._shares.items()},
        )

    @property
    def remote_optimizers(self) -> list[Any]:
        """References to the optimizers on the owners."""
        return list(self._locals.values())

    @unless_observed
    def step(  # type: ignore[override] # wider than torch's on purpose
        self,
        context_id: int | None = None,
        *,
        scale: float = 1.0,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor | None:
        """Apply the gradients of `context_id`, and what was accumulated before, on all owners at once.

        The sum is multiplied by `scale`; with `max_norm` it is then clipped by its norm over all owners, and that norm
        is returned. Parameters without gradient are left alone. One round trip, two with clipping.
        """
        if context_id is not None:
            check_context(context_id)
        total = shrink = None
        if max_norm is not None:
            norm_type = float(norm_type)
            norms = self._ask_owners("clipping", LocalOptimizer.norms, context_id, scale, norm_type)
            total = total_norm(norms.values(), norm_type, error_if_nonfinite)
            shrink = shrink_factor(total, float(max_norm))
        if self._told.are_still(self.param_groups):
            steps = self._ask_owners("the optimizer step", LocalOptimizer.step, context_id, scale, shrink)
            self._look_at(steps, context_id)
            return total
        with self._telling:
            telling = Told(self.param_groups)
            changes = changed_options(telling.options, self._told.options)
            # If the step fails below, some owners have taken the changes and others have not: all are told again next
            # time, also of what was changed back meanwhile.
            self._told.doubt(changes)
            steps = self._ask_owners("the optimizer step", LocalOptimizer.step, context_id, scale, shrink, changes)
            self._told = telling
        self._look_at(steps, context_id)
        return total

    def _look_at(self, steps: Mapping[str, str | None], context_id: int | None) -> None:
        """Warn once, if none of the steps so far has found a gradient: that is seldom what was meant."""
        if self._never_found:
            self._never_found = all(steps.values())
            if self._never_found and not self._has_warned:
                self._has_warned = True
                why = (
                    "nothing was accumulated. Give `step` the id of a context, or call `accumulate` with it before"
                    if context_id is None
                    else f"none has a gradient in context {context_id}. Was backward run with this context, and are "
                    "these the parameters that the calls used? One that was fetched from another worker is a copy: "
                    "give references, as from RemoteModule.remote_parameters() or rpc.RRef on the owner"
                )
                warn_where_called(f"the step changed none of the parameters: {why}", UserWarning)

    def accumulate(self, context_id: int) -> None:
        """Add the gradients of `context_id` to what the next `step` applies. The context may end after this."""
        check_context(context_id)
        self._ask_owners("accumulating gradients", LocalOptimizer.accumulate, context_id)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what was accumulated. Not needed between steps: what a step applied is gone with it."""
        self._ask_owners("zero_grad", LocalOptimizer.discard)

    def state_dict(self) -> dict[str, Any]:
        """The whole, in the form one torch optimizer over the same parameters in one process would give it."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state: dict[int, Any] = {}
        options: dict[int, Options] = {}
        with self._telling:
            for owned_state, owned_options in self._ask_owners("state_dict", LocalOptimizer.state).values():
                state.update(owned_state)
                options.update(owned_options)
            # The owners' options first, since an optimizer may change its own; then what they have not been told yet.
            ours = [*self.param_groups]
            changes = changed_options(ours, self._told.options)
        groups, first = [], 0
        for number, group in enumerate(ours):
            count = len(group["params"])
            current = {**options[number], **changes.get(number, {})}
            names = {"param_names": list(group["param_names"])} if "param_names" in group else {}
            groups.append({**options_of(current), **names, "params": list(range(first, first + count))})
            first += count
        whole: dict[str, Any] = {"state": dict(sorted(state.items())), "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            whole = after(self, whole) or whole
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each owner its part of a state: of this class, or of a torch optimizer over the same parameters."""
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        saved_groups = state_dict["param_groups"]
        ours, theirs = ([len(group["params"]) for group in groups] for groups in (self.param_groups, saved_groups))
        if ours != theirs:
            raise ValueError(
                f"the state has parameter groups of {theirs} parameters, this optimizer of {ours}; "
                "load it into an optimizer made over the same parameters, in the same groups and order"
            )
        # A state numbers its parameters as it likes; their order is what counts.
        numbers = [number for group in saved_groups for number in group["params"]]
        saved = state_dict["state"]
        state = {index: saved[number] for index, number in enumerate(numbers) if number in saved}
        options = {number: options_of(deepcopy(group)) for number, group in enumerate(saved_groups)}
        names = [name for group in saved_groups for name in group.get("param_names", ())]
        calls = {}
        for owner, shares in self._shares.items():
            mine = {index: state[index] for share in shares for index in share.indices if index in state}
            my_options = {share.group: dict(options[share.group]) for share in shares}
            for share in shares if names else ():
                my_options[share.group]["param_names"] = [names[index] for index in share.indices]
            calls[owner] = _asking(self._locals[owner], LocalOptimizer.load_state, mine, my_options)
        with self._telling:
            self._told.doubt(options)  # as in a step
            ask_all("load_state_dict", calls)
            for number, group in enumerate(self.param_groups):
                kept = {key: group[key] for key in ("params", "param_names") if key in group}
                if "param_names" in saved_groups[number]:
                    kept["param_names"] = list(saved_groups[number]["param_names"])
                group.clear()
                group.update(options_of(options[number]), **kept)
            self._told = Told(self.param_groups)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Optimize more parameters, with options of their own; their owners may be others than before.

        All owners take their part, or none does: where one fails, what the others took is taken back.
        """
        if not hasattr(self, "_told"):  # torch.optim.Optimizer shows the groups, as it is made
            self.param_groups.append(param_group)
            return
        with self._telling:
            self._add_group(param_group)

    def _add_group(self, param_group: dict[str, Any]) -> None:
        number, first = len(self.param_groups), sum(len(group["params"]) for group in self.param_groups)
        group = one_group(number, param_group)
        check_names([*self.param_groups, group])
        optimizer_class, args, kwargs = self._how
        shares = split_by_owner([group], number, first)
        calls: dict[str, tuple[Any, ...]] = {}
        for owner, mine in shares.items():
            if owner in self._locals:
                calls[owner] = _asking(self._locals[owner], LocalOptimizer.add, *mine)
            else:
                calls[owner] = (create, optimizer_class, mine, True, args, kwargs)
        try:
            made = ask_all("adding a parameter group", calls)
        except Exception:
            known = {owner: self._locals[owner] for owner in shares if owner in self._locals}
            with suppress(Exception):  # an owner that cannot take it back is gone, or says so at the next step
                ask_all(
                    "taking a parameter group back",
                    {owner: _asking(local, LocalOptimizer.undo_add, number) for owner, local in known.items()},
                )
            raise
        for owner, options in made.items():
            if owner not in self._locals:
                self._locals[owner], _, options = options  # noqa: PLW2901 - a new one also says who it is
            self._shares.setdefault(owner, []).extend(shares[owner])
            group.update(options[number])
        self.param_groups.append(group)
        self._told.add(group)

    def _ask_owners(self, what: str, method: Callable[..., Any], *args: Any) -> dict[str, Any]:
        # Outside the context: nothing that an owner does for this is to be recorded.
        with within(None):
            return ask_all(what, {owner: _asking(local, method, *args) for owner, local in self._locals.items()})


def _asking(local: Any, method: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """A call of a method of an owner's local optimizer: by its id, since the reference here outlives the call. One that
    is lost is sent itself, and fails as it is; a durable one has to arrive."""
    if isinstance(local, rpc.RRef) and (rref_id := id_for_owner(local)) is not None:
        return on_owner, rref_id, method.__name__, *args
    return on_owner_by_reference, local, method.__name__, *args


def _check_class(optimizer_class: type[torch.optim.Optimizer]) -> None:
    if isinstance(optimizer_class, torch.nn.Module | torch.optim.Optimizer) or not callable(optimizer_class):
        made = isinstance(optimizer_class, torch.nn.Module | torch.optim.Optimizer)  # whose text is many lines
        got = f"an object of {type(optimizer_class).__name__}" if made else f"{optimizer_class!r:.200}"
        raise TypeError(
            f"the first argument is the class of the optimizer each owner makes, and got {got}; "
            "write for instance `DistributedOptimizer(torch.optim.SGD, telegrad.nn.remote_parameters(model), lr=0.1)`"
        )
    step = getattr(optimizer_class, "step", None)  # A function that makes optimizers has none; its step is not checked.
    closure = inspect.signature(step).parameters.get("closure") if step is not None else None
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{optimizer_class.__name__} evaluates the model again inside its step, through a closure, and an owner of "
            "some of the parameters cannot run the whole model; use an optimizer whose step takes no closure"
        )
