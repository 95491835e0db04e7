"""`explain`: for everything that waits on any worker, who waits for what, since when, where, and who could end it."""

from telegrad.observe.asking import ask_all
from telegrad.observe.threads import Report, activities, decode
from telegrad.observe.waiting import Explanation, explain_reports
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import require_agent


def explain() -> str:
    """Why the job waits, in words: one paragraph for everything that waits on any worker, deadlocks first.

    It asks nothing of the code that hangs: stacks and tables are read as they are. SIGUSR1 prints the same, unless the
    program has a use of its own for that signal. The text names workers that do not answer within two seconds.

    Examples:
        >>> future = rpc.rpc_async("worker1", time.sleep, (0.2,))
        >>> "worker1" in telegrad.observe.explain()
        True
        >>> future.wait()
    """
    return in_words(look(require_agent()))


def look(agent: Agent) -> Explanation:
    """The state of all workers."""
    reports, silent = reports_of(agent)
    return explain_reports(reports, silent)


def reports_of(agent: Agent) -> tuple[list[Report], list[str]]:
    """What the workers say of themselves, and the names of those that say nothing."""
    members = [member for member in agent.peers.everyone() if not agent.is_dead(member)]
    answers = ask_all(agent, members, "threads")
    reports, silent = [], []
    for member in members:
        data = answers.get(member.incarnation)
        if member.incarnation == agent.member.incarnation:
            reports.append(activities(agent))
        elif data is None:
            silent.append(member.name)
        else:
            reports.append(decode(data))
    return reports, silent


def in_words(found: Explanation) -> str:
    """An explanation as text."""
    parts = [f"DEADLOCK: {text}." for text in found.deadlocks] + found.paragraphs
    return "\n\n".join(parts) or "No worker waits for anything."
