"""A plain model of the rules by which a stream removes messages: limits, roll-ups, times.

Times are bounds, because the exact time at which a message was stored may be unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from contrail_common import model
from contrail_common.columns.blocks import message_size
from contrail_common.model import (
    TTL_NEVER,
    ConsumerConfig,
    PublishMessage,
    StoredMessage,
    StreamConfig,
)
from contrail_common.subjects import matches, matches_any

SLACK_NS: Final = 30_000_000_000
"""Longer than any life takes, and shorter than any deadline or jump of the clock in a script."""

Live = Mapping[int, PublishMessage]


@dataclass(frozen=True)
class Between:
    """The range of log time in which a message was stored, both ends included."""

    low_ns: int = 0
    high_ns: int = 0


def replaced_by(message: PublishMessage, live: Live) -> set[int]:
    """Earlier messages that a roll-up removes."""
    if message.rollup == "all":
        return set(live)
    return {seq for seq, one in live.items() if message.rollup and one.subject == message.subject}


def over_limits(config: StreamConfig, live: Live, *, lowered: bool = False) -> set[int]:
    """Messages that the limits remove: the oldest of each subject, then the oldest of all.

    After limits were `lowered`, the oldest of all go first.
    """
    steps = [_over_subject_limit, _over_stream_limits]
    gone: set[int] = set()
    for step in reversed(steps) if lowered else steps:
        gone |= step(config, {seq: one for seq, one in live.items() if seq not in gone})
    return gone


def _over_subject_limit(config: StreamConfig, live: Live) -> set[int]:
    most = config.max_msgs_per_subject
    if most <= 0:
        return set()
    by_subject: dict[str, list[int]] = {}
    for seq in sorted(live):
        by_subject.setdefault(live[seq].subject, []).append(seq)
    return {seq for own in by_subject.values() for seq in own[:-most]}


def _over_stream_limits(config: StreamConfig, live: Live) -> set[int]:
    if config.discard == "new":
        return set()
    size = sum(message_size(one.headers, len(one.payload)) for one in live.values())
    gone: set[int] = set()
    for seq in sorted(live):
        over_count = 0 <= config.max_msgs < len(live) - len(gone)
        if not over_count and not 0 <= config.max_bytes < size:
            break
        gone.add(seq)
        size -= message_size(live[seq].headers, len(live[seq].payload))
    return gone


def purged(live: Live, subject: str, up_to_seq: int, keep: int) -> set[int]:
    """Messages that a purge removes."""
    own = sorted(seq for seq, one in live.items() if not subject or matches(subject, one.subject))
    if keep:
        return set(own[:-keep])
    return {seq for seq in own if not up_to_seq or seq < up_to_seq}


def time_to_live(config: StreamConfig, message: PublishMessage) -> int | None:
    """Nanoseconds after which a message is removed; None means never."""
    if message.ttl_ns == TTL_NEVER:
        return None
    bounds = [one for one in (message.ttl_ns, config.max_age_ns) if one]
    return min(bounds, default=None)


def may_be_due(config: StreamConfig, message: PublishMessage, at: Between, now_ns: int) -> bool:
    """Whether a message may be removed at `now_ns`, or a little later."""
    ttl_ns = time_to_live(config, message)
    return not config.sealed and ttl_ns is not None and at.low_ns + ttl_ns <= now_ns + SLACK_NS


def is_due(config: StreamConfig, message: PublishMessage, at: Between, now_ns: int) -> bool:
    """Whether a message must be removed by `now_ns`."""
    ttl_ns = time_to_live(config, message)
    return not config.sealed and ttl_ns is not None and at.high_ns + ttl_ns <= now_ns


def as_marker(config: StreamConfig, stored: StoredMessage) -> PublishMessage | None:
    """A marker as if it had been published; None if the message is not a marker."""
    ttl_ns = config.subject_delete_marker_ttl_ns
    if not ttl_ns or stored.payload or model.MARKER_REASON not in (stored.headers or {}):
        return None
    return PublishMessage(stored.subject, stored.headers, b"", ttl_ns=ttl_ns)


def pinned_for(config: ConsumerConfig, live: Live) -> frozenset[int]:
    """The first messages of a consumer that starts with the last message of each subject."""
    if config.deliver_policy != "last_per_subject":
        return frozenset()
    filters = config.filter_subjects
    last = {
        live[seq].subject: seq
        for seq in sorted(live)
        if not filters or matches_any(filters, live[seq].subject)
    }
    return frozenset(last.values())
