"""Where workers on Ray meet: an actor that keeps the store in memory, and a store whose requests are calls to it.

No shared disk, no port of its own, and nothing to configure: whoever has a handle to the actor can reach it from any
node of the Ray cluster. It lives on, with all it knows, when the workers it serves are killed and started again.
"""

import os
import secrets
import threading
import time
from datetime import timedelta
from typing import Any

import ray
from torch._C._distributed_c10d import Store

_REQUEST_SECONDS = 10.0
_LOOK_SECONDS = 0.02
_WATCH_SECONDS = 5.0


class Rendezvous:
    """The actor. One request at a time: Ray orders them."""

    def __init__(self, ends_with_guests: bool = False) -> None:
        self._values: dict[str, bytes] = {}
        self._secret = secrets.token_hex(32)
        self._guests: list[Any] = []
        if ends_with_guests:
            threading.Thread(target=self._end_with_guests, daemon=True).start()

    def secret(self, guest: Any = None) -> str:
        """The secret of the job; for an actor that joins by itself, whose end is then noticed."""
        if guest is not None:
            self._guests.append(guest)
        return self._secret

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        self._values[key] = value

    def get(self, key: str) -> bytes | None:
        """Read one."""
        return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number; the sum."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        """Whether all these keys are there."""
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write `desired` if the value is `expected` (or nothing, and `expected` is empty); what is there then."""
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many keys there are."""
        return len(self._values)

    def _end_with_guests(self) -> None:
        """One that belongs to no driver ends when all actors that met here are gone for good."""
        pending: dict[Any, Any] = {}  # a call that an actor answers when it is idle, and fails when it is dead
        while True:
            time.sleep(_WATCH_SECONDS)
            for guest in list(self._guests):
                pending.setdefault(guest, guest.__ray_ready__.remote())
                done, _ = ray.wait([pending[guest]], timeout=0)
                if done:
                    try:
                        ray.get(pending.pop(guest))
                    except ray.exceptions.ActorUnavailableError:
                        pass  # it is being started again
                    except ray.exceptions.RayError:
                        self._guests.remove(guest)
                        if not self._guests:
                            os._exit(0)


class RayStore(Store):
    """A store of torch's kind. A RuntimeError when the actor has ended, as with torch's own."""

    def __init__(self, rendezvous: Any) -> None:
        super().__init__()
        self._rendezvous = rendezvous

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return ray.get(getattr(self._rendezvous, method).remote(*args), timeout=_REQUEST_SECONDS)
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"the rendezvous actor does not answer: {error}") from error

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._ask("set", key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        """The value of a key, which is waited for."""
        deadline = time.monotonic() + _REQUEST_SECONDS
        while (value := self._ask("get", key)) is None:
            if time.monotonic() >= deadline:
                raise RuntimeError(f"waited {_REQUEST_SECONDS:g} s in the rendezvous actor for {key!r}")
            time.sleep(_LOOK_SECONDS)
        return bytes(value)

    def add(self, key: str, amount: int) -> int:
        """Add to a number; the sum."""
        return int(self._ask("add", key, amount))

    def check(self, keys: list[str]) -> bool:
        """Whether all these keys are there."""
        return bool(self._ask("check", keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the value is `expected`; what is there then."""
        return bytes(self._ask("compare_set", key, _as_bytes(expected), _as_bytes(desired)))

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return bool(self._ask("delete_key", key))

    def num_keys(self) -> int:
        """How many keys there are."""
        return int(self._ask("num_keys"))

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignored: a request is answered at once, or the actor is gone."""


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
