"""What the environment asks for, so that a program need not be changed: worker 0 serves a page, or records the run.

TELEGRAD_DASHBOARD=1            serve the live page on a free port of the loopback address, and print its address
TELEGRAD_DASHBOARD=HOST:PORT    the same there
TELEGRAD_TRACE=FILE             record everything until the shutdown, into that file
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping

from telegrad.errors import TelegradError
from telegrad.rpc.agent import Agent
from telegrad.rpc.layer import Layer

log = logging.getLogger("telegrad.observe")

_LOOK_SECONDS = 0.002


class Automatic(Layer):
    """What was asked for on one agent, from when all workers are there until they leave."""

    def __init__(self, agent: Agent, variables: Mapping[str, str]) -> None:
        self._agent = agent
        self._dashboard = variables.get("TELEGRAD_DASHBOARD", "")
        self._trace = variables.get("TELEGRAD_TRACE", "")
        self._ends: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._when_all_are_there, name="telegrad-automatic", daemon=True).start()

    def _when_all_are_there(self) -> None:
        agent = self._agent
        deadline = time.monotonic() + agent.options.rendezvous_timeout
        while len(agent.peers.everyone()) < (agent.world_size or 1) and time.monotonic() < deadline:
            if agent.closing:
                return
            time.sleep(_LOOK_SECONDS)
        try:
            with self._lock:
                if not agent.closing:
                    self._start()
        except (TelegradError, OSError) as error:
            log.warning("what TELEGRAD_TRACE or TELEGRAD_DASHBOARD asks for could not be started: %s", error)

    def _start(self) -> None:
        if self._trace:
            from telegrad.observe.timeline.recording import Recording  # noqa: PLC0415 - only if it is asked for

            recording = Recording(self._agent)
            recording.start()

            def finish() -> None:
                recording.stop()
                recording.write(self._trace)
                sys.stderr.write(f"telegrad: wrote {self._trace}; open it at https://ui.perfetto.dev\n")

            self._ends.append(finish)
        if self._dashboard:
            from telegrad.observe.live.page import serving  # noqa: PLC0415 - the same

            host, _, port = self._dashboard.rpartition(":")
            stack = contextlib.ExitStack()
            page = stack.enter_context(serving(self._agent, host or "127.0.0.1", int(port) if host else 0))
            sys.stderr.write(f"telegrad: the dashboard is at {page.url}\n")
            self._ends.append(stack.close)

    def before_shutdown(self) -> None:
        """The others are still there: fetch their last events."""
        self._end()

    def on_close(self) -> None:
        """The same for one that ends without a shutdown; what was collected so far is kept."""
        self._end()

    def _end(self) -> None:
        with self._lock:
            ends, self._ends = self._ends, []
        for end in ends:
            try:
                end()
            except (TelegradError, OSError) as error:
                log.warning("recording or showing the job could not be ended: %s", error)


def install(agent: Agent) -> None:
    """Do what the environment asks for; on worker 0 only."""
    if agent.member.worker_id == 0 and ("TELEGRAD_DASHBOARD" in os.environ or "TELEGRAD_TRACE" in os.environ):
        agent.install(Automatic(agent, os.environ))
