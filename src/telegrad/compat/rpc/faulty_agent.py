"""The backend `FAULTY_TENSORPIPE` of torch's tests: Telegrad, with faults on purpose in what a worker sends.

Importing this registers it. torch names messages in its own way; a failed send of torch's is, for a message of the
protocol, a connection that breaks, and for a call, one that cannot be sent.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from telegrad.compat.rpc import api, backend_registry
from telegrad.compat.rpc.agent import TensorPipeAgent
from telegrad.compat.rpc.options import TensorPipeRpcBackendOptions
from telegrad.rpc.job.lifecycle import start_worker
from telegrad.transport.faulty import Fault, FaultPlan, Faults

__all__ = ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions"]

MESSAGES = {
    "PYTHON_CALL": "PythonCall",
    "SCRIPT_CALL": "PythonCall",
    "PYTHON_REMOTE_CALL": "PythonRemoteCall",
    "SCRIPT_REMOTE_CALL": "PythonRemoteCall",
    "PYTHON_RREF_FETCH_CALL": "RRefFetch",
    "SCRIPT_RREF_FETCH_CALL": "RRefFetch",
    "RREF_USER_DELETE": "RRefUserDelete",
    "RREF_FORK_REQUEST": "RRefForkRequest",
    "RREF_CHILD_ACCEPT": "RRefChildAccept",
    "RREF_BACKWARD_REQ": "RRefBackward",
    "FORWARD_AUTOGRAD_REQ": "RpcWithAutograd",
    "BACKWARD_AUTOGRAD_REQ": "PropagateGradients",
    "CLEANUP_AUTOGRAD_CONTEXT_REQ": "CleanupAutogradContext",
}
_CALLS = ("PythonCall", "PythonRemoteCall", "RRefFetch", "RpcWithAutograd")


class FaultyTensorPipeAgent(TensorPipeAgent):
    """An agent with faults."""


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Which messages fail, how often, and which are delayed by how many seconds."""

    def __init__(
        self,
        *,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends

    def faults(self) -> Faults:
        """The same for Telegrad's transport."""
        plans = {
            MESSAGES[name]: FaultPlan(Fault.DELAY, seconds=delay) for name, delay in self.messages_to_delay.items()
        }
        for name in map(MESSAGES.__getitem__, self.messages_to_fail):
            plans[name] = (
                FaultPlan(Fault.REFUSE) if name in _CALLS else FaultPlan(Fault.BREAK, times=self.num_fail_sends)
            )
        return Faults(plans)


def _construct_options(rpc_timeout: float, init_method: str, **options: Any) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **options)


def _start_with_faults(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> FaultyTensorPipeAgent:
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. {rpc_backend_options}")
    started = start_worker(name, rank, world_size or None, rpc_backend_options, store)
    started.connector.fit_out = rpc_backend_options.faults().on
    agent = FaultyTensorPipeAgent(started)
    api._init_rpc_states(agent)
    return agent


backend_registry.register_backend("FAULTY_TENSORPIPE", _construct_options, _start_with_faults)
