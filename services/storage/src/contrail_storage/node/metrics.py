"""The node's own figures as Prometheus text, read from plain counters when they are asked for."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from contrail_storage.node.node import StorageNode

_STREAMS_MAX = 1_000
"""Streams with figures of their own; the totals count all."""


class _NodeCollector:
    def __init__(self, node: "StorageNode") -> None:
        self._node = node

    def collect(self) -> Iterable[Metric]:
        yield from self._log_metrics()
        yield from self._store_metrics()
        yield from self._stream_metrics()

    def _log_metrics(self) -> Iterable[Metric]:
        stats = self._node.log.stats
        yield CounterMetricFamily("contrail_wal_syncs", "fdatasync calls", stats.sync_count)
        yield CounterMetricFamily(
            "contrail_wal_sync_seconds", "Seconds spent in fdatasync", stats.sync_seconds_total
        )
        yield CounterMetricFamily("contrail_wal_bytes", "Bytes logged", stats.bytes_written)
        yield GaugeMetricFamily("contrail_wal_size_bytes", "Bytes of log files", stats.size_bytes)
        yield GaugeMetricFamily(
            "contrail_proposals_queued_bytes",
            "Bytes of requests that wait for an entry",
            self._node.shard_log.queued_bytes,
        )
        applied = GaugeMetricFamily(
            "contrail_applied_index", "Applied and written log index", labels=["group"]
        )
        for group, index in sorted(self._node.applied_indexes().items()):
            applied.add_metric([str(group)], index)
        yield applied

    def _store_metrics(self) -> Iterable[Metric]:
        writer = self._node.writer
        yield CounterMetricFamily("contrail_store_batches", "Batches written", writer.batches)
        yield CounterMetricFamily(
            "contrail_store_write_seconds", "Seconds spent encoding and writing", writer.seconds
        )
        yield CounterMetricFamily("contrail_store_stalls", "Writes put off", writer.stalls)
        yield GaugeMetricFamily(
            "contrail_store_unwritten_bytes",
            "Bytes applied and not yet written",
            self._node.applier.unwritten_bytes,
        )

    def _stream_metrics(self) -> Iterable[Metric]:
        shards = self._node.streams.shards()
        yield GaugeMetricFamily("contrail_streams", "Streams", len(shards))
        families = {
            name: GaugeMetricFamily(f"contrail_stream_{name}", text, labels=["stream"])
            for name, text in (
                ("messages", "Messages kept"),
                ("bytes", "Bytes kept"),
                ("last_seq", "Last sequence"),
                ("consumers", "Consumers"),
                ("ack_pending", "Deliveries that wait for their ack, over all consumers"),
            )
        }
        for shard in shards[:_STREAMS_MAX]:
            machine = shard.machine
            values = {
                "messages": machine.counters.messages,
                "bytes": machine.counters.bytes,
                "last_seq": machine.counters.last_seq,
                "consumers": len(machine.consumers),
                "ack_pending": sum(len(one.pending) for one in machine.consumers.values()),
            }
            for name, value in values.items():
                families[name].add_metric([shard.name], value)
        yield from families.values()


def render_metrics(node: "StorageNode") -> str:
    """Prometheus exposition text of ``node``."""
    registry = CollectorRegistry()
    registry.register(_NodeCollector(node))
    return generate_latest(registry).decode()
