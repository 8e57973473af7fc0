"""What the edge counts: requests by route and status, their time, refused connections."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from contrail_common.edge.requests import EdgeState
from contrail_common.errors import ErrorSpec

_BUCKETS_S: Final = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0,
)  # fmt: skip
_BUCKET_NAMES: Final = (*map(str, _BUCKETS_S), "+Inf")
UNMATCHED: Final = "unmatched"
"""The route label of requests that no route took; the path itself would be unbounded."""


@dataclass(slots=True)
class _Times:
    """How many requests took how long, by bucket, and how long all of them took."""

    counts: list[int] = field(default_factory=lambda: [0] * len(_BUCKET_NAMES))
    sum_s: float = 0.0


class EdgeMetrics(Collector):
    """Counters of one edge process, with a registry of their own."""

    def __init__(self, state: EdgeState) -> None:
        self._registry = CollectorRegistry()
        self._answered: dict[tuple[str, str, int], int] = {}
        self._times: dict[tuple[str, str], _Times] = {}
        self._registry.register(self)
        self._refused = Counter(
            "contrail_http_refused",
            "Requests refused before they reached a route, by error name.",
            ["name"],
            registry=self._registry,
        )
        in_flight = Gauge(
            "contrail_http_body_bytes_in_flight",
            "Bytes of request bodies that are held.",
            registry=self._registry,
        )
        in_flight.set_function(lambda: state.bodies_bytes)
        waiting = Gauge(
            "contrail_http_waiting", "Long polls that wait for messages.", registry=self._registry
        )
        waiting.set_function(lambda: state.waiting)

    def add(self, collector: Collector) -> None:
        """Show the metrics of ``collector`` too."""
        self._registry.register(collector)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answered request; ``method`` and ``route`` come from the route table."""
        counted = (method, route, status)
        self._answered[counted] = self._answered.get(counted, 0) + 1
        times = self._times.get((method, route))
        if times is None:
            times = self._times[method, route] = _Times()
        times.counts[bisect_left(_BUCKETS_S, seconds)] += 1
        times.sum_s += seconds

    def collect(self) -> Iterator[Metric]:
        """What :meth:`answered` counted, as the registry asks for it.

        The library's own counters take a lock for each number: ten times the cost, three times a
        request. Here one thread counts.
        """
        requests = CounterMetricFamily(
            "contrail_http_requests",
            "Requests answered, by method, route template and status.",
            labels=["method", "route", "status"],
        )
        for (method, route, status), count in self._answered.items():
            requests.add_metric([method, route, str(status)], count)
        yield requests
        seconds = HistogramMetricFamily(
            "contrail_http_request_seconds",
            "Time from a request's head to the end of its answer, by method and route template.",
            labels=["method", "route"],
        )
        for labels, times in self._times.items():
            sums = accumulate(times.counts)
            buckets = [(bound, next(sums)) for bound in _BUCKET_NAMES]
            seconds.add_metric(list(labels), buckets, times.sum_s)
        yield seconds

    def refused(self, spec: ErrorSpec) -> None:
        """Count one request that the HTTP protocol itself refused."""
        self._refused.labels(spec.name).inc()

    def text(self) -> bytes:
        """The Prometheus exposition text."""
        return generate_latest(self._registry)
