"""Stands in for `torch.distributed.nn.api.remote_module`: what torch's RemoteModule refuses is refused here, too."""

from telegrad.nn import remote_module
from telegrad.nn.remote_module import _REMOTE_MODULE_PICKLED_ATTRIBUTES
from telegrad.nn.unsupported import not_supported

__all__ = ["_REMOTE_MODULE_PICKLED_ATTRIBUTES", "RemoteModule", "_RemoteModule"]


class _RemoteModule(remote_module._RemoteModule):
    requires_grad_ = not_supported("requires_grad_")
    state_dict = not_supported("state_dict")
    load_state_dict = not_supported("load_state_dict")


class RemoteModule(remote_module.RemoteModule):
    """Telegrad's RemoteModule without what torch's does not have."""

    requires_grad_ = not_supported("requires_grad_")
    state_dict = not_supported("state_dict")
    load_state_dict = not_supported("load_state_dict")
