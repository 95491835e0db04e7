"""What a worker of a local cluster runs: it joins the job it is told of and serves until all leave.

It is told by its owner through a socket, which it keeps: the other end closes when the owner ends, in any way at all,
and then so does this process.
"""

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
    line = socket.socket(fileno=fd)
    orders = _receive_orders(line)
    threading.Thread(target=_end_with_owner, args=(line,), name="end with owner", daemon=True).start()
    for layer in _LAYERS:
        importlib.import_module(layer)
    if seeds.VARIABLE in os.environ:
        seeds.seed_all(int(os.environ.pop(seeds.VARIABLE)), orders.rank)
    line.sendall(READY)
    rpc.init_rpc(orders.name, rank=orders.rank, world_size=orders.world_size, rpc_backend_options=orders.options)
    rpc.shutdown()


def _end_with_owner(line: socket.socket) -> None:
    line.recv(1)  # the owner sends nothing more: this returns when it closes its end
    sys.stdout.flush()
    os._exit(0)
