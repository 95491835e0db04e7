"""The agent as torch's programs see it: a thin view of Telegrad's, with torch's method names and debug keys."""

import time
from typing import Any

import torch

from telegrad.rpc.agent import Agent
from telegrad.rpc.current import current_agent, require_agent, set_current_agent
from telegrad.rpc.job.lifecycle import shutdown as end_worker
from telegrad.rpc.job.lifecycle import wait_for_all
from telegrad.rpc.options import RpcBackendOptions, as_timeout
from telegrad.rpc.workers import WorkerInfo

_GIL_SAMPLES = 8


class RpcAgent:
    """What any agent offers."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._agent.info.name!r}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RpcAgent) and other._agent is self._agent

    def __hash__(self) -> int:
        return hash(self._agent)

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """A worker by name or id, by default this one."""
        return self._agent.info if worker is None else self._agent.find(worker).info

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All workers, by id."""
        self._agent.peers.look_for_news()
        return [member.info for member in self._agent.directory.members()]

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until all workers are here and nothing is under way."""
        # Letting go of references is a step of its own in torch's shutdown, and one that programs replace.
        wait_for_all(self._agent, as_timeout(timeout), leaving=shutdown, prepare=False)

    def sync(self) -> None:
        """Wait until all workers are here and nothing is under way."""
        wait_for_all(self._agent, 0.0, leaving=False)

    def shutdown(self) -> None:
        """End this worker, whatever the others do."""
        if current_agent() is self._agent:
            end_worker(graceful=False)

    def get_debug_info(self) -> dict[str, str]:
        """What the agent is doing, in numbers."""
        agent = self._agent
        info: dict[str, Any] = {
            "agent.thread_pool_size": agent.options.num_worker_threads,
            "agent.num_idle_threads": max(
                0, agent.options.num_worker_threads - sum(s.running for s in agent.peers.sessions())
            ),
            "agent.client_active_calls": sum(len(link.pending) for link in agent.peers.links()),
            "agent.server_active_calls": sum(session.running for session in agent.peers.sessions()),
            "agent.calls_made": agent.runtime.calls_made,
            "agent.calls_served": agent.runtime.calls_served,
        }
        if _profiling.gil:
            info["agent.gil_average_wait_time_us"] = _gil_wait() * 1e6
        return {key: str(value) for key, value in info.items()}

    def get_metrics(self) -> dict[str, str]:
        """The same as `get_debug_info`."""
        return self.get_debug_info()

    def _get_device_map(self, worker_info: WorkerInfo) -> dict[torch.device, torch.device]:
        return dict(self._agent.options.device_maps.get(worker_info.name, {}))


class TensorPipeAgent(RpcAgent):
    """The agent that `BackendType.TENSORPIPE` stands for: Telegrad's."""

    @property
    def is_static_group(self) -> bool:
        """Whether the number of workers was given at the start."""
        return self._agent.world_size is not None

    @property
    def store(self) -> Any:
        """The store where the workers met."""
        return None if self._agent.member_log is None else self._agent.member_log.store

    def _get_backend_options(self) -> RpcBackendOptions:
        return self._agent.options


class _Profiling:
    gil = False


_profiling = _Profiling()


def enable_gil_profiling(flag: bool) -> None:
    """Whether `get_debug_info` also measures how long a thread of this process waits for the GIL."""
    _profiling.gil = bool(flag)


def _gil_wait() -> float:
    """Seconds to give up the GIL and have it again, on average over a few tries."""
    start = time.perf_counter()
    for _ in range(_GIL_SAMPLES):
        time.sleep(0)
    return (time.perf_counter() - start) / _GIL_SAMPLES


def _is_current_rpc_agent_set() -> bool:
    """Whether this process is a worker."""
    return current_agent() is not None


def _get_current_rpc_agent() -> TensorPipeAgent:
    """The agent of this process."""
    return TensorPipeAgent(require_agent())


def _reset_current_rpc_agent() -> None:
    """Make this process no worker, without ending its agent."""
    set_current_agent(None)


def _set_and_start_rpc_agent(agent: RpcAgent) -> None:
    """Make an agent the one of this process."""
    set_current_agent(agent._agent)
