"""What is called sees the definitions of its script as they are at the time of the call, and keeps what it has made."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, time
import torch
import telegrad
from telegrad import rpc
from telegrad.errors import SerializationError
from telegrad.rpc.current import require_agent

def call(func, *args, to="worker1"):
    return rpc.rpc_sync(to, func, args)

def refused(func, *args):
    try:
        call(func, *args)
    except SerializationError as error:
        return str(error)

def bytes_before(func):  # what a call of it carries beside its arguments
    return len(require_agent().links["worker1"].functions.define(func, True).carried)

with telegrad.local_cluster(workers=3, restart=True) as cluster:
{body}
print("all well")
"""

# The body of a script. Each redefines something, as cells of a notebook that are run again do.
BODIES = {
    "a helper and a number": """
K = 1
def f(): return "old"
def g(): return f(), K
for to in ("worker1", "worker2"):
    assert call(g, to=to) == ("old", 1)
K = 2
def f(): return "new"
for to in ("worker1", "worker2"):
    assert call(g, to=to) == g() == ("new", 2)
def f(): return f"with {late}"
late = 5
assert call(g) == ("with 5", 2)
late = 6
assert call(g) == ("with 6", 2)
K = None
assert call(g) == ("with 6", None)
""",
    "a helper with a cache": """
import functools
K = 2
@functools.lru_cache(maxsize=8)
def scaled(x): return x * K
@functools.cache
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
def f(x): return scaled(x), fib(60), scaled.cache_parameters()["maxsize"], scaled.cache_info().hits
assert call(f, 3) == (6, 1548008755920, 8, 0)
assert call(f, 3) == (6, 1548008755920, 8, 1)
assert call(scaled, 4) == 8 and call(fib, 10) == 55
@functools.lru_cache(maxsize=4)
def scaled(x): return x * K + 1
assert call(f, 3)[:3] == (7, 1548008755920, 4)
""",
    "the helper of a module's class": """
def size(): return 2
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(size(), 1)
def width(net): return net.local_value().fc.in_features
first = rpc.remote("worker1", Net)
assert call(width, first) == 2
def size(): return 3
assert call(width, rpc.remote("worker1", Net)) == 3
assert call(width, first) == 2
""",
    "a class": """
class Thing:
    made = 0
    def __init__(self): Thing.made += 1
    def name(self): return "old"
def make():
    global kept
    kept = Thing()
    return kept.name(), Thing.made
def again(): return kept.name(), K
K = 1
assert call(make) == ("old", 1)
assert call(again) == ("old", 1)
def unrelated(): return Thing.made
def make():
    return unrelated()
assert call(again) == ("old", 1)
class Thing:
    def name(self): return "new"
K = 2
assert call(again) == ("old", 2)
def fresh(): return Thing().name()
assert call(fresh) == "new"
class Thing:
    def name(self): return "newest"
assert call(fresh) == "newest"
""",
    "what cannot be taken in": """
import os
class Picky:
    def __init__(self, n, here): self.n, self.here = n, here
    def __setstate__(self, state):
        if state["here"]: raise ValueError("not here")
        self.__dict__.update(state)
which, other = Picky(1, False), "old"
def f(): return which.n, other
def g(): return which.n
def h(): return other
assert (call(f), call(g), call(h)) == ((1, "old"), 1, "old")
which, other = Picky(2, True), "new"
assert "not here" in refused(f)
assert "not here" in refused(g)
assert call(h) == "new"
other = "newer"
assert "not here" in refused(f)
def i(): return which.n, "i"
assert "not here" in refused(i)
which = Picky(3, False)
assert (call(f), call(g), call(h), call(i)) == ((3, "newer"), 3, "newer", (3, "i"))
""",
    "what came with a function that could not be": """
import types
sys.modules["only_here"] = only_here = types.ModuleType("only_here")
exec("def thing(): return 1", vars(only_here))
thing = only_here.thing
table = {"a": 1}
def f(): return table["a"] + thing()
def g(): return table["a"]
assert "only_here" in refused(f)
assert call(g) == 1
def thing(): return 10
assert call(f) == 11
""",
    "more than a worker keeps": """
A, B = "a" * 60 * 2**20, "b" * 60 * 2**20
def f(): return len(A)
def g(): return len(B)
def h(): return "small"
for _ in range(2):
    assert (call(f), call(g), call(h)) == (60 * 2**20, 60 * 2**20, "small")
A = "c" * 140 * 2**20
assert (call(f), call(h)) == (140 * 2**20, "small")
""",
    "a reference": """
K = rpc.remote("worker1", int, (3,))
def f(): return K.local_value()
for _ in range(2):
    assert call(f) == 3
K = rpc.remote("worker1", int, (4,))
assert call(f) == 4
""",
    "recursion": """
def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)
assert call(even, 4) is True
def odd(n): return "changed"
assert call(even, 4) == "changed"
""",
    "a decorated function": """
import functools
def twice(func):
    @functools.wraps(func)
    def wrapper(*args):
        return factor * func(*args)
    return wrapper
def helper(x): return x
@twice
def g(x): return helper(x) + 1
factor = 2
assert call(g, 1) == 4
factor = 3
assert call(g, 1) == 6
def helper(x): return 10 * x
assert call(g, 1) == 33
""",
    "a builtin's name, and back": """
def g(): return sum([1, 2])
assert call(g) == 3
sum = max
assert call(g) == 2
del sum
assert call(g) == 3
""",
    "tensors": """
K = 1
def g(): return K
assert call(g) == 1
K = torch.ones(2)
assert torch.equal(call(g), K)
K = torch.zeros(2)
assert torch.equal(call(g), K)
K = 2
assert call(g) == 2
""",
    "through another worker": """
K = 1
def g(): return K
def relay(): return rpc.rpc_sync("worker2", g)
assert call(relay) == 1
K = 2
assert call(relay) == 2
""",
    "a worker that came back": """
K = 1
def g(): return K
assert call(g) == 1
K = 2
cluster.kill("worker1")
deadline = time.monotonic() + 100
while True:
    try:
        assert call(g) == 2
        break
    except telegrad.errors.WorkerDied:
        assert time.monotonic() < deadline
        time.sleep(0.01)
K = 3
assert call(g) == 3
""",
    "what cannot be sent, and what cannot be rebuilt": """
K = 1
count = 0
def g(): return K
def bump():
    global count
    count += 1
    return count
assert call(g) == call(bump) == 1
K = sys.stdout
assert "global 'K'" in refused(g)
class Bad:
    def __reduce__(self): return eval, ("1/0",)
K = Bad()
for _ in range(2):
    assert "ZeroDivisionError" in refused(g)
assert call(bump) == 2
K = 2
assert call(g) == 2
""",
    "what the worker has made of the rest stays": """
count = K = 0
class Seen:
    times = 0
def helper(): return "old"
def bump():
    global count
    count += 1
    Seen.times += 1
    return count, Seen.times, K, helper()
def look(): return count, Seen.times
assert call(look) == (0, 0)
assert call(bump) == (1, 1, 0, "old")
assert call(look) == (1, 1)
K = 1
def helper():
    return f"new {Seen.times}"
assert call(bump) == (2, 2, 1, "new 2")
assert call(look) == (2, 2)
count = 10
assert call(look) == (10, 2)
assert call(bump) == (11, 3, 1, "new 3")
""",
    "data that has not changed is not sent again": """
data = list(range(300_000))
def helper(): return len(data)
def g(): return K, helper()
def other(): return len(data), K
K = 1
assert call(g) == (1, 300_000)
K = 2
assert bytes_before(g) < 1000
assert call(g) == (2, 300_000)
def helper(): return -len(data)
assert bytes_before(g) < 3000
assert call(g) == (2, -300_000)
assert bytes_before(other) < 3000
assert call(other) == (300_000, 2)
""",
    "what changes with each call takes no room": """
def g(): return step
for step in range(9000):
    assert call(g) == step
table = require_agent().links["worker1"].functions
assert next(table._numbers) < 10
""",
    "a call that was given up, and lost with its connection": """
K = 1
def g(): return K
assert call(g) == 1
K = 2
from telegrad.errors import RpcTimeout
from telegrad.transport.outgoing import Outgoing
send, Outgoing.send_encoded = Outgoing.send_encoded, lambda *_, **__: None
try:
    rpc.rpc_sync("worker1", g, timeout=0.2)
except RpcTimeout:
    pass
waiting = rpc.rpc_async("worker1", g)  # lost as well, and sent again: it relies on what the one before it said
Outgoing.send_encoded = send
require_agent().links["worker1"].current.stream.abort()
assert waiting.wait() == 2 and call(g) == 2
""",
    "a call under way": """
K = 1
def slow(seconds):
    time.sleep(seconds)
    return K
def g(): return K
assert call(slow, 0) == 1
under_way = rpc.rpc_async("worker1", slow, (1,))
K = 2
assert call(g) == 2
assert under_way.wait() in (1, 2)
assert call(slow, 0) == 2
""",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_script_that_redefines(body: str) -> None:
    script = SCRIPT.replace("{body}", textwrap.indent(body, "    "))
    ran = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=150)
    assert "all well" in ran.stdout, ran.stderr


TRAINED = """
import torch
import telegrad
from telegrad import rpc
model = torch.nn.Linear(2, 1)
norm = torch.nn.BatchNorm1d(2)
frozen = torch.zeros(2)
def train():
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        model.weight.sub_(model.weight.grad)
    return frozen.add_(1).sum().item()
def read(): return norm(torch.ones(4, 2)).sum().item() if norm.training else norm.weight.sum().item()
norm.eval()
with telegrad.local_cluster(workers=2):
    for number in range(3):
        assert rpc.rpc_sync("worker1", train) == 2 * number + 2
        rpc.rpc_sync("worker1", read)
print("all well")
"""


def test_what_a_worker_trains_in_a_global_of_the_script_is_lost_and_said_to_be() -> None:
    """It requires grad, so the script's own comes anew with each call: of this a worker tells once."""
    ran = subprocess.run([sys.executable, "-c", TRAINED], check=False, capture_output=True, text=True, timeout=150)
    assert "all well" in ran.stdout, ran.stderr
    told = [line for line in (ran.stdout + ran.stderr).splitlines() if "was changed by this worker" in line]
    assert len(told) == 1
    assert "worker1" in told[0] and "'model'" in told[0] and "rpc.remote or RemoteModule" in told[0]
