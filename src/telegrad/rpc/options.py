"""Options of an agent, with torch's names and defaults, and what Telegrad adds."""

import logging
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from telegrad.rpc.trust.exports import Limits
from telegrad.transport.addresses import ALL_TRANSPORTS, TRANSPORTS
from telegrad.transport.tls import Tls
from telegrad.wire.parts import MOST_STREAMS

DEFAULT_RPC_TIMEOUT_SEC = 60.0
DEFAULT_INIT_METHOD = "env://"
DEFAULT_NUM_WORKER_THREADS = 16
DEFAULT_SHUTDOWN_TIMEOUT = 0.0
UNSET_RPC_TIMEOUT = -1.0

SECRET_VARIABLE = "TELEGRAD_SECRET"
HOST_VARIABLE = "TELEGRAD_HOST"
LEAST_MESSAGE_BYTES = 64 * 1024  # what every worker takes in, so that smaller messages need not be measured

MOST_OF_WORKERS, MOST_OF_STRANGERS = 64 * 2**30, 2**30  # bytes of a message, unless an option says otherwise

DeviceLike = int | str | torch.device


class RpcBackendOptions:
    """Options of an agent.

    The first five are as in torch.

    Args:
        rpc_timeout: seconds a call may take unless it says otherwise; 0 for no limit.
        init_method: where the workers meet: `env://`, `tcp://host:port` or `file:///path`.
        num_worker_threads: requests that run at the same time; those that wait for others do not count.
        device_maps: by the name of another worker, which device a tensor of this worker's device goes to there.
        devices: the CUDA devices that this worker uses; maps may name no others.
        transports: which ways may be used, of "unix" and "tcp"; the best that both sides have is chosen. A third,
            "memory", is for tests: it connects agents of one process.
        shared_memory: whether tensors may go through shared memory between workers on one host.
        secret: what proves that a worker belongs to the job; or in TELEGRAD_SECRET. On one host it may be left out: the
            processes of a user share one that nobody else can read. Between hosts it is required.
        secret_file: a file with the secret; or in TELEGRAD_SECRET_FILE.
        insecure: go without a secret between hosts: whoever can reach the workers can run code as you.
        tls: certificates for TCP (`Tls(cert, key, ca)`), True or False; by default TCP between hosts is encrypted with
            a key made for the job, if the extra `tls` is installed.
        exports_only: for peers whose code is not trusted: run what `rpc.export` has exported and nothing else, accept
            and send no pickle, share no memory.
        limits: with `exports_only`, what each peer may ask.
        audit: a file or a logger for a record of all that leaves and comes (shapes and sizes, no contents).
        host: the address to listen on; by default TELEGRAD_HOST, or where a secret is given the one on the network over
            which the rendezvous store was reached, or loopback.
        rendezvous_timeout: seconds to wait for the other workers in `init_rpc`.
        connect_timeout: seconds that connecting to one worker may take.
        heartbeat: seconds of silence after which a worker that owes an answer is asked whether it lives; if it stays
            silent three times as long, it counts as dead.
        tcp_connections: how many TCP connections to another worker carry a large tensor together, each in a thread of
            its own; the smaller number of both ends is used. None for a number that suits the cores that this worker
            has; 1 to use one.
        cuda_memory_share: the share of each GPU's memory that blocks for messages between workers on one host may take;
            beyond it messages go through host memory. Idle blocks are given back. 0 for none.
        cuda_direct: let workers on one GPU read each other's arguments where they lie, and write results to where they
            stay, instead of copying through blocks: a small call then takes two thirds of the time. False for blocks
            alone: a process then opens no memory of another's allocator, which torch may free meanwhile.
        max_message_bytes: a larger message is refused before memory is taken for it; others are told, and do not send
            it. Tensors in shared memory do not count: they are in the sender's. By default 64 GiB, and 1 GiB with
            `exports_only`, where tensors count as if they were written out.

    Examples:
        >>> rpc.RpcBackendOptions(rpc_timeout=10, init_method="tcp://127.0.0.1:29500").rpc_timeout
        10.0
    """

    # Whether a CUDA tensor goes to the same GPU on another worker where no device map says otherwise. torch's options,
    # under its name for them, refuse that.
    same_gpu_without_map = True

    def __init__(
        self,
        *,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        device_maps: Mapping[str, Mapping[DeviceLike, DeviceLike]] | None = None,
        devices: Sequence[DeviceLike] | None = None,
        transports: Sequence[str] = TRANSPORTS,
        shared_memory: bool = True,
        secret: str | bytes | None = None,
        secret_file: str | None = None,
        insecure: bool = False,
        tls: Tls | bool | None = None,
        exports_only: bool = False,
        limits: Limits | None = None,
        audit: str | os.PathLike[str] | logging.Logger | None = None,
        host: str | None = None,
        rendezvous_timeout: float = 120.0,
        connect_timeout: float = 10.0,
        heartbeat: float = 1.0,
        max_message_bytes: int | None = None,
        cuda_memory_share: float = 0.1,
        cuda_direct: bool = True,
        tcp_connections: int | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        if not transports or not set(transports) <= set(ALL_TRANSPORTS):
            raise ValueError(f"transports must be some of {ALL_TRANSPORTS}, got {tuple(transports)}")
        if num_worker_threads < 1:
            raise ValueError(f"num_worker_threads must be at least 1, got {num_worker_threads}")
        for name, value in (("rpc_timeout", rpc_timeout), ("rendezvous_timeout", rendezvous_timeout)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(
                    f"incompatible constructor arguments: {name} must be a number of seconds, got {value!r}"
                )
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if tls is not None and not isinstance(tls, Tls | bool):
            raise TypeError(f"tls must be a Tls(cert, key, ca), True, False or None, got {tls!r}")
        if max_message_bytes is None:
            max_message_bytes = MOST_OF_STRANGERS if exports_only else MOST_OF_WORKERS
        if max_message_bytes < LEAST_MESSAGE_BYTES:
            raise ValueError(f"max_message_bytes must be at least {LEAST_MESSAGE_BYTES}, got {max_message_bytes}")
        if not 0 <= cuda_memory_share <= 1:
            raise ValueError(f"cuda_memory_share must be within 0..1, got {cuda_memory_share}")
        if tcp_connections is not None and not 1 <= tcp_connections <= MOST_STREAMS:
            raise ValueError(f"tcp_connections must be within 1..{MOST_STREAMS} or None, got {tcp_connections}")
        self.rpc_timeout = float(rpc_timeout)
        self.init_method = init_method
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        for to, device_map in (device_maps or {}).items():
            self.set_device_map(to, device_map)
        self.devices: list[torch.device] = [_cuda_device(d) for d in devices or ()]
        self.transports = tuple(transports)
        self.shared_memory = shared_memory and not exports_only  # a sender could change what was sent
        self.secret = secret if secret is not None else os.environ.get(SECRET_VARIABLE) if not secret_file else None
        self.secret_file = secret_file
        self.insecure = insecure
        self.tls = tls
        self.exports_only = exports_only
        self.limits = Limits() if limits is None else limits
        self.audit = audit
        self.host = host if host is not None else os.environ.get(HOST_VARIABLE) or None
        self.rendezvous_timeout = float(rendezvous_timeout)
        self.connect_timeout = float(connect_timeout)
        self.heartbeat = float(heartbeat)
        self.max_message_bytes = max_message_bytes
        self.cuda_memory_share = float(cuda_memory_share)
        self.cuda_direct = cuda_direct
        self.tcp_connections = tcp_connections
        # Names of torch's transports and channels: accepted so that programs run, without effect here.
        self._transports = _transports
        self._channels = _channels

    def __repr__(self) -> str:
        shown = {k: v for k, v in vars(self).items() if k != "secret" and not k.startswith("_")}
        return f"RpcBackendOptions({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    @property
    def secret_bytes(self) -> bytes | None:
        """The secret as bytes; None if there is none."""
        return (self.secret.encode() if isinstance(self.secret, str) else self.secret) or None

    def set_device_map(self, to: str, device_map: Mapping[DeviceLike, DeviceLike]) -> None:
        """Tensors on a key of `device_map` arrive at worker `to` on its value; may be called again to add more."""
        merged = dict(self.device_maps.get(to, {}))
        for key, value in device_map.items():
            source, target = _as_device(key), _as_device(value)
            if merged.get(source, target) != target:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target} and "
                    f"{merged[source]}"
                )
            clash = next((s for s, t in merged.items() if t == target and s != source), None)
            if clash is not None:
                raise ValueError(
                    f"`device_map` only supports 1-to-1 mapping, trying to map {source} and {clash} to {target}"
                )
            merged[source] = target
        self.device_maps[to] = merged

    def set_devices(self, devices: Sequence[DeviceLike]) -> None:
        """The local devices this agent uses."""
        self.devices = [_cuda_device(d) for d in devices]


def _as_device(device: DeviceLike) -> torch.device:
    """A number is that of a CUDA device, also where there is none: that is found out when all devices are known."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _cuda_device(device: DeviceLike) -> torch.device:
    result = _as_device(device)
    if result.type != "cuda":
        raise ValueError(f"`set_devices` expect a list of CUDA devices, but got device type {result.type}.")
    return result


def as_int(name: str, value: Any) -> int:
    """A user's whole number, also one of NumPy's; anything else is a TypeError that shows what came."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None


def as_timeout(seconds: Any) -> float:
    """A user's timeout as a number; anything else is a TypeError that shows what came."""
    if seconds is UNSET_RPC_TIMEOUT:  # as in most calls
        return float(UNSET_RPC_TIMEOUT)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"a timeout is a number of seconds (0 for no limit), got {seconds!r}")
    if seconds < 0 and seconds != UNSET_RPC_TIMEOUT:
        raise ValueError(f"a timeout must not be negative, got {seconds}")
    return float(seconds)
