"""What a function sent by value may find in the globals of its script, and whether that is still what was sent.

A `Taken` notes the globals that a definition takes along, through all functions and classes in it, while it is pickled.
A `Watch` is what the caller keeps of them: names, and the ids of their values. It holds no value: an id means the
same value as long as nothing has been counted anew and nothing that was counted has died (`main_module.state`).
"""

import sys
from collections.abc import Mapping
from itertools import repeat
from typing import Any, NamedTuple

from telegrad.wire.pickling import main_module
from telegrad.wire.pickling.main_module import Gone

Key = tuple[str, str]  # a script, and a global of it


class Taken:
    """The globals that one message takes along, or would if the other worker had not got them already."""

    def __init__(self, sent: Mapping[Key, int], *, renewal: bool = False) -> None:
        self.sent = sent  # by global: the version that the other worker has
        self.renewal = renewal  # whether classes it has are to stay as they are there
        self.in_part = False  # whether something was left out since it was sent
        self.versions: dict[Key, int] = {}
        self.ids: dict[Key, int] = {}
        self.since = main_module.state.now

    def note(self, key: Key, value: Any, version: int) -> None:
        """A function in the message uses this global, which has this value now: `Gone` for none."""
        self.ids[key] = id(value)
        self.versions[key] = version

    def watch(self) -> "Watch | None":
        """What the caller has to watch from now on; None for nothing."""
        return _watch(self.since, self.ids) if self.ids else None


class Watch(NamedTuple):
    """The globals that a function uses, as they were when the other worker got them."""

    since: object  # None if the function is to be defined anew
    names: tuple[str, ...]  # of the script of this process
    ids: list[int]
    others: tuple[Key, ...]  # of scripts whose functions came here: their versions say all

    def holds(self) -> bool:
        """Whether all is as it was."""
        names = vars(sys.modules["__main__"])
        return self.since is main_module.state.now and self.ids == list(
            map(id, map(names.get, self.names, repeat(Gone)))
        )

    def look(self, sent: Mapping[Key, int]) -> tuple[Taken, dict[str, dict[str, Any]]]:
        """What is there now, and which of it the other worker has not got: by script, and by name."""
        taken, news = Taken(sent, renewal=True), dict[str, dict[str, Any]]()
        own = main_module.own_origin()
        for key in (*zip(repeat(own), self.names), *self.others):
            origin, name = key
            value = main_module.namespace(origin).get(name, Gone)
            version = main_module.version_of(origin, name, value)
            if version is None or version < 0 or version > sent.get(key, 0):
                news.setdefault(origin, {})[name] = value
            taken.note(key, value, version or 0)
        return taken, news


def _watch(since: object, ids: Mapping[Key, int]) -> Watch:
    own = main_module.own_origin()
    names = tuple([name for origin, name in ids if origin == own])
    others = tuple([key for key in ids if key[0] != own])
    return Watch(since, names, [ids[own, name] for name in names], others)


class Renewal:
    """Globals that have changed in their scripts; as it arrives, they are entered there."""

    def __init__(self, news: dict[str, dict[str, Any]], taken: Taken) -> None:
        self._parts = []
        for origin, names in news.items():
            versions = main_module.versions_of(origin, names)
            self._parts.append((origin, names, versions))
            for name, version in versions.items():
                taken.versions[origin, name] = version

    def __reduce__(self) -> tuple[Any, ...]:
        return renew_all, (self._parts,)


def renew_all(parts: list[tuple[str, dict[str, Any], dict[str, int]]]) -> None:
    """A `Renewal` has arrived."""
    for part in parts:
        main_module.renew(*part)
