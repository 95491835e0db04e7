"""What a worker of a local cluster runs: it joins the job it is told of and serves until all leave.

It is told by its owner through a socket, which it keeps: the other end closes when the owner ends, in any way at all,
and then so does this process.

It ends by `os._exit`, after all that the interpreter does for the user at its end: threads that are not daemons, exit
handlers, the last output. What comes after that takes the GIL away from daemon threads for good, and one that is inside
torch then, a thread that some call has started, aborts the process: C++ code cannot be unwound there.
"""

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import socket
import struct
import sys
import threading
from typing import NamedTuple

from telegrad import rpc
from telegrad.rpc.torch_modes import seeds

READY = b"!"
_LENGTH = struct.Struct("<Q")
# Run by `python -c`: the owner may find Telegrad where a fresh interpreter would not look.
BOOT = (
    "import json, os, sys; sys.path[:] = json.loads(os.environ.pop('TELEGRAD_BOOT_PATH')); "
    "from telegrad.launch.worker import main; main(int(sys.argv[2]))"
)
# Layers that put themselves on an agent when they are imported: a worker has to have them before it is called.
_LAYERS = ("telegrad.autograd",)


class Orders(NamedTuple):
    """What a worker has to know to join."""

    name: str
    rank: int
    world_size: int
    options: rpc.RpcBackendOptions


def send_orders(line: socket.socket, orders: Orders) -> None:
    """The owner's part: tell a worker what it is."""
    data = pickle.dumps(orders)
    line.sendall(_LENGTH.pack(len(data)) + data)


def _receive_orders(line: socket.socket) -> Orders:
    with line.makefile("rb") as reader:
        (length,) = _LENGTH.unpack(reader.read(_LENGTH.size))
        orders = pickle.loads(reader.read(length))
    assert isinstance(orders, Orders)
    return orders


def main(fd: int) -> None:
    """The whole life of a worker."""
    status = 0
    try:
        _serve(fd)
    except BaseException as error:
        status = _status_of(error)
    _end(status)


def _serve(fd: int) -> None:
    line = socket.socket(fileno=fd)
    orders = _receive_orders(line)
    threading.Thread(target=_end_with_owner, args=(line,), name="end with owner", daemon=True).start()
    for layer in _LAYERS:
        importlib.import_module(layer)
    # 170,000 objects of torch, which last as long as the process: the collector need not walk them each time.
    gc.freeze()
    if seeds.VARIABLE in os.environ:
        seeds.seed_all(int(os.environ.pop(seeds.VARIABLE)), orders.rank)
    line.sendall(READY)
    rpc.init_rpc(orders.name, rank=orders.rank, world_size=orders.world_size, rpc_backend_options=orders.options)
    rpc.shutdown()


def _status_of(error: BaseException) -> int:
    """What the interpreter would exit with; it would have shown the error, too."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    sys.excepthook(type(error), error, error.__traceback__)
    return 1


def _end(status: int) -> None:
    # As the interpreter does, in its order; it has no public names for these two.
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads that are not daemons
    atexit._run_exitfuncs()
    _flush()
    os._exit(status)


def _end_with_owner(line: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may close without having read what was sent to it
        line.recv(1)  # it sends nothing more: this returns when it closes its end
    _flush()
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()
