"""The counters of all workers in Prometheus's text format, under OpenTelemetry's names for RPC.

`rpc.client.call.duration` of the semantic conventions becomes `rpc_client_call_duration_seconds`, with the attributes
`rpc_system_name`, `client` and `server`; what they have no name for begins with `telegrad_`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from telegrad.observe.metrics import upper_end
from telegrad.observe.snapshot import Snapshot

_BOUNDS = (
    10e-6,
    50e-6,
    100e-6,
    250e-6,
    500e-6,
    1e-3,
    2.5e-3,
    5e-3,
    10e-3,
    25e-3,
    50e-3,
    0.1,
    0.25,
    0.5,
    1.0,
    5.0,
    10.0,
)


class _Counters(Collector):
    def __init__(self, snapshots: Iterable[Snapshot]) -> None:
        self._snapshots = list(snapshots)

    def collect(self) -> Iterator[Any]:
        """All metrics."""
        names = {snap.worker_id: snap.name for snap in self._snapshots}
        labels = ["rpc_system_name", "client", "server"]
        duration = HistogramMetricFamily(
            "rpc_client_call_duration_seconds", "How long calls took, from the caller's side", labels=labels
        )
        failed = CounterMetricFamily("rpc_client_call_failures", "Calls that raised or timed out", labels=labels)
        sent = CounterMetricFamily("telegrad_sent_bytes", "Bytes of requests and replies", labels=["client", "server"])
        in_flight = GaugeMetricFamily("rpc_client_active_calls", "Calls without a reply", labels=labels)
        for snap in self._snapshots:
            for to, link in snap.links.items():
                where = ["telegrad", snap.name, names.get(to, str(to))]
                duration.add_metric(where, _buckets(link.latency), link.seconds)
                failed.add_metric(where, link.failed)
                sent.add_metric(where[1:], link.bytes_out)
                in_flight.add_metric(where, snap.in_flight.get(to, 0))
        yield from (duration, failed, sent, in_flight)
        yield from self._workers()

    def _workers(self) -> Iterator[Any]:
        kinds: dict[str, tuple[str, Callable[[Snapshot], int]]] = {
            "telegrad_serving_requests": ("Requests being served", lambda s: s.serving),
            "telegrad_threads": ("Threads of the worker", lambda s: s.threads),
            "telegrad_resident_memory_bytes": ("Memory of the process", lambda s: s.memory),
            "telegrad_owned_values": ("Values that references name", lambda s: s.owned),
            "telegrad_owned_bytes": ("Bytes of tensors in them", lambda s: s.owned_bytes),
            "telegrad_open_contexts": ("Autograd contexts that are open", lambda s: len(s.contexts)),
            "telegrad_running_passes": ("Backward passes that run", lambda s: len(s.passes)),
        }
        for name, (text, value) in kinds.items():
            family = GaugeMetricFamily(name, text, labels=["worker"])
            for snap in self._snapshots:
                family.add_metric([snap.name], value(snap))
            yield family


def _buckets(latency: dict[int, int]) -> list[tuple[str, float]]:
    counts = [
        (f"{bound:g}", float(sum(n for bucket, n in latency.items() if upper_end(bucket) <= bound * 1.1)))
        for bound in _BOUNDS
    ]
    return [*counts, ("+Inf", float(sum(latency.values())))]


def as_text(snapshots: Iterable[Snapshot]) -> bytes:
    """What is served at /metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Counters(snapshots))
    return generate_latest(registry)
