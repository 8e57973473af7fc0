"""The node's metrics as Prometheus text, read from plain counters at each request."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from contrail_common.timeunits import NS_PER_S
from contrail_common.timings import Timings
from contrail_storage.catching_up import CatchingUp
from contrail_storage.core.key_layout import is_in_memory
from contrail_storage.node import StorageNode
from contrail_storage.replica.raft_port import GroupReport
from contrail_storage.seal.shared_keys import SharedKeys
from contrail_storage.seal.subject_keys import SubjectKeys
from contrail_storage.streams.stream import Stream

_STREAMS_MAX = _CONSUMERS_MAX = 1_000
"""Streams, and consumers, that have metrics of their own at most."""
_CONSUMERS_TOGETHER: Final = 64
_LEADS: Final = "leader"
_Family = GaugeMetricFamily | CounterMetricFamily
_OF_STREAM: Final = {
    "messages": (GaugeMetricFamily, "Messages in the stream."),
    "bytes": (GaugeMetricFamily, "Bytes of the messages in the stream."),
    "last_seq": (GaugeMetricFamily, "Last sequence of the stream."),
    "consumers": (GaugeMetricFamily, "Consumers of the stream."),
    "ack_pending": (
        GaugeMetricFamily,
        "Deliveries awaiting acknowledgement, over all consumers of the stream.",
    ),
}
_OF_CONSUMER: Final = {
    "deliveries": (CounterMetricFamily, "Deliveries, including redeliveries."),
    "ack_pending": (GaugeMetricFamily, "Deliveries awaiting acknowledgement."),
    "redelivered": (
        GaugeMetricFamily,
        "Deliveries awaiting acknowledgement that were delivered more than once.",
    ),
    "lag": (
        GaugeMetricFamily,
        "Sequences of the stream from the consumer's position on, regardless of its filter.",
    ),
}


_OF_GROUP: Final[tuple[tuple[str, str, Callable[[GroupReport], int]], ...]] = (
    ("leader", "Whether this node leads the group (1) or not (0).", lambda one: one.role == _LEADS),
    ("term", "Term of the group.", lambda one: one.term),
    ("durable_index", "Index up to which the group's log is on the disk.", lambda one: one.durable),
    ("commit_index", "Index up to which entries are committed.", lambda one: one.commit),
    ("applied_index", "Index up to which entries are applied.", lambda one: one.applied),
    (
        "unfit",
        "Whether this member has yet to restore its copy, or its copy is damaged (1).",
        lambda one: one.restoring or one.suspect,
    ),
)


class _NodeMetrics:
    """Collects the metrics of a node on the event loop."""

    def __init__(self, node: StorageNode) -> None:
        self._node = node

    async def collect(self) -> list[Metric]:
        """Collect all metrics; other work of the event loop comes between those of streams."""
        return [
            *self._log_metrics(),
            *self._group_metrics(),
            *self._store_metrics(),
            *self._upkeep_metrics(),
            *_state_metrics(self._node.catching_up),
            *await self._stream_metrics(),
        ]

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
            sum(log.queued_bytes for log in self._node.groups.proposers.values()),
        )
        timings = self._node.groups.timings
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

    def _group_metrics(self) -> Iterable[Metric]:
        """The metrics of groups with several members."""
        reports = {
            str(number): group.report()
            for number, group in self._node.logged_groups.items()
            if not group.is_alone
        }
        for name, text, value in _OF_GROUP:
            gauge = GaugeMetricFamily(f"contrail_raft_{name}", text, labels=["group"])
            for group, report in reports.items():
                gauge.add_metric([group], value(report))
            yield gauge
        lag = GaugeMetricFamily(
            "contrail_raft_lag",
            "Committed entries that another member has not acknowledged; shown by the leader.",
            labels=["group", "peer"],
        )
        elections, step_downs = (
            CounterMetricFamily(f"contrail_raft_{name}", text, labels=["group", "cause"])
            for name, text in (
                ("elections", "Number of times that this node began to lead a group."),
                ("step_downs", "Number of times that this node ceased to lead a group."),
            )
        )
        for group, report in reports.items():
            for peer in report.peers:
                lag.add_metric([group, peer.name], peer.lag)
            for family, counts in ((elections, report.elections), (step_downs, report.step_downs)):
                for cause, count in counts.items():
                    family.add_metric([group, cause], count)
        yield from (lag, elections, step_downs)

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
            "contrail_clock_disagreements",
            "Number of groups led by this node that do not use the clocks of the nodes, because "
            "these disagree.",
            len(self._node.groups.clock_doubts),
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
        blocks = self._node.blocks
        yield GaugeMetricFamily(
            "contrail_cache_bytes", "Size of the cache of blocks in bytes.", blocks.cache.size_bytes
        )
        yield GaugeMetricFamily(
            "contrail_cache_max_bytes",
            "Maximum size of the cache of blocks in bytes.",
            blocks.cache.max_bytes,
        )
        yield CounterMetricFamily(
            "contrail_cache_misses",
            "Blocks that were read from the disk because the cache did not have them.",
            blocks.misses,
        )

    async def _stream_metrics(self) -> list[Metric]:
        of_streams = _families("contrail_stream_", _OF_STREAM, ["stream"])
        of_consumers = _families("contrail_consumer_", _OF_CONSUMER, ["stream", "consumer"])
        streams = damaged = shards_lost = messages_lost = consumers = 0
        async for stream in self._node.streams.each_listed():
            streams += 1
            damaged += any(shard.damaged for shard in stream.shards)
            losses = [shard.machine.loss for shard in stream.shards if shard.machine.loss]
            shards_lost += len(losses)
            messages_lost += sum(loss.messages for loss in losses)
            # Every stream is a time series for each metric, so their number is bounded.
            if streams <= _STREAMS_MAX:
                _add(of_streams, [stream.name], _stream_values(stream))
            names = stream.shards[0].machine.consumer_ids
            for name in list(islice(names, _CONSUMERS_MAX - consumers)):
                consumers += 1
                if consumers % _CONSUMERS_TOGETHER == 0:
                    await asyncio.sleep(0)
                _add(of_consumers, [stream.name, name], _consumer_values(stream, name))
        return [
            GaugeMetricFamily("contrail_streams", "Number of streams.", streams),
            GaugeMetricFamily(
                "contrail_streams_damaged",
                "Number of streams that are unavailable because of damage.",
                damaged,
            ),
            GaugeMetricFamily(
                "contrail_shards_data_loss",
                "Number of shards with accepted data loss.",
                shards_lost,
            ),
            GaugeMetricFamily(
                "contrail_messages_lost",
                "Messages known to be lost in shards with accepted data loss.",
                messages_lost,
            ),
            *of_streams.values(),
            *of_consumers.values(),
        ]

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
        yield from _subject_key_metrics(self._node.subject_keys, self._node.key_sharing.keys)


def _state_metrics(catching_up: CatchingUp) -> Iterable[Metric]:
    """Of the groups that this node has with others."""
    yield GaugeMetricFamily(
        "contrail_groups_suspect",
        "Groups whose state on this node is damaged or out of date, and is to be fetched.",
        len(catching_up.suspects),
    )
    installs, sent = catching_up.installs, catching_up.sent
    yield CounterMetricFamily(
        "contrail_states_fetched",
        "Times that the state of a group was fetched from its leader.",
        installs.installed,
    )
    yield CounterMetricFamily(
        "contrail_states_failed",
        "Times that the state of a group could not be fetched, and will be again.",
        installs.failed,
    )
    yield CounterMetricFamily(
        "contrail_states_fetched_bytes",
        "Bytes of states and blocks that were fetched from other members.",
        0 if catching_up.fetching is None else catching_up.fetching.received_bytes,
    )
    mends = catching_up.mends
    yield CounterMetricFamily(
        "contrail_blocks_mended",
        "Blocks that could not be read, and were replaced by those of another member.",
        mends.mended,
    )
    yield CounterMetricFamily(
        "contrail_blocks_not_mended",
        "Blocks that could not be read, and that no other member could replace.",
        mends.failed,
    )
    yield CounterMetricFamily(
        "contrail_states_sent_bytes", "Bytes of states that were sent to members.", sent.sent_bytes
    )


def _subject_key_metrics(keys: SubjectKeys, shared: SharedKeys) -> Iterable[Metric]:
    for name, text, count in (
        ("", "Number of subject keys.", sum((*keys.live().values(), *shared.live().values()))),
        (
            "_broken",
            "Slots of subject keys that cannot be read and are not reused.",
            keys.broken + shared.broken,
        ),
        (
            "_wanted",
            "Subject keys that this node has yet to get from another one.",
            sum(shared.lacking.values()),
        ),
        (
            "_unfinished",
            "Destroyed subject keys whose messages have yet to be removed.",
            len(keys.remains),
        ),
    ):
        yield GaugeMetricFamily(f"contrail_subject_keys{name}", text, count)


def _families(
    prefix: str, kinds: Mapping[str, tuple[type[_Family], str]], labels: list[str]
) -> dict[str, _Family]:
    return {name: kind(prefix + name, text, labels=labels) for name, (kind, text) in kinds.items()}


def _add(families: Mapping[str, _Family], labels: list[str], values: Mapping[str, int]) -> None:
    for name, value in values.items():
        families[name].add_metric(labels, value)


def _stream_values(stream: Stream) -> dict[str, int]:
    machines = [shard.machine for shard in stream.shards]
    consumers = [one for machine in machines for one in machine.consumers.values()]
    return {
        "messages": sum(machine.counters.messages for machine in machines),
        "bytes": sum(machine.counters.bytes for machine in machines),
        "last_seq": max(machine.counters.last_seq for machine in machines),
        "consumers": len(machines[0].consumers),
        "ack_pending": sum(len(one.pending) for one in consumers),
    }


def _consumer_values(stream: Stream, name: str) -> dict[str, int]:
    """Return a consumer's values over all shards of its stream."""
    values = dict.fromkeys(_OF_CONSUMER, 0)
    for shard in stream.shards:
        consumer = shard.machine.consumer(name)
        if consumer is not None:
            pending = consumer.pending
            values["deliveries"] += consumer.delivered.consumer_seq
            values["ack_pending"] += len(pending)
            values["redelivered"] += pending.redelivered
            values["lag"] += max(shard.machine.counters.last_seq + 1 - consumer.next_seq, 0)
    return values


def _histogram(name: str, text: str, timings: Timings) -> Metric:
    return HistogramMetricFamily(name, text, buckets=timings.buckets(), sum_value=timings.sum_s)


class _Collected:
    """Metrics as `CollectorRegistry` expects them."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        """The metrics."""
        return self._metrics


async def render_metrics(node: StorageNode) -> str:
    """Return the Prometheus exposition text of ``node``."""
    registry = CollectorRegistry()
    registry.register(_Collected(await _NodeMetrics(node).collect()))
    # In a thread, because the text of thousands of time series takes longer than a step may.
    text = await asyncio.to_thread(generate_latest, registry)
    return text.decode()
