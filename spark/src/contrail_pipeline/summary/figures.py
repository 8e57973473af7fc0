"""The figures of a summary: the JSON document, from which the report and the tables are made.

Times are microseconds since 1970 in names that end with `_us`, and sizes are bytes of payloads.
"""

from typing import Any

import msgspec

from contrail_pipeline.bounds import Bounds


class Slice(msgspec.Struct, frozen=True):
    """The messages of a part of the time; `first_us` and `last_us` are those of its messages."""

    start_us: int
    messages: int
    bytes: int
    first_us: int
    last_us: int


class Second(msgspec.Struct, frozen=True):
    """The messages of one second."""

    start_us: int
    messages: int
    bytes: int


class Timeline(msgspec.Struct, frozen=True):
    """The slices that have messages, each `width_us` long, and the busiest second."""

    width_us: int
    slices: tuple[Slice, ...]
    busiest: Second


class Percentiles(msgspec.Struct, frozen=True):
    """Values of which 50, 90 and 99 % are at most as large, and the largest."""

    p50: int
    p90: int
    p99: int
    max: int


class Bin(msgspec.Struct, frozen=True):
    """The number of values from `low` (inclusive) to `high` (exclusive; None for no limit)."""

    low: int
    high: int | None
    count: int


class Spread(msgspec.Struct, frozen=True):
    """The distribution of a value over `count` messages or pairs of messages."""

    count: int
    min: int
    mean: float
    percentiles: Percentiles
    bins: tuple[Bin, ...]


class Subject(msgspec.Struct, frozen=True):
    """The messages of one subject; `gaps_us` is the time between them, None for one message."""

    subject: str
    messages: int
    bytes: int
    first_us: int
    last_us: int
    gaps_us: Percentiles | None = None


class Pattern(msgspec.Struct, frozen=True):
    """The messages of all subjects that match a filter and have as many tokens."""

    pattern: str
    subjects: int
    messages: int
    bytes: int


class Shard(msgspec.Struct, frozen=True):
    """The messages of one shard that were read."""

    shard: int
    messages: int
    bytes: int
    first_seq: int
    last_seq: int


class Header(msgspec.Struct, frozen=True):
    """The number of messages with a header of this name."""

    name: str
    messages: int


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """The backlog of a consumer when the summary began."""

    name: str
    filters: tuple[str, ...]
    pending: int
    """Messages that match and have not been delivered yet."""
    ack_pending: int
    """Messages that are delivered and not acknowledged."""
    redelivered: int
    """Those of them that were delivered more than once."""
    floor_distance: int
    """Sequences from the last one below which all is acknowledged to the last delivered one."""
    oldest_us: int | None
    """The time of the oldest message that is not acknowledged; None if there is none."""
    oldest_age_us: int | None
    """The age of that message."""
    last_us: int | None
    """The time of the last delivery; None if there was none."""
    ack_policy: str
    """The policy that says what an acknowledgement covers."""
    max_deliver: int
    """The limit of deliveries of one message; -1 for none."""

    @property
    def behind(self) -> int:
        """Messages that are not done: to be delivered, or to be acknowledged."""
        return self.pending + self.ack_pending


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of the messages that were read; without any, all parts are empty or None."""

    messages: int = 0
    bytes: int = 0
    first_us: int | None = None
    """The time of the oldest message."""
    last_us: int | None = None
    """The time of the newest message."""
    subject_count: int = 0
    shards: tuple[Shard, ...] = ()
    """Only shards that have messages in the range."""
    timeline: Timeline | None = None
    sizes: Spread | None = None
    gaps_us: Spread | None = None
    """The times between each message and the next one of the stream; None for one message."""
    subjects: tuple[Subject, ...] = ()
    """The subjects with most messages."""
    largest: tuple[Subject, ...] = ()
    """The subjects with most bytes."""
    patterns: tuple[Pattern, ...] = ()
    """Subjects in groups; empty if all of them are in `subjects`."""
    headers: tuple[Header, ...] = ()
    """The headers that most messages have."""
    header_count: int = 0
    """The number of different names of headers."""
    with_headers: int = 0
    """Messages that have any header."""
    distinct_payloads: int = 0
    """About so many payloads are different, within 2 %."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The whole document."""

    stream: str
    made_us: int
    bounds: Bounds
    config: dict[str, Any]
    state: dict[str, Any]
    """The state of the whole stream when the summary began, as the server tells it."""
    content: Content
    consumers: tuple[Consumer, ...]
    """The consumers that are most behind."""
    consumer_count: int
