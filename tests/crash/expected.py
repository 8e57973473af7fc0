"""The expected state of a stream and its consumers, as far as the history determines it."""

from dataclasses import dataclass, field
from typing import Final

from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_common.subjects import matches_any
from tests.crash.rules import (
    Between,
    is_due,
    may_be_due,
    over_limits,
    pinned_for,
    replaced_by,
)

_FROM_NOW: Final = ("new", "last_per_subject")
AT_ANY_TIME: Final = Between()


@dataclass(eq=False)
class Consumer:
    """A consumer; whether messages are maybe settled depends on acknowledgements in doubt."""

    config: ConsumerConfig
    start_seq: int
    settled: set[int] = field(default_factory=set)
    maybe_settled: set[int] = field(default_factory=set)
    floor: int = 0
    delivered_seq: int = 0
    pinned: frozenset[int] = frozenset()

    def wants(self, seq: int, subject: str) -> bool:
        filters = self.config.filter_subjects
        within = seq >= self.start_seq or seq in self.pinned
        return within and (not filters or matches_any(filters, subject))


@dataclass(eq=False)
class Stream:
    """A stream: its live messages, its consumers, and when its messages were stored."""

    config: StreamConfig
    last_seq: int
    live: dict[int, PublishMessage] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    consumers: dict[str, Consumer] = field(default_factory=dict)
    times: dict[int, Between] = field(default_factory=dict)

    def add(self, seq: int, message: PublishMessage, at: Between = AT_ANY_TIME) -> None:
        for old in replaced_by(message, self.live):
            del self.live[old]
        self.last_seq = max(self.last_seq, seq)
        if message.msg_id:
            self.ids[message.msg_id] = seq
        if self.is_stored(message):
            self.live[seq] = message
            self.times[seq] = at
        self.keep_limits()

    def is_stored(self, message: PublishMessage) -> bool:
        """Whether a message is stored: an interest stream stores it only if a consumer wants it."""
        return self.config.retention != "interest" or any(
            one.wants(self.last_seq + 1, message.subject) for one in self.consumers.values()
        )

    def unneeded(self, *, surely: bool, without: frozenset[str] = frozenset()) -> set[int]:
        """Messages of an interest stream that all consumers have settled, or maybe settled."""
        if self.config.retention != "interest":
            return set()
        consumers = [one for name, one in self.consumers.items() if name not in without]

        def is_needed(seq: int, message: PublishMessage) -> bool:
            return any(
                one.wants(seq, message.subject)
                and seq not in one.settled
                and (surely or seq not in one.maybe_settled)
                for one in consumers
            )

        return {seq for seq, message in self.live.items() if not is_needed(seq, message)}

    def due(self, now_ns: int) -> set[int]:
        """Messages that must be removed by a log time."""
        return {
            seq
            for seq, message in self.live.items()
            if is_due(self.config, message, self.times[seq], now_ns)
        }

    def maybe_due(self, now_ns: int) -> set[int]:
        """Messages that may be removed at a log time."""
        return {
            seq
            for seq, message in self.live.items()
            if may_be_due(self.config, message, self.times[seq], now_ns)
        }

    def add_evicted(self, count: int, candidates: list[PublishMessage]) -> None:
        """Add messages of a request that later messages of the same request have removed."""
        if count and max(self.config.max_msgs, self.config.max_bytes) >= 0:
            fresh = [one for one in candidates if one.msg_id not in self.ids and not one.expected]
            for message in fresh[-count:]:
                self.add(self.last_seq + 1, message)

    def keep_limits(self, *, lowered: bool = False) -> None:
        for seq in over_limits(self.config, self.live, lowered=lowered):
            del self.live[seq]


def put_consumer(stream: Stream, config: ConsumerConfig) -> None:
    known = stream.consumers.get(config.name)
    if known is not None:
        known.config = config
        return
    start_seq = stream.last_seq + 1 if config.deliver_policy in _FROM_NOW else 1
    pinned = pinned_for(config, stream.live)
    stream.consumers[config.name] = Consumer(config, start_seq, pinned=pinned)
