"""A program written for torch.distributed.rpc, one of whose three workers ends in the middle."""

import multiprocessing
import os
import sys
from multiprocessing.synchronize import Barrier

import torch.distributed.rpc as rpc  # noqa: PLR0402 - the way most programs write it
from torch.distributed.rpc.api import _all_gather


def work(rank: int, dies: int, meeting: str, together: Barrier) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    assert _all_gather(rank) == {"worker0": 0, "worker1": 1, "worker2": 2}
    together.wait()
    if rank == dies:
        os._exit(0)
    try:
        _all_gather(rank)
    except RuntimeError as error:
        if f"worker{dies}" not in str(error):
            raise
        rpc.shutdown()
        print(f"worker{rank} heard that worker{dies} is gone, and ended", flush=True)


def main() -> None:
    context = multiprocessing.get_context("fork")
    shared = (int(sys.argv[1]), sys.argv[2], context.Barrier(3))
    processes = [context.Process(target=work, args=(rank, *shared)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
