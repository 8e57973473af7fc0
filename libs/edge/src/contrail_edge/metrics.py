"""Metrics of the edge: requests by route and status, their times, refused requests."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from contrail_common.errors import ErrorSpec
from contrail_common.timings import BUCKETS_S, Timings
from contrail_edge.http.requests import EdgeState

UNMATCHED: Final = "unmatched"
"""Route label of requests without a route. Their paths would be unbounded labels."""


class RouteTimings(Timings):
    """The answers of one method on one route: their durations, and their numbers by status."""

    __slots__ = ("by_status",)

    def __init__(self) -> None:
        super().__init__()
        self.by_status: dict[int, int] = {}

    def answered(self, status: int, seconds: float) -> None:
        """Count one answered request."""
        self.by_status[status] = self.by_status.get(status, 0) + 1
        # As `add` does, without another call for each request.
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


class EdgeMetrics(Collector):
    """Metrics of one edge process, in a registry of their own.

    Counters of every request are plain integers: those of the library take a lock each time.
    """

    def __init__(self, state: EdgeState) -> None:
        self._registry = CollectorRegistry()
        self._unread = state.unread
        # By method and route template.
        self._routes: dict[tuple[str, str], RouteTimings] = {}
        self._registry.register(self)
        self._refused = Counter(
            "contrail_http_refused",
            "Requests refused before they reached a route, by error name.",
            ["name"],
            registry=self._registry,
        )
        in_flight = Gauge(
            "contrail_http_body_bytes_in_flight",
            "Bytes of request bodies held in memory.",
            registry=self._registry,
        )
        in_flight.set_function(lambda: state.bodies.held)
        unread = Gauge(
            "contrail_http_unread_bytes",
            "Bytes of answers written but not yet read by clients, at the last check.",
            registry=self._registry,
        )
        unread.set_function(lambda: state.unread.held)
        waiting = Gauge(
            "contrail_http_waiting", "Long polls waiting for messages.", registry=self._registry
        )
        waiting.set_function(lambda: state.waiting)

    def add(self, collector: Collector) -> None:
        """Add the metrics of ``collector``."""
        self._registry.register(collector)

    def route(self, method: str, route: str) -> RouteTimings:
        """Return what counts the answers; ``method`` and ``route`` come from the route table."""
        timings = self._routes.get((method, route))
        if timings is None:
            timings = self._routes[method, route] = RouteTimings()
        return timings

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are plain integers; called by the registry."""
        yield CounterMetricFamily(
            "contrail_http_unread_cut",
            "Connections closed because clients left too many bytes of answers unread over all "
            "connections.",
            self._unread.cut,
        )
        requests = CounterMetricFamily(
            "contrail_http_requests",
            "Requests answered, by method, route template and status.",
            labels=["method", "route", "status"],
        )
        routes = [(labels, one) for labels, one in self._routes.items() if one.by_status]
        for labels, timings in routes:
            for status, count in timings.by_status.items():
                requests.add_metric([*labels, str(status)], count)
        yield requests
        seconds = HistogramMetricFamily(
            "contrail_http_request_seconds",
            "Time from the head of a request to the end of its answer, by method and route "
            "template.",
            labels=["method", "route"],
        )
        for labels, timings in routes:
            seconds.add_metric(list(labels), timings.buckets(), timings.sum_s)
        yield seconds

    def refused(self, spec: ErrorSpec) -> None:
        """Count one request that the HTTP protocol itself refused."""
        self._refused.labels(spec.name).inc()

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self._registry)
