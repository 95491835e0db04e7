"""`install` changes what it says and no more, and `uninstall` leaves everything as it was.

Each test is a program of its own: what is replaced belongs to the whole process.
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # each imports torch anew


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr


def test_names_bound_before_are_replaced_and_restored() -> None:
    run("""
import torch, torch.distributed as dist, torch.distributed.rpc as rpc
import torch.nn.parallel.distributed as ddp
from torch.distributed.rpc import RRef, rpc_sync, init_rpc as start
from torch.distributed.rpc.api import _all_gather
from torch.futures import wait_all
before = rpc, rpc_sync, RRef, start, _all_gather, wait_all, ddp.RRef, dist.autograd, torch._C._distributed_rpc
import telegrad.compat, telegrad.rpc
telegrad.compat.install()
telegrad.compat.install()
assert rpc is dist.rpc and rpc.__name__ == "telegrad.compat.rpc"
assert rpc_sync is rpc.rpc_sync and RRef is telegrad.rpc.RRef is ddp.RRef and start is rpc.init_rpc
assert _all_gather is rpc.api._all_gather and wait_all is torch.futures.wait_all
telegrad.compat.uninstall()
after = rpc, rpc_sync, RRef, start, _all_gather, wait_all, ddp.RRef, dist.autograd, torch._C._distributed_rpc
assert all(a is b for a, b in zip(before, after)), [b for a, b in zip(before, after) if a is not b]
assert rpc.__name__ == "torch.distributed.rpc"
""")


def test_modules_are_as_before_after_uninstall() -> None:
    run("""
import sys, torch, torch.distributed as dist
import telegrad.compat, telegrad.compat.rpc
def state():
    modules = {n: m for n, m in sys.modules.items() if n.startswith("torch") and m is not None}
    return {n: (id(m), {k: id(v) for k, v in vars(m).items() if not k.startswith("__")}) for n, m in modules.items()}
import torch.distributed.nn as _, torch.distributed.optim as _
before = state()
telegrad.compat.install()
assert torch.distributed.nn.RemoteModule.__module__ == "telegrad.compat.remote_module"
assert torch.distributed.optim.DistributedOptimizer.__module__ == "telegrad.optim.optimizer"
import torch.distributed.rpc._testing
telegrad.compat.uninstall()
after = state()
assert before == after, [n for n in before.keys() | after.keys() if before.get(n) != after.get(n)]
""")


def test_packages_imported_meanwhile_bind_torchs_own_afterwards() -> None:
    run("""
import telegrad.compat
telegrad.compat.install()
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
assert RemoteModule.__module__.startswith("telegrad") and DistributedOptimizer.__module__.startswith("telegrad")
telegrad.compat.uninstall()
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
assert RemoteModule.__module__.startswith("torch") and DistributedOptimizer.__module__.startswith("torch")
""")


def test_it_starts_no_thread() -> None:
    run("""
import os, torch, telegrad.compat
before = len(os.listdir("/proc/self/task"))
telegrad.compat.install()
import torch.distributed.rpc, torch.distributed.nn, torch.distributed.optim
assert len(os.listdir("/proc/self/task")) == before
""")


def test_what_is_left_out_says_so() -> None:
    run("""
import telegrad.compat
telegrad.compat.install()
import torch.distributed.rpc as rpc
try:
    rpc._invoke_rpc_torchscript
except AttributeError as error:
    assert "Coming from torch.distributed.rpc" in str(error)
else:
    raise AssertionError
assert not hasattr(rpc, "_invoke_rpc_torchscript")
""")


def test_private_names_that_programs_use_are_there() -> None:
    run("""
import telegrad.compat
telegrad.compat.install()
from torch._C._distributed_autograd import _current_context, _get_max_id, _is_valid_context, _retrieve_context
from torch._C._distributed_rpc import PyRRef, RpcAgent, TensorPipeAgent, WorkerInfo, _get_current_rpc_agent
from torch.distributed.autograd import _new_context, _release_context, _get_debug_info, _init
from torch.distributed.rpc import _get_debug_info, _rref_context_get_debug_info, _set_rpc_timeout, get_rpc_timeout
from torch.distributed.rpc.api import _all_gather, _barrier, _require_initialized, _thread_local_var, _wait_all
from torch.distributed.rpc.api import _get_current_rpc_agent, _ignore_rref_leak, _use_rpc_pickler, _wait_all_workers
from torch.distributed.rpc.backend_registry import BackendType, backend_registered, register_backend
from torch.distributed.rpc.constants import DEFAULT_RPC_TIMEOUT_SEC, UNSET_RPC_TIMEOUT
from torch.distributed.rpc.functions import async_execution
from torch.distributed.rpc.internal import PythonUDF, RPCExecMode, _internal_rpc_pickler, deserialize, serialize
from torch.distributed.rpc.rref_proxy import RRefProxy
assert backend_registered("TENSORPIPE") and str(BackendType.TENSORPIPE.name) == "TENSORPIPE"
import torch
data, tensors = serialize({"a": torch.ones(2), "b": 1})
assert len(tensors) == 1 and deserialize(data, tensors)["b"] == 1
""")


def test_ranks_and_backends_that_are_none_are_refused_and_torchs_backend_is_taken() -> None:
    run("""
import torch, torch.distributed.rpc as rpc
torchs = rpc.BackendType.TENSORPIPE
import telegrad.rpc
with telegrad.rpc.init_rpc("a", torchs, rank=0, world_size=1):
    pass
import telegrad.compat
telegrad.compat.install()
from torch.distributed.nn import RemoteModule
def refused(what, text, *args, **kwargs):
    try:
        what(*args, **kwargs)
    except (TypeError, ValueError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
refused(rpc.init_rpc, "rank must be an int, got '0'", "a", rank="0", world_size=1)
refused(rpc.init_rpc, "world_size must be an int, got 1.0", "a", rank=0, world_size=1.0)
refused(rpc.init_rpc, "Argument backend must be a member of BackendType", "a", 0, 1)
import tempfile
with tempfile.TemporaryDirectory() as folder:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/meeting")
    rpc.init_rpc("a", rpc.BackendType.TENSORPIPE, rank=0, world_size=1, rpc_backend_options=options)
    refused(rpc.rpc_sync, "args must be a tuple or a list, got 'abc'", "a", len, args="abc")
    refused(RemoteModule("a", torch.nn.Linear, args=(1, 2)).requires_grad_, "not supported for RemoteModule", False)
    model = torch.nn.Sequential(RemoteModule("a", torch.nn.Linear, args=(1, 2)))
    refused(lambda: list(model.parameters()), "Method ``named_modules`` not supported for RemoteModule")
    rpc.shutdown()
""")
