"""`RemoteModule`: a module of another worker, called from here as if it were here.

It is a reference and a device, no more: parameters, buffers, hooks and mode are the owner's. Inside a larger model it
is a leaf, so that walking, calling, saving and restoring the model work, each crossing to the owner where it has to.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MethodType
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.distributed.remote_device import _remote_device

from telegrad import rpc
from telegrad.errors import NotInitialized
from telegrad.nn import owner_side
from telegrad.nn.unsupported import refusal, refuses_unsupported
from telegrad.rpc.calls import check_call
from telegrad.rpc.current import current_agent
from telegrad.wire.pickling.pickler import register_reducer

_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    *("on", "device", "is_device_map_set", "is_scriptable"),
    *("generated_methods", "module_rref"),
)
_PROBE = torch.empty(0)  # Shows what a conversion does.
_log = logging.getLogger(__name__)
_MODULE_INTERNALS = frozenset(vars(nn.Module()))

# What `whole_model` has exchanged with an owner for several modules in one round trip, for the modules to pick up.
states_read: ContextVar[Mapping[int, Any] | None] = ContextVar("states_read", default=None)
states_written: ContextVar[Mapping[int, Any] | None] = ContextVar("states_written", default=None)


def forward_async(self: "_RemoteModule", *args: Any, **kwargs: Any) -> Any:
    """Call the module; a future of its result."""
    return rpc.rpc_async(self.module_rref.owner(), owner_side.run_forward, args=self._forward_arguments(args, kwargs))


def forward(self: "_RemoteModule", *args: Any, **kwargs: Any) -> Any:
    """Call the module and wait for its result."""
    return rpc.rpc_sync(self.module_rref.owner(), owner_side.run_forward, args=self._forward_arguments(args, kwargs))


@refuses_unsupported
class _RemoteModule(nn.Module):
    """A RemoteModule whose constructor also takes torch's private `_module_interface_cls`."""

    on: str | int
    device: str
    is_device_map_set: bool
    is_scriptable: bool
    generated_methods: tuple[Callable[..., Any], ...]
    module_rref: Any

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        super().__init__()
        _check_creation(module_cls, args, kwargs)
        self._place(remote_device)
        creation = (module_cls, tuple(args or ()), dict(kwargs or {}), self.device)
        # An interface class says which methods TorchScript may call. From Python `forward` is called whatever it says.
        self.module_rref = rpc.remote(self.on, owner_side.create_module, args=creation)
        self._install_generated_methods()

    @classmethod
    def init_from_module_rref(cls, remote_device: str, module_rref: Any, _module_interface_cls: Any = None) -> Self:
        """A RemoteModule over a module that exists: several may share one."""
        remote_module = cls.__new__(cls)
        nn.Module.__init__(remote_module)
        remote_module._place(remote_device)
        remote_module.module_rref = module_rref
        remote_module._install_generated_methods()
        return remote_module

    def remote_parameters(self, recurse: bool = True) -> list[Any]:
        """References to the module's parameters, for a DistributedOptimizer."""
        return [param for _, param in self.named_remote_parameters(recurse=recurse)]

    def named_remote_parameters(self, prefix: str = "", recurse: bool = True) -> list[tuple[str, Any]]:
        """References to the module's parameters with the names they have in its state dict."""
        [named] = self._ask_owner(owner_side.parameter_references, [self.module_rref], recurse)
        return [(f"{prefix}.{name}" if prefix else name, param) for name, param in named]

    def get_module_rref(self) -> Any:
        """The reference to the module."""
        return self.module_rref

    def train(self, mode: bool = True) -> Self:
        """Set the module's mode, on its owner."""
        self._ask_owner(owner_side.set_mode, self.module_rref, mode)
        self.training = mode
        return self

    def eval(self) -> Self:
        """The module's evaluation mode, on its owner."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Whether the module's parameters take gradients, on its owner."""
        self._ask_owner(owner_side.set_requires_grad, self.module_rref, requires_grad)
        return self

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The module's state, copied from its owner into host memory. Nested in a model, it joins the model's."""
        if keep_vars:
            raise ValueError("a RemoteModule's state is a copy from its owner: state_dict cannot keep_vars")
        exchanged = states_read.get()
        if exchanged is not None:
            state = exchanged[id(self)]
        else:
            [state] = self._ask_owner(owner_side.read_states, [self.module_rref])
        if destination is None:
            destination = type(state)()
            destination._metadata = type(state)()
        for name, version in getattr(state, "_metadata", {}).items():
            destination._metadata[f"{prefix}{name}".removesuffix(".")] = version
        destination.update((prefix + key, value) for key, value in state.items())
        return destination

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """What `load_state_dict`, here or of a model around, calls: the owner loads, and says what did not fit."""
        exchanged = states_written.get()
        if exchanged is not None:
            missing, unexpected, misfit = exchanged[id(self)]
        else:
            mine = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
            assign = bool(local_metadata.get("assign_to_params_buffers", False))
            [outcome] = self._ask_owner(owner_side.write_states, [self.module_rref], [mine], assign)
            missing, unexpected, misfit = outcome
        missing_keys.extend(prefix + key for key in missing)
        unexpected_keys.extend(prefix + key for key in unexpected)
        if misfit:
            error_msgs.append(f"on worker '{self.module_rref.owner_name()}': {misfit}")

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Refused to users. A model around it, which passes `memo`, meets a leaf without local parameters."""
        if memo is None:
            raise refusal("named_modules")
        return iter(()) if self in memo else self._as_leaf(memo, prefix, remove_duplicate)

    def _as_leaf(self, memo: set[nn.Module], prefix: str, remember: bool) -> Iterator[tuple[str, nn.Module]]:
        if remember:
            memo.add(self)
        yield prefix, self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Called when a model around this one is moved or converted. Moving concerns its local modules only."""
        dtype = fn(_PROBE).dtype
        if dtype != _PROBE.dtype:
            self._ask_owner(owner_side.convert, self.module_rref, dtype)
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(on={self.on!r}, device={self.device!r})"

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC: "
            "send it in a call, or save its state with telegrad.nn.save"
        )

    def __prepare_scriptable__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be compiled by torch.jit.script: call its forward from Python")

    def __getattr__(self, name: str) -> Any:
        # One that was received holds only what was sent. It becomes a whole nn.Module when first used as one.
        if name in _MODULE_INTERNALS and "_modules" not in self.__dict__:
            nn.Module.__init__(self)
            return getattr(self, name)
        return super().__getattr__(name)

    def _place(self, remote_device: str) -> None:
        agent = current_agent()
        if agent is None:
            raise NotInitialized("RemoteModule only works in RPC. Call init_rpc in this process first")
        place = _remote_device(remote_device)
        named = place.worker_name() if place.worker_name() is not None else place.rank()
        # A bare device is one of this worker's own.
        self.on = named if named is not None else agent.info.name
        self.device = str(place.device())
        self.is_device_map_set = bool(agent.options.device_maps.get(agent.find(self.on).name))
        self.is_scriptable = False
        self.generated_methods = (forward_async, forward)

    def _install_generated_methods(self) -> None:
        # Listed with the instance, as torch's are, but unbound: bound ones would make a cycle, and the reference to the
        # owner's module would outlive the last use of this object.
        self.__dict__.update((method.__name__, method) for method in self.generated_methods)
        _reach_from_models()

    def _forward_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        return self.module_rref, self.device, self.is_device_map_set, args, kwargs

    def _ask_owner(self, function: Callable[..., Any], *args: Any) -> Any:
        return rpc.rpc_sync(self.module_rref.owner(), function, args=args)

    # Properties take precedence over the instance's own entries.
    forward: Any = property(lambda self: MethodType(forward, self))
    forward_async: Any = property(lambda self: MethodType(forward_async, self))


class RemoteModule(_RemoteModule):
    """A module made on another worker.

    `RemoteModule("ps0/cuda:0", nn.Linear, args=(20, 30))` makes `nn.Linear(20, 30)` on worker `ps0`. Places are written
    `worker`, `worker/device`, `rank:0/device`, or a bare device of this worker. Calls record gradients in the current
    context, as any call does. It can be sent to other workers in the arguments and results of calls.

    Examples:
        >>> layer = RemoteModule("worker1", torch.nn.Linear, args=(3, 2))
        >>> with torch.no_grad():
        ...     layer(torch.ones(1, 3)).shape
        torch.Size([1, 2])
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs)


def _check_creation(module_cls: Any, args: Any, kwargs: Any) -> None:
    if isinstance(module_cls, nn.Module) or not callable(module_cls):
        made = isinstance(module_cls, nn.Module)  # whose text is many lines
        got = f"an object of {type(module_cls).__name__}" if made else f"{module_cls!r:.200}"
        raise TypeError(
            f"the second argument is the class of the module that its owner makes, and got {got}; write for instance "
            '`RemoteModule("worker1", nn.Linear, args=(20, 30))`'
        )
    check_call(module_cls, args, kwargs)


def sent_form(remote_module: _RemoteModule) -> tuple[Callable[..., _RemoteModule], tuple[Any, ...]]:
    """How a RemoteModule is written into a call: its class and what of it is sent."""
    known = {*_REMOTE_MODULE_PICKLED_ATTRIBUTES, *_MODULE_INTERNALS, "forward", "forward_async"}
    left_out = sorted(set(vars(remote_module)) - known)
    if left_out:
        _log.warning(
            "%r is sent without its attributes %s: only those of every RemoteModule are", remote_module, left_out
        )
    sent = (getattr(remote_module, name) for name in _REMOTE_MODULE_PICKLED_ATTRIBUTES)
    return received, (type(remote_module), *sent)


def received(cls: type[_RemoteModule], *attributes: Any) -> _RemoteModule:
    """The RemoteModule that was sent."""
    remote_module = cls.__new__(cls)
    remote_module.__dict__.update(zip(_REMOTE_MODULE_PICKLED_ATTRIBUTES, attributes, strict=True))
    remote_module._install_generated_methods()
    return remote_module


# `requires_grad_` and `zero_grad` of a model walk over parameters, and a RemoteModule has none here: they would pass
# over it without a word. So once there is a RemoteModule, these two of `nn.Module` go on to the owners. What else a
# model does to its modules (`train`, `eval`, `to`, `state_dict`) comes by a method of the RemoteModule itself.

_torchs_own: dict[str, Any] = {"requires_grad_": nn.Module.requires_grad_, "zero_grad": nn.Module.zero_grad}


@functools.wraps(nn.Module.requires_grad_)
def _requires_grad_everywhere(self: nn.Module, requires_grad: bool = True) -> nn.Module:
    _torchs_own["requires_grad_"](self, requires_grad)
    _tell_owners(self, owner_side.set_requires_grad, requires_grad)
    return self


@functools.wraps(nn.Module.zero_grad)
def _zero_grad_everywhere(self: nn.Module, set_to_none: bool = True) -> None:
    _torchs_own["zero_grad"](self, set_to_none)
    _tell_owners(self, owner_side.zero_grad, set_to_none)


def _tell_owners(model: nn.Module, function: Callable[..., None], *args: object) -> None:
    remote = [module for module in model.modules() if isinstance(module, _RemoteModule)]
    for future in [rpc.rpc_async(m.module_rref.owner(), function, args=(m.module_rref, *args)) for m in remote]:
        future.wait()


def _reach_from_models() -> None:
    if nn.Module.requires_grad_ is not _requires_grad_everywhere:
        nn.Module.requires_grad_ = _requires_grad_everywhere  # type: ignore[assignment,method-assign] # replaced on purpose
        nn.Module.zero_grad = _zero_grad_everywhere  # type: ignore[method-assign] # replaced on purpose


register_reducer(_RemoteModule, sent_form)
