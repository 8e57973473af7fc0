"""The backlog of the consumers of a stream, as the server tells it."""

from collections.abc import Iterator
from heapq import nlargest
from typing import Any, Final

from contrail_client.blocking.client import Contrail
from contrail_client.models import ConsumerInfo
from contrail_client.times import parse_time_ns
from contrail_pipeline.summary.figures import Consumer

_NS_PER_US: Final = 1_000


def consumers_of(
    client: Contrail, stream: str, top: int, now_us: int
) -> tuple[tuple[Consumer, ...], int]:
    """The ``top`` consumers that are most behind, and the number of all.

    The server is asked for the oldest open message of each of these.
    """
    found = list(client.list_consumers(stream))
    most = nlargest(top, found, key=lambda info: info.num_pending + info.num_ack_pending)
    return tuple(_consumer(client, info, now_us) for info in most), len(found)


def _consumer(client: Contrail, info: ConsumerInfo, now_us: int) -> Consumer:
    config: dict[str, Any] = dict(info.config)
    filters = tuple(config.get("filter_subjects") or filter(None, [config.get("filter_subject")]))
    last = info.delivered.last_active
    oldest = min(_oldest(client, info, filters), default=None)
    return Consumer(
        name=info.name,
        filters=filters,
        pending=info.num_pending,
        ack_pending=info.num_ack_pending,
        redelivered=info.num_redelivered,
        floor_distance=sum(
            max(0, each.delivered.stream_seq - each.ack_floor.stream_seq)
            for each in info.shards or (info,)
        ),
        oldest_us=oldest,
        oldest_age_us=None if oldest is None else max(0, now_us - oldest),
        last_us=None if last is None else _us(last),
        ack_policy=str(config.get("ack_policy")),
        max_deliver=int(config.get("max_deliver", -1)),
    )


def _oldest(client: Contrail, info: ConsumerInfo, filters: tuple[str, ...]) -> Iterator[int]:
    """The times of the oldest messages that are not acknowledged, by shard and filter."""
    for each in info.shards or (info,):
        if not each.num_pending + each.num_ack_pending:
            continue
        done = each.ack_floor if each.num_ack_pending else each.delivered
        for subject in filters or (None,):
            found = client.read_range(
                info.stream,
                from_seq=done.stream_seq + 1,
                subject=subject,
                limit=1,
                shard=getattr(each, "shard", None),
            )
            for message in found.messages:
                yield _us(message.time)


def _us(time: str) -> int:
    return parse_time_ns(time) // _NS_PER_US
