"""Metrics of the sockets."""

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class SessionCounts(Collector):
    """Counters of all sessions of a process; one thread counts, so they need no locks."""

    def __init__(self) -> None:
        self.subscriptions = 0
        self.published = 0
        self.pushed = 0
        self.acks = 0

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "contrail_subscriptions", "Subscriptions on open sockets.", self.subscriptions
        )
        for name, text, count in (
            ("published", "Messages published over sockets and stored.", self.published),
            ("pushed", "Messages pushed to subscriptions.", self.pushed),
            ("acks", "Acknowledgements received over sockets.", self.acks),
        ):
            yield CounterMetricFamily(f"contrail_socket_messages_{name}", text, count)
