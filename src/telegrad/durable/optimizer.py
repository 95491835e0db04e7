"""A `DistributedOptimizer` whose parts are durable: the owners' optimizers, and what the driver knows of them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from telegrad.durable.durable_ref import DurableRef
from telegrad.durable.part import Recipe
from telegrad.errors import DurableError
from telegrad.optim import DistributedOptimizer
from telegrad.optim.owner import LocalOptimizer
from telegrad.optim.shares import Options, Told, options_of

# Declares a durable value on a worker; returns a reference to it and what it says of itself.
Declare = Callable[[str, Recipe], tuple[DurableRef[Any], Any]]


class DurableOptimizer(DistributedOptimizer):
    """What `run.optimizer` returns. Its groups are set when it is made; options may change, as by a scheduler."""

    def __init__(
        self,
        declare: Declare,
        name: str,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._declare = declare
        self._name = name
        super().__init__(optimizer_class, params, *args, **kwargs)

    def _create_locals(self, grouped: bool) -> dict[str, tuple[Any, Options, dict[int, Options]]]:
        optimizer_class, args, kwargs = self._how
        made = {}
        for owner, shares in self._shares.items():
            strangers = [param for share in shares for param in share.params if not isinstance(param, DurableRef)]
            if strangers:
                raise DurableError(
                    f"{strangers[0]} is no parameter of a durable value: its owner's death would end the run. Make the "
                    "module with run.module(), or give it to run.keep() if it is the driver's own"
                )
            recipe = Recipe(self._name, LocalOptimizer, (optimizer_class, shares, grouped, args, kwargs))
            local, (defaults, options) = self._declare(owner, recipe)
            made[owner] = (local, defaults, options)
        return made

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: how an owner's optimizer is made has been recorded."""
        if hasattr(self, "_told"):
            raise DurableError("a durable optimizer gets all its parameter groups when it is made by run.optimizer()")
        super().add_param_group(param_group)

    def driver_state(self) -> dict[str, Any]:
        """What is on the driver: the options of each group, and what the owners have been told of them."""
        return {"groups": [options_of(group) for group in self.param_groups], "told": self._told.options}

    def load_driver_state(self, state: dict[str, Any]) -> None:
        """Take it back."""
        for group, options in zip(self.param_groups, state["groups"], strict=True):
            kept = {key: group[key] for key in ("params", "param_names") if key in group}
            group.clear()
            group.update(options, **kept)
        self._told = Told.of(state["told"])
