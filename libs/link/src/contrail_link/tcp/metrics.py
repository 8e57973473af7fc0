"""Metrics of both ends of the link over TCP."""

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from contrail_common.timings import Timings
from contrail_link.tcp.channel import Channel


class _Families:
    """A collector of finished metrics."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition(families: Iterable[Metric]) -> str:
    """Return the Prometheus text of ``families``."""
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry).decode()


class Served(Protocol):
    """The part of a server's connection that its metrics show."""

    proven: bool
    busy: int
    busy_bytes: int
    waits: int


def server_metrics(
    connections: Collection[Served],
    refused: int,
    timings: Mapping[str, Timings],
    failed: Mapping[str, int],
) -> Iterable[Metric]:
    """Return the metrics of storage: clients, requests in progress, and answered requests."""
    proven = [one for one in connections if one.proven]
    for name, text, value in (
        ("clients", "Open connections of the service link.", len(proven)),
        (
            "busy",
            "Requests in progress, without those that may wait.",
            sum(one.busy for one in proven),
        ),
        (
            "busy_bytes",
            "Bytes of requests in progress, without those that may wait.",
            sum(one.busy_bytes for one in proven),
        ),
        (
            "waiting",
            "Requests in progress that may wait, such as pulls, and streamed answers.",
            sum(one.waits for one in proven),
        ),
    ):
        yield GaugeMetricFamily(f"contrail_link_{name}", text, value)
    yield CounterMetricFamily(
        "contrail_link_refused",
        "Connections refused because they did not prove the cluster secret.",
        refused,
    )
    yield _seconds(
        "contrail_link_request_seconds",
        "Time from receiving a request to its answer, including the wait of pulls and waiting "
        "reads.",
        timings,
    )
    yield _counts("contrail_link_requests_refused", "Requests refused, by method.", failed)


def client_metrics(channels: Mapping[str, Channel], again: int | None = None) -> Iterable[Metric]:
    """Return the metrics of an edge: its connections to storage, and the calls over them.

    ``again`` is the number of requests that were sent again, if there are several nodes.
    """
    up = GaugeMetricFamily(
        "contrail_link_up", "Whether the link to storage is up (1) or down (0).", labels=["channel"]
    )
    pending = GaugeMetricFamily(
        "contrail_link_pending",
        "Requests to storage that are not answered yet.",
        labels=["channel"],
    )
    lost = CounterMetricFamily(
        "contrail_link_lost", "Number of times the link to storage was lost.", labels=["channel"]
    )
    timings: dict[str, Timings] = {}
    failed: dict[str, int] = {}
    for name, channel in channels.items():
        up.add_metric([name], channel.up)
        pending.add_metric([name], channel.pending)
        lost.add_metric([name], channel.losses)
        for method, times in channel.timings.items():
            timings.setdefault(method, Timings()).add_all(times)
        for method, count in channel.failed.items():
            failed[method] = failed.get(method, 0) + count
    yield from (up, pending, lost)
    yield _seconds(
        "contrail_link_call_seconds",
        "Time from sending a request to its answer, or to the end of a streamed answer.",
        timings,
    )
    yield _counts("contrail_link_calls_failed", "Requests refused or lost, by method.", failed)
    if again is not None:
        yield CounterMetricFamily(
            "contrail_link_again",
            "Requests sent again, to the same node or another, because the first did not answer.",
            again,
        )


def _seconds(name: str, text: str, timings: Mapping[str, Timings]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=["method"])
    for method, times in timings.items():
        family.add_metric([method], times.buckets(), times.sum_s)
    return family


def _counts(name: str, text: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["method"])
    for method, count in counts.items():
        family.add_metric([method], count)
    return family
