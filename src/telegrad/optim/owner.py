"""`LocalOptimizer` is a trainer's agent next to the parameters: a torch optimizer and the gradients it is to apply.

A parameter's `.grad` belongs to whoever else uses it in this process. A step therefore only borrows it: it claims the
parameters, puts its gradients there, steps, and puts back what it found. Backward passes claim the leaves they work on
in the same way, and so do other trainers' steps. So a step is applied whole, whatever else goes on, and a parameter
without gradient is not touched, momentum and weight decay included.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from telegrad import rpc, trace
from telegrad.engine.local.claims import Claim, claimed, release, wait_for_claim
from telegrad.optim.gradients import Gradients, context_gradients, gradient_norms
from telegrad.optim.shares import GroupShare, Options, options_of
from telegrad.optim.unobserved import step_of
from telegrad.rref.value_on_owner import value_kept_here

NO_GRADIENT = "no gradient"


class LocalOptimizer:
    """One torch optimizer over the parameters of one trainer's model that live on this worker."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        shares: Sequence[GroupShare],
        grouped: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        local_groups = [share.local_group() for share in shares]
        # An optimizer that takes no groups is given what it takes: the bare list the trainer was given.
        self.optimizer = optimizer_class(local_groups if grouped else local_groups[0]["params"], *args, **kwargs)
        self.group_numbers = [share.group for share in shares]
        self.indices = [index for share in shares for index in share.indices]
        self.accumulated: Gradients = {}
        self._regroupings = 0  # how often groups were added or taken back

    @property
    def params(self) -> list[torch.Tensor]:
        """The parameters, in the order of `indices`."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def description(self) -> tuple[Options, dict[int, Options]]:
        """What the trainer shows as its own: the defaults and, for each group, its options."""
        options = [options_of(group) for group in self.optimizer.param_groups]
        return self.optimizer.defaults, dict(zip(self.group_numbers, options, strict=True))

    def add(self, share: GroupShare) -> dict[int, Options]:
        """Optimize the parameters of one more group as well. Returns the options of all groups."""
        with claimed([self]):
            self.optimizer.add_param_group(share.local_group())
            self.group_numbers.append(share.group)
            self.indices += share.indices
            self._regroupings += 1
            return self.description()[1]

    def undo_add(self, group: int) -> None:
        """Undo the last `add` if it was of this group."""
        with claimed([self]):
            if self.group_numbers[-1] == group:
                del self.group_numbers[-1]
                del self.indices[-len(self.optimizer.param_groups.pop()["params"]) :]
                self._regroupings += 1

    def accumulate(self, context_id: int) -> None:
        """Add the context's gradients to what the next step applies."""
        gradients = context_gradients(context_id)
        with claimed([self]):
            for param in self.params:
                gradient = gradients.get(param)
                if gradient is None:
                    continue
                held = self.accumulated.get(param)
                # A copy at first: the context owns its gradient, and may be stepped with, or read, once more.
                self.accumulated[param] = gradient.clone() if held is None else held + gradient

    def discard(self) -> None:
        """Forget what was accumulated."""
        with claimed([self]):
            self.accumulated.clear()

    def norms(self, context_id: int | None, scale: float, norm_type: float) -> tuple[list[int], torch.Tensor]:
        """The norm of each gradient the next step would apply, and the number of its parameter."""
        gradients = {} if context_id is None else context_gradients(context_id)
        with claimed([self]):
            params, indices = self.params, [*self.indices]
            total = self._total(params, gradients, scale)
        held = [(index, total[param]) for index, param in zip(indices, params, strict=True) if param in total]
        return [index for index, _ in held], gradient_norms([gradient for _, gradient in held], norm_type)

    def step(
        self, context_id: int | None, scale: float, shrink: float | None, changes: dict[int, Options] | None = None
    ) -> str | None:
        """Apply what was accumulated and the context's gradients, times `scale`, then times `shrink` to clip. First
        take over what has changed in the options of the groups. Says so if there was no gradient."""
        gradients = {} if context_id is None else context_gradients(context_id)
        params, claim = self._claim()
        try:
            if changes:
                self._take_options(changes)
            total = self._total(params, gradients, scale)
            if shrink is not None:
                total = {param: gradient * shrink for param, gradient in total.items()}
            found = [param.grad for param in params]
            try:
                for param in params:
                    param.grad = total.get(param)
                if trace.recorder is None:
                    step_of(self.optimizer)()
                else:
                    name = f"{type(self.optimizer).__name__}.step"
                    trace.recorder.timed(name, "optimizer", self.optimizer.step)
            finally:
                for param, gradient in zip(params, found, strict=True):
                    param.grad = gradient
            self.accumulated.clear()
        finally:
            release(claim)
        return None if total else NO_GRADIENT

    def state(self) -> tuple[dict[int, Any], dict[int, Options]]:
        """Each parameter's state, by the trainer's number for it, and each group's options, all in host memory."""
        with self._claimed():
            saved = self.optimizer.state_dict()["state"]
            _, options = self.description()
            return {self.indices[local]: _to_host(state) for local, state in saved.items()}, _to_host(options)

    def load_state(self, state: dict[int, Any], options: dict[int, Options]) -> None:
        """Take over a state as `state` gives it, and the options of this owner's groups."""
        with self._claimed():
            local_numbers = {index: local for local, index in enumerate(self.indices)}
            saved = self.optimizer.state_dict()
            groups = [
                {**_names_in(group), **options[number], "params": group["params"]}
                for number, group in zip(self.group_numbers, saved["param_groups"], strict=True)
            ]
            local_state = {local_numbers[index]: value for index, value in state.items()}
            self.optimizer.load_state_dict({"state": local_state, "param_groups": groups})
            self.accumulated.clear()

    def _claim(self) -> tuple[list[torch.Tensor], Claim]:
        """The parameters, and a claim of them all and of this. A group that is added while others are waited for is
        among them: its parameters would be stepped with whatever their `.grad` is otherwise."""
        while True:
            regroupings = self._regroupings
            params = self.params
            claim = wait_for_claim([self, *params])
            if regroupings == self._regroupings:
                return params, claim
            release(claim)

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        _, claim = self._claim()
        try:
            yield
        finally:
            release(claim)

    def _take_options(self, changes: dict[int, Options]) -> None:
        for number, group in zip(self.group_numbers, self.optimizer.param_groups, strict=True):
            for key, value in changes.get(number, {}).items():
                ours = group.get(key)
                if isinstance(ours, torch.Tensor) and isinstance(value, torch.Tensor):
                    ours.copy_(value)  # In place: a captured graph or a fused kernel may hold this very tensor.
                else:
                    group[key] = value

    def _total(self, params: list[torch.Tensor], gradients: Gradients, scale: float) -> Gradients:
        total = dict(self.accumulated)
        for param in params:
            gradient = gradients.get(param)
            if gradient is not None:
                total[param] = total[param] + gradient if param in total else gradient
        if scale != 1.0:
            total = {param: gradient * scale for param, gradient in total.items()}
        return total


def create(
    optimizer_class: type[torch.optim.Optimizer],
    shares: Sequence[GroupShare],
    grouped: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Options, dict[int, Options]]:
    """Runs on the owner: a new local optimizer, as a reference, and its description."""
    local = LocalOptimizer(optimizer_class, shares, grouped, args, kwargs)
    defaults, options = local.description()
    return rpc.RRef(local), defaults, options


def on_owner(rref_id: int, method: str, *args: Any) -> Any:
    """Runs on the owner: `method` of the local optimizer with this id. The trainer has the reference, and keeps it
    until this is done."""
    return getattr(value_kept_here(rref_id), method)(*args)


def on_owner_by_reference(local: Any, method: str, *args: Any) -> Any:
    """The same for a reference of another kind, which has to arrive itself."""
    return getattr(local.local_value(), method)(*args)


def _names_in(group: Options) -> Options:
    return {"param_names": group["param_names"]} if "param_names" in group else {}


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # A copy: this worker may step again while the state is on its way.
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _to_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_host(item) for item in value)
    return value
