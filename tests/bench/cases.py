"""The list of figures."""

import signal
from functools import partial
from typing import Final

from tests.bench import (
    cases_cluster,
    cases_lookup,
    cases_publish,
    cases_read,
    cases_removal,
    cases_socket,
    cases_spark,
    cases_split,
    cases_start,
)
from tests.bench.figures import Beside, Case
from tests.bench.http_scripts import COLUMNS, JSON, NDJSON, PAYLOAD_BYTES
from tests.bench.references import LIMITS, PEERS

_KIB: Final = 1 << 10
_BATCH: Final = 1_000
_MANY: Final = 64
_PULL: Final = 100

_DISK_256K: Final = Beside(
    "disk-256k",
    256 * _KIB / PAYLOAD_BYTES,
    "the disk: payload alone, synced every 256 KiB",
)

_PUBLISHING: Final = (
    Case(
        "batch-1000",
        "batches of 1,000, msgpack, 4 connections",
        "msg/s",
        cases_publish.Batched(_BATCH),
        aim=600_000,
        beside=(
            _DISK_256K,
            Beside("redis-1000", 1, "Redis, pipelined by 1,000"),
            Beside("nats-1000", 1, "NATS, 1,000 outstanding"),
        ),
    ),
    Case(
        "batch-100",
        "batches of 100, msgpack, 4 connections",
        "msg/s",
        cases_publish.Batched(100),
        aim=400_000,
        beside=(Beside("batch-1000", 1, "batches of 1,000"),),
    ),
    Case(
        "batch-ids",
        "batches of 1,000 with message ids, msgpack, 4 connections",
        "msg/s",
        cases_publish.BatchedWithIds(),
        beside=(Beside("batch-1000", 1, "the same without ids", aim=0.8, in_turns=True),),
    ),
    Case(
        "columns-1000",
        "batches of 1,000, msgpack in columns, 4 connections",
        "msg/s",
        cases_publish.Batched(_BATCH, COLUMNS),
        aim=1_000_000,
        beside=(_DISK_256K, Beside("batch-1000", 1, "rows")),
    ),
    Case(
        "columns-100",
        "batches of 100, msgpack in columns, 4 connections",
        "msg/s",
        cases_publish.Batched(100, COLUMNS),
        aim=300_000,
        beside=(Beside("batch-100", 1, "rows"),),
    ),
    Case(
        "columns-100-16",
        "batches of 100, msgpack in columns, 16 connections",
        "msg/s",
        cases_publish.Batched(100, COLUMNS, connections=16),
        aim=300_000,
        beside=(Beside("columns-100", 1, "4 connections"),),
    ),
    Case(
        "columns-ids",
        "batches of 1,000 with message ids, msgpack in columns, 4 connections",
        "msg/s",
        cases_publish.BatchedWithIds(COLUMNS),
        beside=(Beside("columns-1000", 1, "the same without ids", aim=0.8, in_turns=True),),
    ),
    Case(
        "batch-1k",
        "batches of 1,000 messages of 1 KiB, msgpack, 4 connections",
        "MB/s",
        cases_publish.held_kib_batches,
        aim=130,
        beside=(Beside("disk-256k", 256 * _KIB / 1e6, "the disk, synced every 256 KiB"),),
    ),
    Case(
        "batch-json",
        "batches of 1,000, JSON, 4 connections",
        "msg/s",
        cases_publish.Batched(_BATCH, JSON),
        beside=(Beside("batch-1000", 1, "msgpack"),),
    ),
    Case(
        "batch-ndjson",
        "batches of 1,000, NDJSON, 4 connections",
        "msg/s",
        cases_publish.Batched(_BATCH, NDJSON),
        beside=(Beside("batch-1000", 1, "msgpack"),),
    ),
    Case(
        "single-64",
        "one message a request, 64 connections",
        "msg/s",
        cases_publish.Single(_MANY),
        aim=16_000,
        beside=(
            Beside("disk-4k", _MANY, "the disk: 64 messages in each sync of 4 KiB"),
            Beside("http-64", 1, "HTTP without a service", aim=0.8, in_turns=True),
            Beside("redis-64", 1, "Redis, 64 connections"),
            Beside("nats-64", 1, "NATS, 64 connections"),
        ),
    ),
    Case(
        "single-1",
        "one message a request, 1 connection",
        "msg/s",
        cases_publish.Single(1),
        aim=2_000,
        beside=(
            Beside("disk-4k", 1, "the disk: a sync of 4 KiB for each message"),
            Beside("round-trips", 1, "loopback round trips"),
            Beside("http-1", 1, "HTTP without a service", in_turns=True),
            Beside("http-synced-1", 1, "HTTP and a synced write", in_turns=True),
            Beside("redis-1", 1, "Redis, 1 connection"),
            Beside("nats-1", 1, "NATS, 1 connection"),
        ),
    ),
)

_READING: Final = (
    Case(
        "replay",
        "replay as Arrow over HTTP, decoded and counted",
        "msg/s",
        cases_read.replay_arrow,
        aim=6_000_000,
        beside=(
            Beside("stream", 1 / PAYLOAD_BYTES, "loopback, payload alone"),
            Beside("redis-replay", 1, "Redis, XRANGE"),
            Beside("nats-replay", 1, "NATS, push consumer"),
        ),
    ),
    Case(
        "replay-1k",
        "replay of messages of 1 KiB as Arrow, decoded and counted",
        "GB/s",
        cases_lookup.replay_kib,
        aim=1.5,
        beside=(Beside("stream", 1e-9, "loopback one way"),),
    ),
    Case(
        "replay-filtered",
        "replay of the 1 % that a wildcard matches, of 10,000 subjects",
        "scanned msg/s",
        cases_lookup.replay_filtered,
        aim=15_000_000,
        beside=(
            Beside("replay", 1, "replay of all"),
            Beside("stream", 1 / PAYLOAD_BYTES, "loopback, payload alone"),
        ),
    ),
    Case(
        "last-get",
        "last message of a subject, out of as many subjects as messages, 64 connections",
        "/s",
        cases_lookup.LastGet(_MANY),
        aim=9_000,
        beside=(
            Beside("http-64", 1, "HTTP without a service", aim=0.5, in_turns=True),
            Beside("nats-last-get", 1, "NATS, direct get"),
        ),
    ),
    Case(
        "seq-get",
        "message by its sequence, 64 connections",
        "/s",
        cases_lookup.SequenceGet(_MANY),
        beside=(
            Beside("http-64", 1, "HTTP without a service", aim=0.5, in_turns=True),
            Beside("last-get", 1, "last message of a subject"),
        ),
    ),
    Case(
        "get-many",
        "1,000 messages by their sequences in one request, msgpack, 4 connections",
        "msg/s",
        cases_lookup.ManyGet(cases_publish.BATCH_CONNECTIONS, _BATCH),
        aim=500_000,
        beside=(Beside("seq-get", 1, "one message a request"),),
    ),
    Case(
        "drain",
        "the same through the Spark source's client, without Spark",
        "rows/s",
        cases_read.replay_client,
        beside=(Beside("replay", 1, "replay as Arrow"),),
    ),
    Case(
        "spark",
        "Spark count()",
        "rows/s",
        cases_spark.SparkCount(),
        aim=1_500_000,
        beside=(Beside("drain", 1, "the client without Spark"),),
    ),
    Case(
        "spark-seq",
        "Spark count() of the column seq",
        "rows/s",
        cases_spark.SparkCount("seq"),
        beside=(Beside("spark", 1, "all columns"),),
    ),
    *cases_spark.WHOLE_ROWS,
    Case(
        "spark-write",
        "Spark df.write, with ids",
        "rows/s",
        cases_spark.spark_write,
        aim=150_000,
        beside=(Beside("columns-ids", 1, "batches of 1,000 with ids over 4 connections"),),
    ),
    Case(
        "spark-archive",
        "contrail pipeline archive, the whole stream to a lake",
        "rows/s",
        cases_spark.spark_archive,
        aim=400_000,
    ),
    Case(
        "spark-stream",
        "Spark readStream, all that there is in 5 batches",
        "rows/s",
        cases_spark.spark_stream,
        aim=500_000,
        beside=(Beside("spark", 1, "in one job"),),
    ),
    Case(
        "pull-1",
        "pull 100, acks in the next pull, 1 connection",
        "msg/s",
        cases_read.Pull(1),
        aim=40_000,
        beside=(
            Beside("round-trips", _PULL, "100 messages in each loopback round trip"),
            Beside("redis-pull", 1, "Redis, XREADGROUP + XACK"),
            Beside("nats-pull", 1, "NATS, pull + acks"),
        ),
    ),
    Case(
        "pull-4",
        "the same on 4 connections",
        "msg/s",
        cases_read.Pull(4),
        beside=(Beside("pull-1", 1, "1 connection"),),
    ),
    Case(
        "pull-columns",
        "pull 100 in columns, acks in the next pull, 1 connection",
        "msg/s",
        cases_read.Pull(1, columns=True),
        aim=150_000,
        beside=(
            Beside("pull-1", 1, "in rows"),
            Beside("redis-pull", 1, "Redis, XREADGROUP + XACK"),
            Beside("nats-pull", 1, "NATS, pull + acks"),
        ),
    ),
    Case(
        "pull-workqueue",
        "pull 100 with acks, 1 connection, from a workqueue stream",
        "msg/s",
        cases_removal.PullAway("workqueue"),
        beside=(Beside("pull-1", 1, "a limits stream"),),
    ),
    Case(
        "pull-interest",
        "pull 100 with acks, 1 connection, from an interest stream",
        "msg/s",
        cases_removal.PullAway("interest"),
        beside=(Beside("pull-1", 1, "a limits stream"),),
    ),
)

_SOCKETS: Final = (
    Case(
        "ws-publish",
        "WebSocket: single messages, 1,000 outstanding",
        "msg/s",
        cases_socket.SocketPublish(_BATCH),
        aim=60_000,
        beside=(
            Beside("single-64", 1, "one message a request, 64 connections"),
            Beside("nats-1000", 1, "NATS, 1,000 outstanding on each of 4 connections"),
        ),
    ),
    Case(
        "ws-push",
        "WebSocket: ordered subscription from the start, msgpack",
        "msg/s",
        cases_socket.SocketPush(),
        aim=300_000,
        beside=(
            Beside("stream", 1 / PAYLOAD_BYTES, "loopback, payload alone"),
            Beside("nats-replay", 1, "NATS, push consumer"),
        ),
    ),
    Case(
        "ws-push-cols",
        "WebSocket: ordered subscription from the start, in columns",
        "msg/s",
        cases_socket.SocketPush(cols=True),
        aim=300_000,
        beside=(
            Beside("stream", 1 / PAYLOAD_BYTES, "loopback, payload alone"),
            Beside("ws-push", 1, "one by one"),
        ),
    ),
    Case(
        "ws-delay",
        "WebSocket: from publish to push, 1,000 a second",
        "s",
        cases_socket.Delay(_BATCH),
        aim=0.002,
        smaller_is_better=True,
        beside=(Beside("disk-4k", 1, "appends and syncs a second"),),
    ),
)

_SPLIT: Final = (
    Case(
        "split-1000",
        "split form: batches of 1,000, msgpack, 4 connections",
        "msg/s",
        cases_split.Split(cases_publish.Batched(_BATCH)),
        beside=(Beside("batch-1000", 1, "one process"),),
    ),
    Case(
        "split-64",
        "split form: one message a request, 64 connections",
        "msg/s",
        cases_split.Split(cases_publish.Single(_MANY)),
        beside=(Beside("single-64", 1, "one process"),),
    ),
    Case(
        "split-replay",
        "split form: replay as Arrow over HTTP, decoded and counted",
        "msg/s",
        cases_split.Split(cases_read.replay_arrow),
        beside=(Beside("replay", 1, "one process"),),
    ),
    Case(
        "split-pull-1",
        "split form: pull 100, acks in the next pull, 1 connection to a gateway",
        "msg/s",
        cases_split.Split(cases_read.Pull(1), "gateway"),
        beside=(Beside("pull-1", 1, "one process"),),
    ),
)

_LIVING: Final = (
    Case(
        "start",
        "start without data",
        "s",
        cases_start.start_empty,
        smaller_is_better=True,
        beside=(Beside("imports", 1, "Python and imports alone"),),
    ),
    Case(
        "restart",
        "restart with all messages after kill -9",
        "s",
        cases_start.Restart(),
        aim=1.5,
        smaller_is_better=True,
        beside=(Beside("imports", 1, "Python and imports alone"),),
    ),
    Case(
        "restart-10",
        "restart with ten times as many messages after kill -9",
        "s",
        cases_start.Restart(10),
        aim=1.5,
        smaller_is_better=True,
        beside=(Beside("restart", 1, "restart with a tenth of them", aim=1.2),),
    ),
    Case(
        "subjects",
        "memory of each of as many subjects as messages",
        "B",
        cases_publish.distinct_subjects,
        aim=200,
        smaller_is_better=True,
    ),
    Case(
        "erase",
        "erase one message, until its receipt says done",
        "s",
        cases_removal.erase,
        smaller_is_better=True,
        beside=(Beside("disk-all", 1, "writing all payloads once"),),
    ),
)

_CLUSTER: Final = (
    Case(
        "cluster-1",
        "3 replicas: one message a request, 1 connection",
        "msg/s",
        cases_cluster.Clustered(cases_publish.Single(1)),
        aim=1_300,
        beside=(
            Beside("single-1", 1, "one node"),
            Beside("disk-4k", 1, "the disk: a sync of 4 KiB for each message"),
        ),
    ),
    Case(
        "cluster-whole-1",
        "3 replicas on whole nodes: one message a request, 1 connection to the leader",
        "msg/s",
        cases_cluster.Whole(cases_publish.Single(1)),
        aim=1_300,
        beside=(Beside("single-1", 1, "one node"),),
    ),
    Case(
        "cluster-ws",
        "3 replicas: single messages over WebSocket, 1,000 outstanding",
        "msg/s",
        cases_cluster.Clustered(cases_socket.SocketPublish(_BATCH), "gateway"),
        aim=40_000,
        beside=(Beside("ws-publish", 1, "one node"),),
    ),
    Case(
        "cluster-1000",
        "3 replicas: batches of 1,000, msgpack, 4 connections",
        "msg/s",
        cases_cluster.Clustered(cases_publish.Batched(_BATCH)),
        aim=200_000,
        beside=(
            Beside("batch-1000", 1, "one node"),
            Beside("split-1000", 1, "one node in the split form"),
        ),
    ),
    Case(
        "cluster-shards",
        "3 replicas: batches of 1,000, msgpack, 16 connections, to 3 shards led by 3 nodes",
        "msg/s",
        partial(cases_cluster.shards, cases_cluster.batches),
    ),
    Case(
        "cluster-shards-64",
        "3 replicas: one message a request, 64 connections, to 3 shards led by 3 nodes",
        "msg/s",
        partial(cases_cluster.shards, cases_cluster.singles),
    ),
    Case(
        "cluster-kill",
        "3 replicas: from kill -9 of the leader to the next ack",
        "s",
        cases_cluster.Failover(signal.SIGKILL),
        aim=0.6,
        smaller_is_better=True,
    ),
    Case(
        "cluster-stop",
        "3 replicas: from SIGSTOP of the leader to the next ack",
        "s",
        cases_cluster.Failover(signal.SIGSTOP),
        aim=1.5,
        smaller_is_better=True,
    ),
    Case(
        "cluster-restart",
        "3 replicas: longest gap between acks while each node is restarted",
        "s",
        cases_cluster.rolling_restart,
        aim=1.0,
        smaller_is_better=True,
    ),
    Case(
        "cluster-idle",
        "3 replicas: CPU of the busiest node without requests",
        "% of a core",
        cases_cluster.idle,
        aim=5.0,
        smaller_is_better=True,
    ),
    Case(
        "cluster-catch-up",
        "3 replicas: a node with an empty disk gets ten times as many messages",
        "msg/s",
        cases_cluster.catch_up,
        aim=500_000,
    ),
)

PROFILED: Final = {
    case.name for case in (*_PUBLISHING, *_READING, *_SOCKETS) if not case.name.startswith("spark")
}
"""The cases whose costs are shown by stage: messages, without a JVM."""

ONE_NODE: Final = {
    case.name: case
    for case in (*LIMITS, *PEERS, *_PUBLISHING, *_READING, *_SOCKETS, *_SPLIT, *_LIVING)
}
CLUSTER: Final = {case.name: case for case in _CLUSTER}
CASES: Final = ONE_NODE | CLUSTER


def with_references(names: list[str]) -> list[str]:
    """``names`` and the cases to compare them with, in the order of the list."""
    wanted: set[str] = set()
    ahead = list(names)
    while ahead:
        name = ahead.pop()
        if name not in wanted:
            wanted.add(name)
            ahead += [beside.reference for beside in CASES[name].beside]
    return [name for name in CASES if name in wanted]
