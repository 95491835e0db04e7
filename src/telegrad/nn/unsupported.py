"""What a RemoteModule does not do, as a table of method names and, where there is one, the way to do it.

The module is on another worker; whatever is registered, converted or walked here would silently act on an empty shell.
So each raises at once.
"""

from typing import Any, NoReturn, TypeVar

_Class = TypeVar("_Class")

USE_INSTEAD = {
    "parameters": "Please use ``remote_parameters`` instead.",
    "named_parameters": "Please use ``named_remote_parameters`` instead.",
    "to": "Give the device in ``remote_device`` when the module is made.",
    "zero_grad": "Gradients belong to the autograd context and end with it.",
}

NOT_SUPPORTED = (
    *("register_buffer", "register_parameter", "add_module", "register_module", "get_submodule"),
    *("apply", "cuda", "ipu", "xpu", "cpu", "type", "float", "double", "half", "bfloat16", "to", "to_empty"),
    *("register_backward_hook", "register_forward_pre_hook", "register_forward_hook"),
    *("register_full_backward_hook", "register_full_backward_pre_hook"),
    *("parameters", "named_parameters", "buffers", "named_buffers", "children", "named_children", "modules"),
    *("zero_grad", "share_memory", "extra_repr"),
)


def refusal(name: str) -> ValueError:
    """Says that a RemoteModule has no such method, and what to do instead."""
    instead = USE_INSTEAD.get(name, "Do it where the module is, by a call with ``get_module_rref()``.")
    return ValueError(f"Method ``{name}`` not supported for RemoteModule. {instead}")


def not_supported(name: str) -> Any:
    """A method of that name that refuses."""

    def method(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise refusal(name)

    method.__name__ = method.__qualname__ = name
    return method


def refuses_unsupported(cls: type[_Class]) -> type[_Class]:
    """A class decorator: puts the whole table into `cls`."""
    for name in NOT_SUPPORTED:
        setattr(cls, name, not_supported(name))
    return cls
