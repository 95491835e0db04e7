"""The actor that Monarch's calls go to, in a module of its own: its process imports this one."""

from collections.abc import Callable
from typing import Any

from monarch.actor import Actor, endpoint


class Callee(Actor):
    """Runs what it is sent."""

    @endpoint
    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The result of the function."""
        return function(*args)
