"""Modules that live on other workers, and models made of them: call, train, save and restore as if they were here.

Read `owner_side.py` (what runs next to the module), then `remote_module.py`, then `whole_model.py` and `checkpoint.py`.
`shared_module.py` is for a module with several trainers.
"""

from telegrad.nn.checkpoint import restore, save
from telegrad.nn.remote_module import RemoteModule
from telegrad.nn.shared_module import SharedModule
from telegrad.nn.whole_model import load_state_dict, named_remote_parameters, remote_parameters, state_dict

__all__ = [
    "RemoteModule",
    "SharedModule",
    "load_state_dict",
    "named_remote_parameters",
    "remote_parameters",
    "restore",
    "save",
    "state_dict",
]


def __dir__() -> list[str]:
    return __all__  # what users use, and not the modules behind it
