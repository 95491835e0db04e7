"""torch's own thread state: Python objects by name, which the autograd engine carries to every thread it uses.

Releases before 2.13 miscount references there: one was lost with each object put in, or taken out. What this release
does is tried out once, and what is missing is added.
"""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch

_increase = ctypes.pythonapi.Py_IncRef
_increase.argtypes, _increase.restype = [ctypes.py_object], None

has_state: Callable[[str], bool] = torch._C._is_key_in_tls
get_state: Callable[[str], Any] = torch._C._get_obj_in_tls
set_state: Callable[[str, Any], None] = torch._C._stash_obj_in_tls


def _miscounted() -> tuple[bool, bool]:
    """Whether an object that is put in, or taken out, has one reference too few afterwards."""
    name, probe = "telegrad.probe", [0]
    before = sys.getrefcount(probe)
    set_state(name, probe)
    put_in = sys.getrefcount(probe) == before
    if put_in:
        _increase(probe)
    before = sys.getrefcount(probe)
    found = get_state(name)
    taken_out = sys.getrefcount(probe) == before
    if taken_out:
        _increase(probe)
    del found
    set_state(name, None)
    return put_in, taken_out


_put_in, _taken_out = _miscounted()

if _taken_out:
    _get = get_state

    def get_state(name: str) -> Any:
        """What is kept under a name."""
        found = _get(name)
        _increase(found)
        return found


if _put_in:
    _set = set_state

    def set_state(name: str, value: Any) -> None:
        """Keep something under a name."""
        _increase(value)
        _set(name, value)
