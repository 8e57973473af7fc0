"""The node's metrics as Prometheus text, read from plain counters at each request."""

from collections.abc import Iterable
from itertools import islice

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from contrail_common.timeunits import NS_PER_S
from contrail_common.timings import Timings
from contrail_storage.core.key_layout import is_in_memory
from contrail_storage.node import StorageNode
from contrail_storage.replica.shard import Shard
from contrail_storage.seal.subject_keys import SubjectKeys

_STREAMS_MAX = _CONSUMERS_MAX = 1_000
"""Streams, and consumers, that have metrics of their own at most."""


class _NodeCollector:
    def __init__(self, node: StorageNode) -> None:
        self._node = node

    def collect(self) -> Iterable[Metric]:
        yield from self._log_metrics()
        yield from self._store_metrics()
        yield from self._stream_metrics()
        yield from self._consumer_metrics()

    def _log_metrics(self) -> Iterable[Metric]:
        stats = self._node.log.stats
        yield _histogram(
            "contrail_wal_sync_seconds", "Duration of an fdatasync of the log.", stats.syncs
        )
        yield CounterMetricFamily(
            "contrail_wal_bytes", "Bytes written to the log.", stats.bytes_written
        )
        yield GaugeMetricFamily(
            "contrail_wal_size_bytes", "Size of all log files in bytes.", stats.size_bytes
        )
        yield GaugeMetricFamily(
            "contrail_proposals_queued_bytes",
            "Bytes of requests waiting to be put into a log entry.",
            self._node.shard_log.queued_bytes + self._node.memory_log.queued_bytes,
        )
        timings = self._node.timings
        yield _histogram(
            "contrail_commit_seconds",
            "Time from building a log entry to its commit and the answers to its requests.",
            timings.commits,
        )
        yield _histogram(
            "contrail_apply_seconds", "Duration of applying a log entry.", timings.applies
        )
        applied = GaugeMetricFamily(
            "contrail_applied_index",
            "Log index up to which changes are applied and written to the store.",
            labels=["group"],
        )
        for group, index in sorted(self._node.applier.written_indexes.items()):
            name = "memory" if is_in_memory(group) else str(group)
            applied.add_metric([name], index)
        yield applied

    def _store_metrics(self) -> Iterable[Metric]:
        writer = self._node.writer
        yield CounterMetricFamily(
            "contrail_store_batches", "Batches written to the store.", writer.batches
        )
        yield CounterMetricFamily(
            "contrail_store_write_seconds",
            "Seconds spent encoding and writing to the store.",
            writer.seconds,
        )
        yield CounterMetricFamily(
            "contrail_store_stalls", "Writes to the store that were delayed.", writer.stalls
        )
        yield GaugeMetricFamily(
            "contrail_store_unwritten_bytes",
            "Bytes applied but not yet written to the store.",
            self._node.applier.unwritten_bytes,
        )

        yield GaugeMetricFamily(
            "contrail_disk_room_bytes",
            "Bytes of disk space left for messages, in log and store together.",
            max(self._node.disk_budget.measure(), 0),
        )
        yield CounterMetricFamily(
            "contrail_store_reopened",
            "Number of times a failed store was reopened.",
            self._node.healing.reopened,
        )
        yield GaugeMetricFamily(
            "contrail_log_time_ahead_seconds",
            "Seconds by which the time of new messages is ahead of the wall clock (negative if "
            "behind).",
            self._node.clock.distance_ns / NS_PER_S,
        )
        yield GaugeMetricFamily(
            "contrail_memory_bytes",
            "Size of all streams in memory in bytes.",
            self._node.memory.size_bytes,
        )
        yield GaugeMetricFamily(
            "contrail_memory_max_bytes",
            "Maximum size of all streams in memory in bytes; above it they refuse messages.",
            self._node.memory.max_bytes,
        )

    def _stream_metrics(self) -> Iterable[Metric]:
        streams = self._node.streams.listed()
        yield GaugeMetricFamily("contrail_streams", "Number of streams.", len(streams))
        damaged = sum(any(shard.damaged for shard in stream.shards) for stream in streams)
        yield GaugeMetricFamily(
            "contrail_streams_damaged",
            "Number of streams that are unavailable because of damage.",
            damaged,
        )
        losses = [shard.machine.loss for stream in streams for shard in stream.shards]
        yield GaugeMetricFamily(
            "contrail_shards_data_loss",
            "Number of shards with accepted data loss.",
            sum(loss is not None for loss in losses),
        )
        yield GaugeMetricFamily(
            "contrail_messages_lost",
            "Messages known to be lost in shards with accepted data loss.",
            sum(loss.messages for loss in losses if loss is not None),
        )
        yield from self._upkeep_metrics()
        families = {
            name: GaugeMetricFamily(f"contrail_stream_{name}", text, labels=["stream"])
            for name, text in (
                ("messages", "Messages in the stream."),
                ("bytes", "Bytes of the messages in the stream."),
                ("last_seq", "Last sequence of the stream."),
                ("consumers", "Consumers of the stream."),
                (
                    "ack_pending",
                    "Deliveries awaiting acknowledgement, over all consumers of the stream.",
                ),
            )
        }
        # Every stream is a time series for each metric, so their number is bounded.
        for stream in streams[:_STREAMS_MAX]:
            machines = [shard.machine for shard in stream.shards]
            consumers = [one for machine in machines for one in machine.consumers.values()]
            values = {
                "messages": sum(machine.counters.messages for machine in machines),
                "bytes": sum(machine.counters.bytes for machine in machines),
                "last_seq": max(machine.counters.last_seq for machine in machines),
                "consumers": len(machines[0].consumers),
                "ack_pending": sum(len(one.pending) for one in consumers),
            }
            for name, value in values.items():
                families[name].add_metric([stream.name], value)
        yield from families.values()

    def _upkeep_metrics(self) -> Iterable[Metric]:
        scrubbed = self._node.scrubber.counts
        for name, text, count in (
            ("rounds", "Scrub rounds: times that all stored data was verified.", scrubbed.rounds),
            ("blocks", "Blocks verified by scrubbing.", scrubbed.blocks),
            ("bytes", "Bytes verified by scrubbing.", scrubbed.bytes),
            (
                "damaged",
                "Blocks and kinds of rows that scrubbing could not read back.",
                scrubbed.damaged,
            ),
        ):
            yield CounterMetricFamily(f"contrail_scrub_{name}", text, count)
        counts = self._node.compactor.counts
        for name, text, count in (
            ("dropped", "Blocks dropped because all their messages were deleted.", counts.dropped),
            ("rewritten", "Blocks rewritten without their deleted messages.", counts.rewritten),
            (
                "freed_bytes",
                "Bytes freed by compaction, measured as uncompressed blocks.",
                counts.freed_bytes,
            ),
        ):
            yield CounterMetricFamily(f"contrail_compact_{name}", text, count)
        erasures = self._node.eraser
        pending = len(erasures.erasures.pending())
        yield GaugeMetricFamily(
            "contrail_erasures_pending", "Erasures that this node has yet to complete.", pending
        )
        for name, text, number in (
            ("done", "Erasures that this node has completed.", erasures.counts.done),
            ("cycles", "Rewrites of files for pending erasures.", erasures.counts.cycles),
            (
                "failed",
                "Rewrites of files for pending erasures that failed; they are retried.",
                erasures.counts.failed,
            ),
            (
                "seconds",
                "Seconds spent rewriting files for pending erasures.",
                erasures.counts.seconds,
            ),
        ):
            yield CounterMetricFamily(f"contrail_erasures_{name}", text, number)
        yield from _subject_key_metrics(self._node.subject_keys)

    def _consumer_metrics(self) -> Iterable[Metric]:
        families = {
            name: kind(f"contrail_consumer_{name}", text, labels=["stream", "consumer"])
            for name, kind, text in (
                ("deliveries", CounterMetricFamily, "Deliveries, including redeliveries."),
                ("ack_pending", GaugeMetricFamily, "Deliveries awaiting acknowledgement."),
                (
                    "redelivered",
                    GaugeMetricFamily,
                    ("Deliveries awaiting acknowledgement that were delivered more than once."),
                ),
                (
                    "lag",
                    GaugeMetricFamily,
                    (
                        "Sequences of the stream from the consumer's position on, regardless of "
                        "its filter."
                    ),
                ),
            )
        }
        consumers = (
            (stream, name)
            for stream in self._node.streams.listed_after("", "")
            for name in stream.shards[0].machine.consumer_ids
        )
        for stream, consumer in islice(consumers, _CONSUMERS_MAX):
            values = dict.fromkeys(families, 0)
            for shard in stream.shards:
                for name, value in _consumer_values(shard, consumer).items():
                    values[name] += value
            for name, value in values.items():
                families[name].add_metric([stream.name, consumer], value)
        yield from families.values()


def _subject_key_metrics(keys: SubjectKeys) -> Iterable[Metric]:
    for name, text, count in (
        ("", "Number of subject keys.", sum(keys.live().values())),
        ("_broken", "Slots of subject keys that cannot be read and are not reused.", keys.broken),
        (
            "_unfinished",
            "Destroyed subject keys whose messages have yet to be removed.",
            len(keys.remains),
        ),
    ):
        yield GaugeMetricFamily(f"contrail_subject_keys{name}", text, count)


def _consumer_values(shard: Shard, name: str) -> dict[str, int]:
    """Return a consumer's values on one shard of its stream."""
    consumer = shard.machine.consumer(name)
    if consumer is None:
        return {}
    pending = consumer.pending.values()
    return {
        "deliveries": consumer.delivered.consumer_seq,
        "ack_pending": len(pending),
        "redelivered": sum(one.attempts > 1 for one in pending),
        "lag": max(shard.machine.counters.last_seq + 1 - consumer.next_seq, 0),
    }


def _histogram(name: str, text: str, timings: Timings) -> Metric:
    return HistogramMetricFamily(name, text, buckets=timings.buckets(), sum_value=timings.sum_s)


def render_metrics(node: StorageNode) -> str:
    """Return the Prometheus exposition text of ``node``."""
    registry = CollectorRegistry()
    registry.register(_NodeCollector(node))
    return generate_latest(registry).decode()
