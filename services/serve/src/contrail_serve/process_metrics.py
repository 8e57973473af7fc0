"""Metrics of a server process: version, memory, CPU, and lateness of the event loop."""

import asyncio
from collections.abc import Iterator
from typing import Final

from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from contrail_common.__about__ import __version__
from contrail_common.timings import Timings

_LOOK_S: Final = 0.5


class ProcessMetrics(Collector):
    """Measures the event loop while :meth:`watch` runs, and shows the system's figures."""

    def __init__(self, service: str, node: str) -> None:
        self._labels = {"version": __version__, "service": service, "node": node}
        self._system = ProcessCollector(registry=None)
        self._lateness = Timings()

    async def watch(self) -> None:
        """Measure how late the event loop runs its timers, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            # What delays this timer delays every request in the same way.
            self._lateness.add(max(loop.time() - due, 0.0))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by the registry."""
        build = GaugeMetricFamily(
            "contrail_build_info",
            "Information about the process in labels; always 1.",
            labels=list(self._labels),
        )
        build.add_metric(list(self._labels.values()), 1)
        yield build
        yield HistogramMetricFamily(
            "contrail_loop_late_seconds",
            "Delay with which the event loop woke from a timer, measured twice a second.",
            buckets=self._lateness.buckets(),
            sum_value=self._lateness.sum_s,
        )
        yield from self._system.collect()
