"""`SharedModule`: a module that several trainers use at once, each with the parameters as its context found them.

A forward saves parameters for its backward. If another trainer's optimizer steps in between, torch notices that they
have changed, and the backward fails. Here the first forward of a context copies the parameters, all forwards of that
context compute with it, and gradients go to the parameters themselves. So a step never disturbs another trainer;
it may apply a gradient of slightly older parameters, as asynchronous training does.

The module's own objects are used by several threads at once, so each forward runs on replicas of them that hold the
copy, as in `torch.nn.DataParallel`. Buffers are not copied: running statistics are everybody's.
"""

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from telegrad.autograd.context import Context
from telegrad.autograd.registry import current
from telegrad.engine.local.claims import claimed

Copies = dict[Tensor, Tensor]


class SharedModule(nn.Module):
    """`SharedModule(module)` on the worker that owns the module; call it there in place of the module.

    Costs one copy of the parameters for each context, kept until the context ends. Outside any context, and under
    `no_grad`, the module itself runs.

    Examples:
        ```python
        served = SharedModule(nn.Linear(8, 1))  # on its owner

        def forward(x):  # which trainers call, each in a context of its own
            return served(x)
        ```
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._taking = threading.Lock()  # guards what follows
        # Weak: a copy lives as long as its context.
        self._copies: weakref.WeakKeyDictionary[Context, Copies] = weakref.WeakKeyDictionary()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with the parameters of the current context."""
        context = current.get()
        if context is None or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        return _replica(self.module, self._copies_of(context))(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Sent or copied, it begins without copies."""
        return {key: value for key, value in self.__dict__.items() if key not in ("_taking", "_copies")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call] # torch's own, without types
        self._taking = threading.Lock()
        self._copies = weakref.WeakKeyDictionary()

    def _copies_of(self, context: Context) -> Copies:
        with self._taking:
            copies = self._copies.get(context)
        if copies is None:
            trained = [param for param in self.module.parameters() if param.requires_grad]
            with claimed(trained):  # as a step does: none is seen half done. It may take long, so not under the lock
                made: Copies = {param: param.detach().clone() for param in trained}
            with self._taking:
                copies = self._copies.setdefault(context, made)  # of two calls that come at the same time, the first's
        return copies


class _InPlaceOf(torch.autograd.Function):
    """A copy that stands for its parameter: the numbers of the one, the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, copy: Tensor) -> Tensor:
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _replica(module: nn.Module, copies: Copies) -> nn.Module:
    """The module with `copies` in place of its parameters. A node for each use: calls share no node but the leaves."""
    standing: Copies = {param: _InPlaceOf.apply(param, copy) for param, copy in copies.items()}  # type: ignore[no-untyped-call] # torch's own, without types
    originals = list(module.modules())
    replicas = {each: each._replicate_for_data_parallel() for each in originals}  # type: ignore[no-untyped-call] # torch's own, without types
    for original, replica in replicas.items():
        for name, child in original._modules.items():
            replica._modules[name] = None if child is None else replicas[child]
        for name, param in original._parameters.items():
            if param is None or param not in standing:
                replica._parameters[name] = param
            else:
                setattr(replica, name, standing[param])
    return replicas[module]  # type: ignore[no-any-return] # typed by what it comes from
