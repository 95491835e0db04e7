"""Functions of `__main__`: between workers that run the same program, and between different ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = """
import sys, torch
from telegrad import rpc

def join(name, rank):
    options = rpc.RpcBackendOptions(init_method="file://" + sys.argv[1], rendezvous_timeout=40)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
"""

CALLER = (
    SHARED
    + """
OFFSET = 5

class Point:
    def __init__(self, x):
        self.x = x

    def moved(self, by):
        return Point(self.x + by + OFFSET)

class Refused(Exception):
    pass

def shift(x):
    return helper(x) + OFFSET

def helper(x):
    return 2 * x

def refuse():
    raise Refused("no")

async def later(x):
    return shift(x)

if __name__ == "__main__":
    join("caller", 0)
    for _ in range(2):
        assert rpc.rpc_sync("server", shift, (10,)) == 25
        assert rpc.rpc_sync("server", later, (10,)) == 25
        assert rpc.rpc_sync("server", Point(1).moved, (2,)).x == 8
        assert rpc.rpc_sync("server", lambda p: p.x, (Point(4),)) == 4
        assert torch.equal(rpc.rpc_sync("server", lambda: torch.ones(2) * OFFSET), torch.full((2,), 5.0))
    try:
        rpc.rpc_sync("server", refuse)
    except Exception as error:
        assert str(error) == "no" and "server" in error.__notes__[-1], error
        print("type", type(error).__name__)
    rpc.shutdown()
    print("all well")
"""
)

SERVER = SHARED + 'join("server", 1)\nrpc.shutdown()\n'

ROLES = """role = sys.argv[2]
    join(role, 0 if role == "caller" else 1)
    if role == "server":
        rpc.shutdown()
        sys.exit()"""

SAME = CALLER.replace('join("caller", 0)', ROLES)


def start(path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ,
    )


@pytest.mark.slow
@pytest.mark.parametrize("which", ["the same program", "different programs"])
def test_functions_of_main(tmp_path: Path, which: str) -> None:
    meeting = str(tmp_path / "meeting")
    caller, server = tmp_path / "caller.py", tmp_path / "server.py"
    if which == "the same program":
        caller.write_text(SAME)
        workers = [start(caller, meeting, role) for role in ("caller", "server")]
    else:
        caller.write_text(CALLER)
        server.write_text(SERVER)
        workers = [start(caller, meeting), start(server, meeting)]
    try:
        said = [worker.communicate(timeout=150)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert "all well" in said[0], "\n".join(said)
    assert [w.returncode for w in workers] == [0, 0]
    assert "type Refused" in said[0] or "type RemoteError" in said[0]
    assert which == "different programs" or "type Refused" in said[0]
