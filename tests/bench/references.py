"""The figures that others are compared with: limits of the machine, and peers."""

from typing import Final

from tests.bench import (
    bare_http,
    cases_publish,
    cases_start,
    limits,
    peer_nats,
    peer_nats_lookup,
    peer_redis,
)
from tests.bench.figures import Case

_KIB: Final = 1 << 10
_BATCH: Final = 1_000
_MANY: Final = 64

LIMITS: Final = (
    Case("disk-4k", "disk: append 4 KiB + fdatasync", "/s", limits.synced_appends(4 * _KIB)),
    Case("disk-64k", "disk: append 64 KiB + fdatasync", "/s", limits.synced_appends(64 * _KIB)),
    Case("disk-256k", "disk: append 256 KiB + fdatasync", "/s", limits.synced_appends(256 * _KIB)),
    Case(
        "disk-all",
        "disk: write the payloads of all messages and sync once",
        "s",
        limits.write_all,
        smaller_is_better=True,
    ),
    Case("round-trips", "loopback: 128 B there and back", "/s", limits.loopback_round_trips),
    Case("stream", "loopback: one way", "B/s", limits.loopback_stream),
    Case(
        "http-64",
        "HTTP without a service, 64 connections (uvicorn answering at once)",
        "/s",
        bare_http.BareRequests(_MANY),
    ),
    Case(
        "http-1",
        "HTTP without a service, 1 connection (uvicorn answering at once)",
        "/s",
        bare_http.BareRequests(1),
    ),
    Case(
        "http-synced-1",
        "HTTP and a synced write of 4 KiB, 1 connection (uvicorn and a thread)",
        "/s",
        bare_http.BareRequests(1, synced=True),
    ),
    Case(
        "imports",
        "start Python and import the service",
        "s",
        cases_start.interpreter_and_imports,
        smaller_is_better=True,
    ),
)

PEERS: Final = (
    Case("redis-1", "Redis: XADD, 1 connection", "msg/s", peer_redis.Publish(1, 1)),
    Case("redis-64", "Redis: XADD, 64 connections", "msg/s", peer_redis.Publish(1, _MANY)),
    Case(
        "redis-1000",
        "Redis: XADD pipelined by 1,000, 4 connections",
        "msg/s",
        peer_redis.Publish(_BATCH, cases_publish.BATCH_CONNECTIONS),
    ),
    Case("redis-replay", "Redis: XRANGE by 1,000", "msg/s", peer_redis.replay),
    Case("redis-pull", "Redis: XREADGROUP 100 + XACK", "msg/s", peer_redis.pull),
    Case("nats-1", "NATS: publish, 1 connection", "msg/s", peer_nats.Publish(1, 1)),
    Case("nats-64", "NATS: publish, 64 connections", "msg/s", peer_nats.Publish(1, _MANY)),
    Case(
        "nats-1000",
        "NATS: publish, 1,000 outstanding on each of 4 connections",
        "msg/s",
        peer_nats.Publish(_BATCH, cases_publish.BATCH_CONNECTIONS),
    ),
    Case("nats-replay", "NATS: push consumer from the start", "msg/s", peer_nats.replay),
    Case("nats-pull", "NATS: pull 100 + acks", "msg/s", peer_nats.pull),
    Case(
        "nats-last-get",
        "NATS: direct get of the last message of a subject, 64 connections",
        "/s",
        peer_nats_lookup.LastGet(_MANY),
    ),
)
