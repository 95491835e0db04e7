"""Waiting until all workers of a job have come: by their records, or in a large job by a counter alone.

The counter tells as long as all start together, with a name each. If it is marked, or was left behind by workers that
were started before, the records tell, as they do in a small job.
"""

import logging
import time

from telegrad.errors import RendezvousError, TelegradError
from telegrad.rpc.agent import Agent
from telegrad.rpc.devices import check_maps
from telegrad.rpc.job.membership import COMEBACK_SECONDS, Joining
from telegrad.rpc.job.rendezvous.member_log import MemberLog
from telegrad.rpc.threads.interrupts import pause as sleep
from telegrad.rpc.workers import Member

log = logging.getLogger("telegrad.rpc")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
_LOOKS_PER_SECOND = 2000  # of all workers of a large job together, while they wait for each other
_FIRST_NOTICE = 5.0  # seconds of waiting after which a line says for whom; then after twice as many each time
_COMPLAINTS_SECONDS = 0.5  # between looks for workers that were turned away


class Attendance:
    """Who has come to a job of fixed size, as one worker sees it that waits for all."""

    def __init__(self, agent: Agent, member_log: MemberLog, joining: Joining, world_size: int) -> None:
        self._agent = agent
        self._log = member_log
        self._joining = joining
        self._world_size = world_size
        self._began = time.monotonic()
        self._deadline = self._began + agent.options.rendezvous_timeout
        self._counts_until = 0.0  # until when the counter is believed

    def arrive(self, has_own_name: bool) -> None:
        """This worker has published its record: have it counted, or all others look at the records."""
        register, member = self._log.register, self._agent.member
        if register is None:
            return
        # By the log: its store may be another by the time this is asked.
        self._joining.had_met = lambda: bool(self._log.asked(lambda register: register.have_met()))
        if not has_own_name:
            register.mark(member.generation)
        else:
            register.arrive(member)
            self._counts_until = self._deadline
        if member.generation:
            register.mark_earlier(member.generation)
            others_wait = not self._a_neighbour_lives_on()
            self._counts_until = min(self._counts_until, self._began + COMEBACK_SECONDS if others_wait else 0.0)

    def _a_neighbour_lives_on(self) -> bool:
        """Whether this worker was started again and another was not: then there is no point in counting."""
        agent, neighbour = self._agent, (self._agent.member.worker_id + 1) % self._world_size
        agent.peers.look_for_news(neighbour)
        member = agent.directory.by_id(neighbour)
        return member is not None and member.generation < agent.member.generation and not self._joining.is_dead(member)

    def wait(self) -> bool:
        """Wait until all ranks are there; whether they were only counted. RendezvousError names those that are missing
        at the deadline."""
        # By looking again and again, ever less often: a wait inside torch's stores would print when it times out.
        pause, next_notice, next_look = _FIRST_PAUSE, self._began + _FIRST_NOTICE, self._began + _COMPLAINTS_SECONDS
        complaints: list[str] = []
        missing = self._missing()
        while missing:
            now = time.monotonic()
            if now >= self._deadline and not self._counts_until:
                raise RendezvousError(
                    f"rendezvous timed out after {self._deadline - self._began:g} s: of {self._world_size} workers, "
                    f"{missing} did not come. "
                    + "".join(f"One was turned away: {complaint}. " for complaint in complaints)
                    + "Start them, or raise `rendezvous_timeout`"
                )
            if now >= next_notice:
                log.warning("waiting for %s of %d since %.0f s", missing, self._world_size, now - self._began)
                next_notice = now + (now - self._began)
            sleep(max(0.0, min(pause, self._deadline - now)))
            pause = min(2 * pause, max(_LONGEST_PAUSE, self._world_size / _LOOKS_PER_SECOND))
            try:
                missing = self._missing()
                if now >= next_look:
                    next_look = now + _COMPLAINTS_SECONDS
                    fresh = self._log.complaints()
                    for complaint in fresh:
                        log.warning("a worker was turned away: %s", complaint)
                    complaints += fresh
            except TelegradError:
                raise
            except RuntimeError as error:
                if self._log.where is None:
                    text = f"the rendezvous store closed while waiting for {missing}: {str(error).splitlines()[0]}"
                    raise RendezvousError(text) from error
        return self._counts_until > 0

    def _missing(self) -> str:
        """Who is missing, in words."""
        if self._counts_until:
            number = self._log.asked(lambda register: register.missing(self._agent.member.generation))
            if number == 0:
                return ""
            if time.monotonic() < self._counts_until and (number is None or number > 0):
                return "some" if number is None else str(number)
            self._counts_until = 0.0
        self._log.news(self._agent.peers.take_news)
        missing = sorted(set(range(self._world_size)) - self._joining.present())
        return f"ranks {missing}" if missing else ""


def check_counted(agent: Agent, member_log: MemberLog, joining: Joining) -> None:
    """All have come, and their records are unread: check what this worker's own device maps name. If one worker finds
    its maps wrong, all read all records, and raise the same ValueError."""
    member, asked = agent.member, member_log.asked
    agent.directory.counted_here = asked(lambda register: register.on_host(member)) or 0
    if not asked(lambda register: register.unchecked(member.generation)):
        return
    if member.device_maps or member.devices:
        are_right = _are_right(agent)
        asked(lambda register: register.say_checked(member.generation, are_right))
    deadline, pause = time.monotonic() + agent.options.rendezvous_timeout, _FIRST_PAUSE
    while (unchecked := asked(lambda register: register.unchecked(member.generation)) or 0) > 0:
        if time.monotonic() >= deadline:
            raise RendezvousError(f"rendezvous timed out: {unchecked} workers have not checked their device maps")
        sleep(pause)
        pause = min(2 * pause, max(_LONGEST_PAUSE, (agent.world_size or 0) / _LOOKS_PER_SECOND))
    if unchecked < 0:
        member_log.news(agent.peers.take_news)
        check_maps(joining.seen.values(), is_static=True)


def _are_right(agent: Agent) -> bool:
    for name in agent.member.device_maps:
        agent.peers.look_for_news(name)
    named = [agent.directory.by_name(name) for name in agent.member.device_maps]
    try:
        check_maps([agent.member, *(other for other in named if other is not None)], is_static=True)
    except ValueError:
        return False
    return True


def counterpart_of(agent: Agent, member_log: MemberLog) -> Member | None:
    """Whom to ask on another host whether it reaches this worker, where the records of all are unread."""
    worker_id = member_log.asked(lambda register: register.counterpart(agent.member))
    return None if worker_id is None else agent.find(worker_id)
