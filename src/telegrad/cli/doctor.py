"""What this machine offers Telegrad, what each way of talking costs here, and what to do about what is missing.

A check looks at one thing and returns one `Finding`. Measurements take a few milliseconds each and are taken between
two threads or within one, so they show the order of magnitude, not a benchmark.
"""

import mmap
import os
import platform
import resource
import shutil
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from telegrad._requirements import judge_torch

_ROUNDS = 200
_MESSAGE = b"x" * 200
_BLOCK = 16 * 2**20


@dataclass(frozen=True)
class Finding:
    """What one check saw. `advice` is empty when all is well; `fatal` means that Telegrad cannot run so."""

    what: str
    saw: str
    advice: str = ""
    fatal: bool = False


def examine() -> list[Finding]:
    """Run all checks; one that breaks is a finding itself."""
    findings = []
    for check in CHECKS:
        try:
            findings.append(check())
        except Exception as error:
            what = check.__name__.removeprefix("_").replace("_", " ")
            findings.append(Finding(what, f"{type(error).__name__}: {error}", "not available here"))
    return findings


def report(findings: list[Finding]) -> str:
    """The findings as a table, and what to do below it."""
    width = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        mark = "FAIL" if finding.fatal else "note" if finding.advice else "ok"
        lines.append(f"{mark:>4}  {finding.what:<{width}}  {finding.saw}")
        if finding.advice:
            lines.append(f"      {'':<{width}}  -> {finding.advice}")
    notes = sum(bool(finding.advice) for finding in findings)
    lines.append("")
    lines.append("All is well." if not notes else f"{notes} of {len(findings)} checks have something to say.")
    return "\n".join(lines) + "\n"


def _python() -> Finding:
    saw = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < (3, 11):  # noqa: UP036 - this is where a user finds out
        return Finding("Python", saw, "install Python 3.11 or newer", fatal=True)
    return Finding("Python", saw)


def _torch() -> Finding:
    """Which torch there is; one that is too old was refused when this package was imported."""
    import torch

    devices = f"{torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else "CPU only"
    saw = f"{torch.__version__}, {devices}, {torch.get_num_threads()} threads"
    return Finding("torch", saw, judge_torch(torch.__version__) or "")


def _engine() -> Finding:
    from telegrad.errors import RendezvousError
    from telegrad.rpc.job.environment import detect

    try:
        found = detect(os.environ, socket.getfqdn())
    except RendezvousError as error:
        return Finding("started by", str(error), "init_rpc() without arguments fails here for this reason")
    if not found.facts:
        return Finding("started by", "no engine: init_rpc needs a name, and MASTER_ADDR and MASTER_PORT")
    return Finding("started by", str(found))


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    load = os.getloadavg()[0]
    saw = f"{cores} usable, load {load:.1f}"
    if cores == 1:
        return Finding("cores", saw, "two workers on one core take turns: expect a call to cost about 100 us more")
    if load > 2 * cores:
        return Finding("cores", saw, "the machine is busy: calls wait for a core; what is measured below is too high")
    return Finding("cores", saw)


def _arithmetic() -> Finding:
    """What several workers here would use for arithmetic: see `telegrad.rpc.threads.cores`."""
    from telegrad.rpc.threads.cores import COUNTS, WAITING, usable_cores, variables_for

    chosen = [f"{name}={os.environ[name]}" for name in (*COUNTS, *WAITING) if name in os.environ]
    four = variables_for(4, os.environ)
    ours = [f"{name}={value}" for name, value in four.items()]
    saw = f"{', '.join(chosen) or 'nothing set'}; of 4 workers here each would get {', '.join(ours) or 'just that'}"
    if usable_cores() > 2 and not any(name in os.environ for name in WAITING):
        advice = (
            "`telegrad run` and `local_cluster` set that by themselves; with another launcher, export "
            "OMP_WAIT_POLICY=PASSIVE, or OpenMP's threads of each worker spin on the cores of the others"
        )
        return Finding("threads for arithmetic", saw, advice)
    return Finding("threads for arithmetic", saw)


def _unix_sockets() -> Finding:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Finding("Unix sockets", f"round trip {_round_trip(ours, theirs):.0f} us")


def _loopback_tcp() -> Finding:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for sock in (ours, theirs):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Finding("TCP, loopback", f"round trip {_round_trip(ours, theirs):.0f} us")


def _round_trip(ours: socket.socket, theirs: socket.socket) -> float:
    """Microseconds for a small message there and back, the other side in a thread of this process."""

    def echo() -> None:
        with theirs:
            while data := theirs.recv(len(_MESSAGE)):
                theirs.sendall(data)

    thread = threading.Thread(target=echo, daemon=True)
    thread.start()
    with ours:
        times = []
        for _ in range(_ROUNDS):
            begun = time.perf_counter()
            ours.sendall(_MESSAGE)
            ours.recv(len(_MESSAGE))
            times.append(time.perf_counter() - begun)
    thread.join()
    return statistics.median(times) * 1e6


def _shared_memory() -> Finding:
    what = "shared memory"
    if not hasattr(os, "memfd_create"):
        return Finding(what, "no memfd on this system", "large tensors are copied through sockets, which is slower")
    fd = os.memfd_create("telegrad-doctor")
    try:
        os.ftruncate(fd, _BLOCK)
        with mmap.mmap(fd, _BLOCK) as block:
            source = bytes(_BLOCK)
            first, again = _seconds(lambda: _copy(block, source)), _seconds(lambda: _copy(block, source))
    finally:
        os.close(fd)
    rates = (
        f"{_BLOCK / first / 1e9:.1f} GB/s into fresh memory, {_BLOCK / again / 1e9:.1f} GB/s once it has been touched"
    )
    return Finding(what, f"memfd works, {rates}")


def _copy(block: mmap.mmap, source: bytes) -> None:
    block[:] = source


def _seconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _memory_limits() -> Finding:
    limits = {"address space": resource.RLIMIT_AS, "locked memory": resource.RLIMIT_MEMLOCK}
    soft = {name: resource.getrlimit(number)[0] for name, number in limits.items()}
    saw = ", ".join(f"{name} {_size(value)}" for name, value in soft.items())
    if soft["address space"] not in (resource.RLIM_INFINITY, -1):
        advice = "tensors in shared memory count against it on both sides: raise it with ulimit -v unlimited"
        return Finding("memory limits", saw, advice)
    return Finding("memory limits", saw)


def _size(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value / 2**20:.0f} MiB"


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    saw = f"{soft} at once (could be {hard})"
    if soft < 1024:
        advice = "each peer takes a few, each block of shared memory one: raise it with ulimit -n 4096"
        return Finding("open files", saw, advice)
    return Finding("open files", saw)


def _temporary_files() -> Finding:
    import tempfile

    directory = tempfile.gettempdir()
    free = shutil.disk_usage(directory).free
    saw = f"{directory}, {free / 2**30:.1f} GiB free"
    if free < 2**20:
        return Finding("temporary files", saw, "local clusters meet in a file there: free some space or set TMPDIR")
    return Finding("temporary files", saw)


def _clock() -> Finding:
    resolution = time.get_clock_info("monotonic").resolution
    steps = [abs(time.monotonic() - time.monotonic()) for _ in range(1000)]
    saw = f"resolution {resolution * 1e9:.0f} ns, a reading costs about {statistics.median(steps) * 1e9:.0f} ns"
    if statistics.median(steps) > 2e-6:
        advice = "slow clock (a virtual machine without a fast one?): each call reads it several times"
        return Finding("clock", saw, advice)
    return Finding("clock", saw)


def _thread_hand_over() -> Finding:
    there, back = threading.Semaphore(0), threading.Semaphore(0)

    def answer() -> None:
        for _ in range(_ROUNDS):
            there.acquire()
            back.release()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    times = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        there.release()
        back.acquire()
        times.append(time.perf_counter() - begun)
    thread.join()
    return Finding("thread hand-over", f"there and back {statistics.median(times) * 1e6:.0f} us")


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _torch,
    _engine,
    _cores,
    _arithmetic,
    _unix_sockets,
    _loopback_tcp,
    _thread_hand_over,
    _shared_memory,
    _memory_limits,
    _open_files,
    _temporary_files,
    _clock,
)
