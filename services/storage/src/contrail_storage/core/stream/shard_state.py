"""The state of one shard of a stream, as its rows have it."""

import builtins

import msgspec

from contrail_common.model import StreamConfig


class StreamRecord(msgspec.Struct, array_like=True):
    """The state that changes only with the configuration; ``part`` is the shard, from 0."""

    config: StreamConfig
    incarnation: str
    hash_key: bytes
    created_ns: int
    version: int
    next_consumer_id: int
    part: int = 0


class Counters(msgspec.Struct, array_like=True):
    """The state that changes with every entry; ``digest`` is a CRC over all payloads ever appended.

    ``replaced`` maps a subject to a sequence: a roll-up has yet to remove its messages below that.
    From ``keep_from`` up to ``keep_to`` there may be messages that no consumer needs any more.
    """

    first_seq: int
    last_seq: int
    messages: int
    bytes: int
    last_time_ns: int
    last_id: builtins.bytes
    digest: int
    replaced: dict[str, int] = {}
    keep_from: int = 0
    keep_to: int = 0
