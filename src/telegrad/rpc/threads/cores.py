"""How the workers of one host share its cores.

torch gives each process as many OpenMP threads as there are cores, and they spin for a while after each operation. That
is right for a process alone on a host; several take the cores from each other that way. So workers that are started
together get environment variables (`variables_for`), which is all that can make OpenMP's threads sleep: they are read
once, when torch is loaded. A process that others started gets its share of threads when it joins (`take_share`).

Whatever the user has said, in the environment or by `torch.set_num_threads`, stays.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch

log = logging.getLogger("telegrad.rpc")

COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of this process's control group, where it has one of its own

_taken: tuple[int, int] | None = None  # torch's threads before this process took its share, and the share
_leaves_a_pool = False  # see `_after_fork`


def usable_cores() -> int:
    """How many cores this process may use: by its affinity and by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # there is none, or it says "max"
        return cores


def fair_share(workers: int) -> int:
    """Threads for the arithmetic of each of so many workers on this host."""
    return max(1, usable_cores() // max(1, workers))


def connections_for(workers: int, encrypted: bool) -> int:
    """TCP connections for one large message where so many workers share this host.

    Eight pay even where each worker has one core, since one thread works while others wait for their socket; two where
    it has less than one, since others work meanwhile; more than eight gain little. With TLS the threads spend most of
    their time in short calls that need the GIL, and are in each other's way: one is as good as two, and more are
    worse."""
    if encrypted:
        return 1
    return 8 if workers <= usable_cores() else 2


def sealed_connections_for(workers: int) -> int:
    """The same with TLS where tensors go over sealed connections beside the first, which carries next to nothing."""
    return 1 + min(8, max(2, fair_share(workers)))


def variables_for(workers: int, environment: Mapping[str, str], threads: int | None = None) -> dict[str, str]:
    """What to add to the environment of each of `workers` that are started here; nothing for one alone.

    `threads` is what the user asked for each to have."""
    variables = {}
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    elif workers > 1 and not any(name in environment for name in COUNTS):
        variables["OMP_NUM_THREADS"] = str(fair_share(workers))
    if workers > 1 and not any(name in environment for name in WAITING):
        variables["OMP_WAIT_POLICY"] = "PASSIVE"
    return variables


def take_share(workers: int) -> None:
    """This process turned out to be one of `workers` on its host: let torch use no more threads than its share."""
    global _taken  # noqa: PLW0603 - of the process, like torch's own setting
    now, share = torch.get_num_threads(), fair_share(workers)
    if workers <= 1 or now <= share or any(name in os.environ for name in COUNTS) or not _is_default(now):
        return
    _taken = now, share
    torch.set_num_threads(share)
    _mind_forks()
    log.info(
        "%d workers share the %d cores of this host: torch uses %d threads here instead of %d. Set OMP_NUM_THREADS to "
        "choose another number, and OMP_WAIT_POLICY=PASSIVE before the workers start: it cannot be set later",
        workers,
        usable_cores(),
        share,
        now,
    )


def return_share() -> None:
    """This process is no worker any more: torch has again what it had, unless that was changed meanwhile."""
    global _taken
    taken, _taken = _taken, None
    if taken is not None and torch.get_num_threads() == taken[1]:
        torch.set_num_threads(taken[0])


def _mind_forks() -> None:
    global _leaves_a_pool  # noqa: PLW0603 - of the process, like the hook
    if not _leaves_a_pool:
        _leaves_a_pool = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    """Setting the number of threads makes torch start a pool of them, which a forked child has without its threads. At
    the child's exit torch would wait for these, and crash; set again, it leaves that pool alone and makes another."""
    torch.set_num_threads(torch.get_num_threads())


def _is_default(threads: int) -> bool:
    """Whether torch would have chosen this number by itself: it takes all cores, or one thread of each."""
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return threads in (visible, max(1, visible // 2), os.cpu_count(), max(1, (os.cpu_count() or 1) // 2))
