"""Metrics of a server process: version, memory, CPU, lateness and stalls of the event loop."""

from collections.abc import Iterator

from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from contrail_common.__about__ import __version__
from contrail_common.timings import Timings
from contrail_serve.loop_watch import LoopWatch


class ProcessMetrics(Collector):
    """Shows what the system and ``watch`` measure."""

    def __init__(self, service: str, node: str, watch: LoopWatch) -> None:
        self._labels = {"version": __version__, "service": service, "node": node}
        self._system = ProcessCollector(registry=None)
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by the registry."""
        build = GaugeMetricFamily(
            "contrail_build_info",
            "Information about the process in labels; always 1.",
            labels=list(self._labels),
        )
        build.add_metric(list(self._labels.values()), 1)
        yield build
        yield _histogram(
            "contrail_loop_late_seconds",
            "Delay with which the event loop ran a timer; measured up to 50 times a second.",
            self._watch.lateness,
        )
        yield _histogram(
            "contrail_loop_stall_seconds",
            "CPU time that the event loop spent during such a delay: for as long, one step or the "
            "work of one turn held it.",
            self._watch.stalls,
        )
        yield from self._system.collect()


def _histogram(name: str, meaning: str, timings: Timings) -> Metric:
    return HistogramMetricFamily(name, meaning, buckets=timings.buckets(), sum_value=timings.sum_s)
