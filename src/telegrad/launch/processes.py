"""A process under supervision: its output is shown line by line under its name, and it does not outlive its owner.

Three things see to the latter, each where another cannot: `end` at the end of a block, the kernel's parent-death
signal for an owner that is killed (`parent_death.py`), and a socket that reads as closed when the owner is gone
(`worker.py`).
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_DIE_WITH_PARENT = str(Path(__file__).with_name("parent_death.py"))
_LAST_LINES = 20
_GRACE = 1.0  # seconds between being asked to end and being killed
_REAPED = 10.0  # seconds for the kernel to let go of what was killed
_TAIL = 1.0  # seconds to wait for the last output; a process it started may keep the pipe open for longer


class Supervised:
    """One process. Its stdin is empty, and it is in a process group of its own, so Ctrl-C reaches its owner alone.

    `on_end` is called with it when it has ended, from another thread.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        pass_fds: Sequence[int] = (),
        show: bool = True,
        on_end: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.dismissed = False  # whether its end is expected
        self._show = show
        self._on_end = on_end
        # The kernel sends it when the thread that started the process ends; only the main thread is sure to stay.
        dies_with_parent = threading.current_thread() is threading.main_thread()
        prefix = [sys.executable, "-I", "-S", _DIE_WITH_PARENT, str(os.getpid())] if dies_with_parent else []
        self._process = subprocess.Popen(
            [*prefix, *command],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
            process_group=0,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._pumps = [self._pump("stdout", self._process.stdout), self._pump("stderr", self._process.stderr)]
        self._waiter = threading.Thread(target=self._wait_for_exit, name=f"wait for {name}", daemon=True)
        self._waiter.start()

    def __repr__(self) -> str:
        return f"<Supervised {self.name!r}: process {self.pid}, {describe_status(self.status)}>"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit status once it has ended; None if it still runs after `timeout` seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill it and its group, and wait until it is gone."""
        self.dismissed = True
        self.kill_group()
        self.wait(_REAPED)

    def signal(self, number: int) -> None:
        """Send it a signal; nothing happens if it has ended."""
        self._process.send_signal(number)

    def kill_group(self) -> None:
        """Kill it and what it started, as far as that is still in its group."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def finish_output(self) -> None:
        """Wait until its last output has been shown."""
        deadline = time.monotonic() + _TAIL
        for thread in (*self._pumps, self._waiter):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _pump(self, stream: str, pipe: IO[bytes]) -> threading.Thread:
        thread = threading.Thread(
            target=self._forward, args=(stream, pipe), name=f"{stream} of {self.name}", daemon=True
        )
        thread.start()
        return thread

    def _forward(self, stream: str, pipe: IO[bytes]) -> None:
        with pipe:
            for raw in pipe:
                line = raw.decode(errors="replace").rstrip("\r\n")
                if stream == "stderr":
                    self.last_lines.append(line)
                if self._show:
                    say(self.name, line, stream)

    def _wait_for_exit(self) -> None:
        status = self._process.wait()
        if not self.dismissed and status and self._show:
            for pump in self._pumps:  # its own last words first
                pump.join(_TAIL)
            say(self.name, describe_status(status), "stderr")
        self._on_end(self)


def say(name: str, line: str, stream: str) -> None:
    """Show one line under a worker's name, on what `sys` has for that stream now (a test's capture)."""
    target = getattr(sys, stream)
    with contextlib.suppress(ValueError, BrokenPipeError):  # nobody reads any more
        target.write(f"[{name}] {line}\n")
        target.flush()


def end(processes: Iterable[Supervised], grace: float = _GRACE) -> None:
    """End processes: wait for those already leaving, then SIGTERM, then SIGKILL. Returns when all are gone, or have
    been killed and the kernel still keeps them."""
    processes = list(processes)
    for process in processes:
        process.dismissed = True
    try:
        if not _all_gone(processes, grace):
            for process in processes:
                process.signal(signal.SIGTERM)
            _all_gone(processes, grace)
    finally:  # also when Ctrl-C is pressed once more
        for process in processes:
            process.kill_group()
        _all_gone(processes, _REAPED)
    for process in processes:
        process.finish_output()


def _all_gone(processes: Sequence[Supervised], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    return all(process.wait(max(0.0, deadline - time.monotonic())) is not None for process in processes)


def describe_status(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "running"
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
