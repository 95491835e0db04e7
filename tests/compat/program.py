"""A program written for torch.distributed.rpc, that knows nothing of Telegrad; each way to start its workers."""

import multiprocessing
import os
import subprocess
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc  # noqa: PLR0402 - the way most programs write it
import torch.multiprocessing
from torch.distributed.rpc import rpc_sync


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def work(rank: int, meeting: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting, _transports=["uv"], _channels=["basic"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        x = torch.ones(3, requires_grad=True)
        with dist_autograd.context() as context_id:
            y = rpc_sync("worker1", double, args=(x,))
            dist_autograd.backward(context_id, [y.sum()])
            gradient = dist_autograd.get_gradients(context_id)[x]
        print("gradient", gradient.tolist(), "by", rpc.init_rpc.__module__, flush=True)
    rpc.shutdown()


def main() -> None:
    how, meeting = sys.argv[1:3]
    if how == "one":
        work(int(sys.argv[3]), meeting)
    elif how == "torch":
        torch.multiprocessing.spawn(work, args=(meeting,), nprocs=2)
    elif how == "subprocess":
        command = [sys.executable, os.path.abspath(__file__), "one", meeting]
        started = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
        sys.exit(max(process.wait() for process in started))
    else:
        context = multiprocessing.get_context(how)
        processes = [context.Process(target=work, args=(rank, meeting)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        sys.exit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
