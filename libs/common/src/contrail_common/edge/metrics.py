"""What the edge counts: requests by route and status, their time, refused connections."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from contrail_common.edge.requests import EdgeState
from contrail_common.errors import ErrorSpec

_BUCKETS_S: Final = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0,
)  # fmt: skip
UNMATCHED: Final = "unmatched"
"""The route label of requests that no route took; the path itself would be unbounded."""


class EdgeMetrics:
    """Counters of one edge process, with a registry of their own."""

    def __init__(self, state: EdgeState) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "contrail_http_requests",
            "Requests answered, by method, route template and status.",
            ["method", "route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "contrail_http_request_seconds",
            "Time from a request's head to the end of its answer, by method and route template.",
            ["method", "route"],
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
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
        self._counters: dict[tuple[str, str, int], Counter] = {}
        self._timers: dict[tuple[str, str], Histogram] = {}

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answered request; ``method`` and ``route`` come from the route table."""
        counter = self._counters.get((method, route, status))
        if counter is None:
            counter = self._requests.labels(method, route, str(status))
            self._counters[method, route, status] = counter
            self._timers[method, route] = self._seconds.labels(method, route)
        counter.inc()
        self._timers[method, route].observe(seconds)

    def refused(self, spec: ErrorSpec) -> None:
        """Count one request that the HTTP protocol itself refused."""
        self._refused.labels(spec.name).inc()

    def text(self) -> bytes:
        """The Prometheus exposition text."""
        return generate_latest(self._registry)
