"""A local cluster starts, carries functions of a script, shows output and errors, and always ends."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import telegrad
from telegrad import rpc
from telegrad.errors import AlreadyInitialized, RendezvousError, WorkerDied
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, time
import torch
import telegrad
from telegrad import rpc

OFFSET = 40

def add(x):  # no guard around the program, and a global of the script
    print("adding on", rpc.get_worker_info().name)
    return x + OFFSET

with telegrad.local_cluster(workers=2, shutdown_timeout=120) as cluster:
    print("pids", *[cluster.pid(name) for name in cluster.others], flush=True)
    {body}
"""


def start_script(body: str) -> "subprocess.Popen[str]":
    code = SCRIPT.format(body=body)
    # Unbuffered, `print` writes a line and its end apart, and a worker's line may come between.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env=buffered,
    )


def worker_pids(script: "subprocess.Popen[str]") -> list[int]:
    assert script.stdout is not None
    line = script.stdout.readline()
    assert line.startswith("pids"), line
    return [int(pid) for pid in line.split()[1:]]


def wait_until_gone(pids: list[int], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_functions_of_a_script_run_on_the_workers_and_their_output_bears_a_name() -> None:
    script = start_script("print(rpc.rpc_sync('worker1', add, args=(torch.tensor(2),)).item())")
    out, err = script.communicate(timeout=150)
    assert script.returncode == 0, err
    assert "[worker1] adding on worker1" in out.splitlines()
    assert "42" in out.splitlines()


def test_an_exception_there_shows_here_and_ends_the_processes() -> None:
    script = start_script("rpc.rpc_sync('worker1', lambda: 1 / 0)")
    pids = worker_pids(script)
    _, err = script.communicate(timeout=150)
    assert script.returncode == 1
    assert re.search(r"ZeroDivisionError: division by zero\n.*worker1", err)
    wait_until_gone(pids)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_their_owner_even_in_the_midst_of_a_call(how: signal.Signals) -> None:
    script = start_script(
        "f = [rpc.rpc_async('worker1', time.sleep, args=(600,)) for _ in range(3)]; print('busy', flush=True); "
        "time.sleep(600)"
    )
    pids = worker_pids(script)
    assert script.stdout is not None
    assert script.stdout.readline() == "busy\n"
    script.send_signal(how)
    _, err = script.communicate(timeout=150)
    assert script.returncode != 0
    assert "dropped before anyone asked" not in err  # one interrupt is one traceback, however many calls are under way
    wait_until_gone(pids)


def test_clusters_follow_each_other_in_one_process(capfd: pytest.CaptureFixture[str]) -> None:
    for workers in (1, 2):
        with telegrad.local_cluster(workers=workers) as cluster:
            assert cluster.names == tuple(f"worker{rank}" for rank in range(workers))
            for name in cluster.names:
                assert rpc.rpc_sync(name, os.getpid) == cluster.pid(name)
                assert rpc.rpc_sync(name, torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
    assert capfd.readouterr().err == ""


def test_a_name_for_each() -> None:
    with telegrad.local_cluster(names=["trainer", "ps"]):
        assert rpc.get_worker_info().name == "trainer"
        assert rpc.get_worker_info("ps").id == 1
    with pytest.raises(ValueError, match="a name of its own"), telegrad.local_cluster(names=["a", "a"]):
        pass


def test_the_collector_of_a_worker_does_not_walk_torch() -> None:
    """Nor is anything of the program's set aside, here or there."""
    before = gc.get_freeze_count()
    with telegrad.local_cluster(workers=2):
        assert rpc.rpc_sync("worker1", gc.get_freeze_count) > 50_000
        assert gc.get_freeze_count() == before


def test_a_killed_worker_does_not_hold_up_the_end() -> None:
    with telegrad.local_cluster(workers=3) as cluster:
        waiting = rpc.rpc_async("worker1", time.sleep, args=(600,))
        cluster.kill("worker1")
        with pytest.raises(WorkerDied, match="worker1"):
            waiting.wait()
        assert rpc.rpc_sync("worker2", abs, args=(-1,)) == 1


def test_a_worker_that_cannot_start_says_why() -> None:
    broken = {"PYTHONHOME": "/nowhere"}
    with pytest.raises(RendezvousError, match=r"before it joined. It said:\n.*"):  # noqa: SIM117
        with telegrad.local_cluster(workers=2, env=broken, show_output=False):
            pass


def test_a_worker_cannot_start_a_cluster_of_its_own() -> None:
    with telegrad.local_cluster(workers=1):  # noqa: SIM117
        with pytest.raises(AlreadyInitialized), telegrad.local_cluster(workers=2):
            pass


def test_a_killed_worker_is_started_again_as_often_as_it_takes(capfd: pytest.CaptureFixture[str]) -> None:
    with telegrad.local_cluster(workers=2, restart=True) as cluster:
        for _ in range(2):
            before = rpc.rpc_sync("worker1", os.getpid)
            cluster.kill("worker1")
            after = rpc.rpc_sync("worker1", os.getpid, timeout=120, retries=2)
            assert before != after == cluster.pid("worker1")
        with pytest.raises(WorkerDied, match="worker1"):
            rpc.rpc_sync("worker1", os._exit, args=(3,))
        assert rpc.rpc_sync("worker1", abs, args=(-1,), timeout=120, retries=2) == 1
    assert "[worker1] ended with status 3" in capfd.readouterr().err


def test_a_worker_that_never_joins_again_is_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    with telegrad.local_cluster(workers=2, restart=True) as cluster:
        cluster._env = {**cluster._env, "PYTHONHOME": "/nowhere"}
        cluster.kill("worker1")
        said = ""

        def given_up() -> bool:
            nonlocal said
            said += capfd.readouterr().err
            return "is not started again" in said

        wait_until(given_up, 120)


def test_a_worker_on_its_way_back_does_not_hold_up_the_end() -> None:
    with telegrad.local_cluster(workers=2, restart=True, shutdown_timeout=150) as cluster:
        old = cluster.pid("worker1")
        cluster.kill("worker1")
        wait_until(lambda: cluster.pid("worker1") != old)
        began = time.monotonic()
    assert time.monotonic() - began < 75  # it would be waited for as long as a shutdown waits


ONE_MODULE = """
import sys
import torch
import telegrad
from telegrad import autograd, rpc

STORE = None
TABLE = {}
RATE = 1
weight = torch.ones(2, requires_grad=True)

def put(x):
    global STORE
    STORE = x
    TABLE["here"] = x

def get():
    return STORE, dict(TABLE)

class Counter:
    made = 0
    def __init__(self):
        Counter.made += 1

def count():
    Counter()
    return Counter.made

def scaled(x):
    return helper(x) * RATE

def helper(x):
    return x + 1

def weighted(x):
    return x * weight

def pass_on(worker, function, *args):
    return rpc.rpc_sync(worker, function, args)

with telegrad.local_cluster(workers=3, show_output=False):
    rpc.rpc_sync("worker1", put, (5,))
    assert rpc.rpc_sync("worker1", get) == (5, {"here": 5}), rpc.rpc_sync("worker1", get)
    assert rpc.rpc_sync("worker2", get) == (None, {})
    assert (STORE, TABLE) == (None, {})
    assert [rpc.rpc_sync("worker1", count) for _ in range(3)] == [1, 2, 3]
    # A function that comes by way of another worker brings nothing that this one has changed.
    rpc.rpc_sync("worker2", put, (7,))
    assert rpc.rpc_sync("worker2", pass_on, ("worker1", get)) == (5, {"here": 5})
    assert rpc.rpc_sync("worker2", get) == (7, {"here": 7})
    # What the script defines anew is new there, too, as in a notebook.
    assert rpc.rpc_sync("worker1", scaled, (1,)) == 2
    RATE = 10
    def helper(x):
        return x + 2
    def scaled(x):
        return helper(x) * RATE
    assert rpc.rpc_sync("worker1", scaled, (1,)) == 30
    assert rpc.rpc_sync("worker1", lambda x: helper(x) * RATE, (2,)) == 40
    # A tensor of the script's that requires grad has its gradient here, in each context.
    for _ in range(3):
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", weighted, (torch.full((2,), 3.0),))
            autograd.backward(context_id, [y.sum()])
            assert autograd.get_gradients(context_id)[weight].tolist() == [3.0, 3.0]
print("all well")
"""


def test_functions_of_a_script_are_functions_of_one_module() -> None:
    done = subprocess.run([sys.executable, "-c", ONE_MODULE], capture_output=True, text=True, timeout=150, check=False)
    assert done.stdout.endswith("all well\n"), done.stderr


OWN_ERRORS = """
import telegrad
from telegrad import rpc

class Spilled(Exception):
    def __init__(self, what, amount):
        super().__init__(f"{amount} of {what}")
        self.what, self.amount = what, amount

def hop(through):
    if not through:
        raise Spilled("tea", 3)
    try:
        return rpc.rpc_sync(through[0], hop, (through[1:],))
    except Spilled as error:
        error.amount += 1
        raise

def hop_in_a_batch(through):
    with rpc.batch() as batch:
        future = batch.rpc_async(through[0], hop, (through[1:],))
    return future.wait()

with telegrad.local_cluster(workers=3):
    for through in ([1], [1, 2], [1, 0], [1, 0, 2, 1], [2, 0, 1, 0, 2], [0, 1, 0]):
        names = [f"worker{n}" for n in through]
        calls = [(hop, (names,)), (hop_in_a_batch, (names,)), (rpc.rpc_sync, ("worker1", hop_in_a_batch, (names,)))]
        for call, arguments in calls:
            try:
                call(*arguments)
            except Spilled as error:
                print(error.what, error.amount - len(through), end="; ")
    print()
"""


def test_an_exception_of_the_script_is_caught_wherever_it_passes_through() -> None:
    done = subprocess.run([sys.executable, "-c", OWN_ERRORS], capture_output=True, text=True, timeout=150, check=False)
    assert done.stdout == 6 * "tea 3; tea 2; tea 2; " + "\n", done.stdout + done.stderr


def test_a_seed_makes_all_workers_repeatable() -> None:
    drawn = []
    for _ in range(2):
        with telegrad.local_cluster(workers=2, seed=7):
            drawn.append([torch.rand(1).item(), rpc.rpc_sync("worker1", torch.rand, (1,)).item()])
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


ENDS_WELL = """
    def start():
        import atexit, threading
        def spin():
            a = torch.ones(64, 64, requires_grad=True)
            while True:
                (a @ a).sum().backward()
        for _ in range(3):
            threading.Thread(target=spin, daemon=True).start()
        done = threading.Event()
        atexit.register(lambda: print("exit handler, after the thread:", done.is_set()))
        threading.Thread(target=lambda: (time.sleep(0.2), done.set()), daemon=False).start()
    rpc.rpc_sync("worker1", start)
    process = cluster._processes["worker1"]
print("status", process.status)
"""


def test_a_worker_ends_well_with_threads_inside_torch() -> None:
    """The interpreter's own end aborts in C++ then; what it does for the user before that is still done."""
    script = start_script(ENDS_WELL.strip("\n").removeprefix("    "))
    out, err = script.communicate(timeout=150)
    assert script.returncode == 0, err
    assert "[worker1] exit handler, after the thread: True" in out
    assert "status 0" in out
    assert "terminate" not in err


# --- a block that is never left: a notebook's, a prompt's, one that the program forgets ---

OPEN = """
import atexit, contextlib, os, signal, sys, threading, time
import telegrad
from telegrad import rpc

block = telegrad.local_cluster(workers=2)
cluster = block.__enter__()
print("pids", cluster.pid("worker1"), flush=True)
"""
IN_A_STACK = OPEN.replace("block.__enter__()", "contextlib.ExitStack().enter_context(block)")
IN_A_GENERATOR = OPEN.replace("cluster = block.__enter__()", "").replace(
    "print(",
    "def within():\n    with block as cluster:\n        yield cluster\nheld = within()\ncluster = next(held)\nprint(",
)
AT_EXIT = """
def at_exit():
    import atexit
    atexit.register(lambda: print("exit handler"))
rpc.rpc_sync("worker1", at_exit)
"""
UNDER_WAY = "rpc.rpc_async('worker1', time.sleep, args=(600,))\n"


def run_to_its_end(code: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """A program that leaves a cluster open. Its input is empty, as that of a prompt at which Ctrl-D is pressed."""
    command = [sys.executable, *options, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as program:
        try:
            out, err = program.communicate(timeout=100)
        finally:
            program.kill()
    first, *others = out.splitlines()
    assert first.startswith("pids"), out
    wait_until_gone([int(pid) for pid in first.split()[1:]])
    return subprocess.CompletedProcess(command, program.returncode, "\n".join(others), err)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        pytest.param(OPEN, 0, id="end"),
        pytest.param(IN_A_STACK, 0, id="stack"),
        pytest.param(IN_A_GENERATOR, 0, id="generator"),
        pytest.param(OPEN + "raise SystemExit(3)", 3, id="status"),
        pytest.param(OPEN + UNDER_WAY + "raise SystemExit(3)", 3, id="busy"),
        pytest.param(OPEN + "rpc.shutdown()", 0, id="shutdown"),
        pytest.param(OPEN + "rpc.shutdown(graceful=False)", 0, id="at-once"),
        pytest.param(OPEN + UNDER_WAY + "1 / 0", 1, id="error"),
        pytest.param(OPEN + UNDER_WAY + "signal.raise_signal(signal.SIGINT)", -signal.SIGINT, id="ctrl-c"),
        pytest.param(OPEN + "os._exit(5)", 5, id="no-handlers"),
        pytest.param(OPEN + "cluster.kill('worker1')", 0, id="killed-worker"),
    ],
)
def test_a_program_ends_with_its_cluster_open(code: str, status: int) -> None:
    assert run_to_its_end(code).returncode == status


def test_a_prompt_ends_with_its_cluster_open() -> None:
    assert run_to_its_end(OPEN, "-i").returncode == 0


def test_a_program_that_ends_shuts_its_open_cluster_down() -> None:
    """The workers end by themselves, and what the program does at its own exit can still call them."""
    call = "atexit.register(lambda: print(rpc.rpc_sync('worker1', pow, (2, 3))))"
    done = run_to_its_end(OPEN + AT_EXIT + call)
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["8", "[worker1] exit handler"], done.stderr


def test_calls_under_way_in_an_open_cluster_have_little_time() -> None:
    done = run_to_its_end(OPEN + UNDER_WAY)
    assert done.returncode == 0
    assert "a local_cluster was open when the program ended: " in done.stderr
    assert "still under way: sleep() on worker 'worker1'" in done.stderr


def test_a_fork_leaves_an_open_cluster_alone() -> None:
    forks = "child = os.fork() or sys.exit(0)\nprint(os.waitpid(child, 0)[1], rpc.rpc_sync('worker1', pow, (2, 3)))"
    assert run_to_its_end(OPEN + forks).stdout == "0 8"


def test_a_forked_child_that_leaves_the_block_leaves_the_workers_alone() -> None:
    code = """
import os, time
import telegrad
from telegrad import rpc

with telegrad.local_cluster(workers=2, restart=True, shutdown_timeout=20) as cluster:
    before = cluster.pid("worker1")
    print("pids", before, flush=True)
    began = time.monotonic()
    child = os.fork()
    if child:
        print(os.waitpid(child, 0)[1], time.monotonic() - began < 10)
        print(rpc.rpc_sync("worker1", os.getpid) == before, flush=True)
if not child:
    os._exit(0)
"""
    assert run_to_its_end(code).stdout.splitlines() == ["0 True", "True"]


def test_a_daemon_thread_in_its_block_does_not_hold_up_the_end() -> None:
    lines = "\n    ".join(OPEN.strip().splitlines()[4:])
    code = f"""
{OPEN.partition("block =")[0]}
entered = threading.Event()
def work():
    global block
    {lines}
    print(cluster.directory, flush=True)
    entered.set()
    time.sleep(600)
threading.Thread(target=work, daemon=True).start()
entered.wait()
"""
    done = run_to_its_end(code)
    assert done.returncode == 0
    assert not Path(done.stdout.splitlines()[0]).exists()
