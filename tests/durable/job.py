"""A job that is killed while it trains: a driver and three workers under a supervisor, which starts again whoever dies.

The supervisor is the test's own process and no worker. A worker dies by a signal at any time, or at a chosen moment of
its own: `at("backward")` in the program kills the process that comes by, if the supervisor has armed that moment.
"""

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from telegrad import durable, rpc
from tests.cluster import end, process
from tests.waiting import wait_until

NAMES = ("driver", "w1", "w2", "w3")
_folder: Path | None = None
_me = ""
_jobs = itertools.count()


def at(moment: str) -> None:
    """The process that runs this is at a moment at which it may have to die."""
    if _folder is not None:
        with contextlib.suppress(FileNotFoundError):
            (_folder / f"{_me}.{moment}").unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def live(folder: Path, name: str, drive: Callable[..., Any], settings: dict[str, Any]) -> None:
    """The whole life of one incarnation of one worker."""
    global _folder, _me
    _folder, _me = folder, name
    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(init_method=f"file://{folder}/meeting", rendezvous_timeout=60)
    rpc.init_rpc(name, rank=NAMES.index(name), world_size=len(NAMES), rpc_backend_options=options)
    if name == NAMES[0]:
        result = drive(**settings)
        torch.save(result, folder / "result.tmp")
        (folder / "result.tmp").rename(folder / "result.pt")
    else:
        durable.serve()
    rpc.shutdown()


class Job:
    """The processes of one job."""

    def __init__(self, folder: Path, drive: Callable[..., Any], **settings: Any) -> None:
        self.folder = folder / f"job{next(_jobs)}"
        self.folder.mkdir()
        self._life = (drive, settings)
        self.deaths = 0
        self._looks = 0
        self.processes: dict[str, BaseProcess] = {name: self._start(name) for name in NAMES}

    def _start(self, name: str) -> BaseProcess:
        return process(live, self.folder, name, *self._life)

    @property
    def done(self) -> bool:
        """Whether the driver has left a result."""
        return (self.folder / "result.pt").exists()

    def result(self) -> Any:
        """What it left."""
        return torch.load(self.folder / "result.pt", weights_only=False)

    def look(self) -> None:
        """Start again whoever has died."""
        for name, each in self.processes.items():
            if not each.is_alive() and not self.done:
                each.join()
                assert each.exitcode == -signal.SIGKILL, f"{name} ended with {each.exitcode}"
                self.deaths += 1
                self.processes[name] = self._start(name)

    def kill(self, name: str) -> None:
        """End a worker now, whatever it does."""
        self.processes[name].kill()

    def arm(self, name: str, moment: str) -> None:
        """Have a worker die when it comes to a moment."""
        (self.folder / f"{name}.{moment}").touch()

    def disarm(self, name: str, moment: str) -> None:
        """It never came there."""
        (self.folder / f"{name}.{moment}").unlink(missing_ok=True)

    def is_armed(self, name: str, moment: str) -> bool:
        """Whether it has not come there yet."""
        return (self.folder / f"{name}.{moment}").exists()

    def mark(self) -> str:
        """How far the driver says it is."""
        try:
            return (self.folder / "mark").read_text()
        except FileNotFoundError:
            return ""

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Look after the job until a condition holds, the job is done, or time is up; whether the condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.look()
            self._looks += 1
            (self.folder / "looks").write_text(str(self._looks))
            if self.done or time.monotonic() > deadline:
                return condition()
            time.sleep(0.002)
        return True


@contextlib.contextmanager
def job(folder: Path, drive: Callable[..., Any], **settings: Any) -> Iterator[Job]:
    """A job for the length of a block."""
    made = Job(folder, drive, **settings)
    try:
        yield made
    finally:
        end(list(made.processes.values()), patience=30 if made.done else 0)


def mark(text: str) -> None:
    """Called by the driver: how far it is."""
    if _folder is not None:
        (_folder / "mark.tmp").write_text(text)
        (_folder / "mark.tmp").rename(_folder / "mark")


def rest(seconds: float) -> None:
    """Called by the driver in a step: time to die in. The supervisor looks at the job in it, however slow both are,
    or the job would be done before it is harmed."""
    if _folder is not None and seconds:
        before = _looks()
        time.sleep(seconds)
        wait_until(lambda: _looks() != before, 60)


def _looks() -> str:
    assert _folder is not None
    path = _folder / "looks"
    return path.read_text() if path.exists() else ""


class Killer:
    """Kills at random: moments of one's own or any time, one worker or two at once, the driver among them."""

    MOMENTS = ("forward", "backward", "optimizer", "copying", "keeping", "restoring")

    def __init__(self, made: Job, chance: random.Random) -> None:
        self.job = made
        self.chance = chance
        self.kinds: dict[str, int] = {}

    def strike(self) -> None:
        """Harm the job once, and wait until it goes on."""
        job, chance = self.job, self.chance
        before, deaths = job.mark(), job.deaths
        job.until(lambda: job.mark() != before, 120)  # it runs
        kind = chance.choice(("any time", "any time", "two at once", *self.MOMENTS, "driver", "driver while returning"))
        victims = chance.sample(NAMES[1:], 2)
        time.sleep(chance.uniform(0, 0.1))
        if kind == "any time":
            job.kill(victims[0])
        elif kind == "two at once":
            pair = chance.sample(NAMES, 2)
            for name in pair:
                job.kill(name)
        elif kind == "driver":
            job.kill(NAMES[0])
        elif kind == "driver while returning":
            job.kill(victims[0])
            job.until(lambda: job.deaths > deaths, 60)
            time.sleep(chance.uniform(0, 0.3))
            job.kill(NAMES[0])
        elif kind == "restoring":  # somebody dies, and another one as it returns to where it was
            job.arm(victims[1], kind)
            job.kill(victims[0])
            job.until(lambda: not job.is_armed(victims[1], kind), 60)
        else:
            job.arm(victims[0], kind)
            job.until(lambda: not job.is_armed(victims[0], kind), 60)
            job.disarm(victims[0], kind)
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        if not job.done:
            assert job.until(lambda: job.deaths > deaths, 60) or job.done, f"nobody died of {kind}"
            after = job.mark()
            assert job.until(lambda: job.mark() != after, 120) or job.done, f"after {kind} nothing went on"
