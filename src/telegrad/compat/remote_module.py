"""Stands in for `torch.distributed.nn.api.remote_module`: what torch's RemoteModule refuses is refused here, too."""

from telegrad.nn import remote_module
from telegrad.nn.remote_module import _REMOTE_MODULE_PICKLED_ATTRIBUTES
from telegrad.nn.unsupported import not_supported

__all__ = ["_REMOTE_MODULE_PICKLED_ATTRIBUTES", "RemoteModule", "_RemoteModule"]


# In torch not even a model around it can list its modules, so that parameters elsewhere are not passed over in silence.
_NOT_IN_TORCH = ("requires_grad_", "state_dict", "load_state_dict", "named_modules")


class _RemoteModule(remote_module._RemoteModule):
    pass


class RemoteModule(remote_module.RemoteModule):
    """Telegrad's RemoteModule without what torch's does not have."""


for _cls in (_RemoteModule, RemoteModule):
    for _name in _NOT_IN_TORCH:
        setattr(_cls, _name, not_supported(_name))
