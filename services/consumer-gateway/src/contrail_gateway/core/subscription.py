"""The state of one subscription: its next pull, its credit, and its position in the stream."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from contrail_common.model import AckKind, ConsumerInfo
from contrail_gateway.core.credit import Credit
from contrail_gateway.core.ledger import Ledger, newest_of_shards, up_to
from contrail_gateway.core.pulled import Listed, Pulled
from contrail_gateway.core.sharded_order import ShardedOrder

BATCH_MAX: Final = 1_000
BATCH_BYTES_MAX: Final = 384 << 10
"""Bytes of a pull. A batch becomes one frame, and many clients refuse frames above 1 MiB."""


@dataclass(frozen=True, slots=True)
class PullTerms:
    """The limits of the next pull. If ``max_bytes`` is 0, the message may have any size."""

    batch: int
    max_bytes: int


@dataclass(slots=True, eq=False)
class Subscription:
    """What the server knows about one subscription.

    ``own``: the socket created the consumer. ``ordered``: the subscription resumes by itself after
    a loss; ``next_seq`` and ``next_consumer_seq`` are then the next sequences that it expects.
    ``cols``: the client accepts columns.
    """

    sid: str
    stream: str
    credit: Credit
    own: bool
    ordered: bool
    cols: bool = False
    consumer: str = ""
    leaving: bool = False
    """True once the subscription has stopped pulling."""
    ack_all: bool = False
    acks: bool = True
    ack_wait_ns: int = 0
    batch_max: int = BATCH_MAX
    batch_bytes_max: int = BATCH_BYTES_MAX
    expires_max_ns: int = 0
    next_seq: int = 0
    next_consumer_seq: int = 0
    last_consumer_seq: int = 0
    last_stream_seq: int = 0
    last_of_shards: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Last consumer sequence and stream sequence sent, by shard; empty for a single shard."""
    last_sent_ns: int = 0
    order: ShardedOrder | None = None
    """Position of an ordered subscription in each shard; None for a stream with one shard."""
    ledger: Ledger = field(default_factory=Ledger)
    held_back: Pulled | None = None
    """Messages that were pulled beyond the credit, and are sent first when there is credit again.

    This happens because subjects count against the credit, but not against the limit of a pull,
    and because a frame of messages with many headers has no more than one step can make.
    """
    _one: bool = False
    """True if the next pull is for one message of any size, as it was too large for a batch."""

    def opened(self, info: ConsumerInfo, now_ns: int, from_seq: int = 0) -> None:
        """Take over the state of a consumer.

        Its next message is the one after its last delivery, or ``from_seq`` if that is not 0.
        """
        config = info.config
        self.consumer = config.name
        self.acks = config.ack_policy != "none"
        self.ack_all = config.ack_policy == "all"
        self.ack_wait_ns = config.ack_wait_ns
        self.limited(info)
        self.last_consumer_seq = info.delivered.consumer_seq
        self.last_stream_seq = info.delivered.stream_seq
        self.last_of_shards = {
            one.shard: (one.delivered.consumer_seq, one.delivered.stream_seq) for one in info.shards
        }
        self.next_consumer_seq = info.delivered.consumer_seq + 1
        self.next_seq = from_seq or info.delivered.stream_seq + 1
        self.last_sent_ns = now_ns

    def limited(self, info: ConsumerInfo) -> None:
        """Limit pulls to what the consumer allows."""
        config = info.config
        self.batch_max = min(config.max_batch or BATCH_MAX, BATCH_MAX)
        self.batch_bytes_max = min(config.max_bytes or BATCH_BYTES_MAX, BATCH_BYTES_MAX)
        self.expires_max_ns = config.max_expires_ns

    # Pulling -------------------------------------------------------------------------------------
    def wanted(self) -> PullTerms | None:
        """Return the terms of the next pull, or None if there is no credit for a message."""
        credit = self.credit
        # Messages that are held back come first; until then, leave new ones to other subscribers.
        if not credit.open or self.held_back:
            return None
        if self._one:
            return PullTerms(1, 0)
        batch = self.batch_max if credit.msgs is None else min(credit.msgs, self.batch_max)
        limit = self.batch_bytes_max
        return PullTerms(batch, limit if credit.bytes is None else min(credit.bytes, limit))

    def too_large(self) -> None:
        """Let the next pull ask for a single message of any size."""
        self._one = True

    # Sending -------------------------------------------------------------------------------------
    @property
    def may_send(self) -> bool:
        """Whether there is credit for messages that are held back."""
        return self.held_back is not None and self.credit.open

    def take(self, pulled: Pulled | None = None) -> Pulled | None:
        """Spend credit on ``pulled``, or on the held-back messages if there is no ``pulled``.

        Returns the messages to send now, and holds the others back.
        """
        credit = self.credit
        if pulled is not None:
            self._one = False
        else:
            pulled = self.held_back
        self.held_back = pulled
        if pulled is None or not credit.open:
            return None
        count, size = len(pulled), 0
        if credit.msgs is not None:
            count = min(credit.msgs, count)
        if not (isinstance(pulled, Listed) or self.cols or pulled.made_at_once):
            count = min(pulled.steps()[0], count)  # it takes a step to make a frame of these
        if credit.bytes is not None:
            count, size = pulled.begin_within(credit.bytes, count)
        credit.spend(count, size)
        self.held_back = pulled.slice(count, len(pulled)) if count < len(pulled) else None
        return pulled.slice(0, count)

    def sent(self, pulled: Pulled, now_ns: int) -> None:
        """Record that ``pulled`` was sent to the client."""
        self.last_sent_ns = now_ns
        if self.last_of_shards and isinstance(pulled, Listed):
            self._sent_of_shards(pulled)
        else:
            self.last_consumer_seq = pulled.last_consumer_seq
            self.last_stream_seq = pulled.last_seq
        if self.acks and isinstance(pulled, Listed):
            self.ledger.sent(pulled.seqs)

    def _sent_of_shards(self, pulled: Listed) -> None:
        if self.order is not None:
            self.order.sent(pulled.deliveries)
        last = self.last_of_shards
        for one in pulled.deliveries:
            last[one.message.shard or 0] = one.consumer_seq, one.message.seq
        self.last_consumer_seq = sum(consumer_seq for consumer_seq, _ in last.values())
        self.last_stream_seq = max(seq for _, seq in last.values())

    def give_back(self) -> list[int]:
        """Drop held-back messages, and return their sequences if they have to be acknowledged."""
        pulled, self.held_back = self.held_back, None
        return pulled.seqs if self.acks and isinstance(pulled, Listed) else []

    def settled(self, seqs: Sequence[int], kind: AckKind = "ack") -> None:
        """Forget messages whose ``ack`` or ``term`` storage has accepted.

        With ``ack_all``, an ``ack`` makes it forget all earlier messages of the same shards too.
        """
        if not seqs:
            return
        # A `term` says nothing about earlier messages: the client must still settle them.
        earlier_too = self.ack_all and kind == "ack"
        if earlier_too:
            for newest in newest_of_shards(seqs):
                self.ledger.settled_up_to(newest)
        else:
            self.ledger.settled(seqs)
        if isinstance(self.held_back, Listed):
            # A held-back message can be a redelivery. If the client has just settled an earlier
            # delivery of it, there is no need to send it again.
            if not earlier_too:
                self.held_back = self.held_back.without(frozenset(seqs)) or None
                return
            for newest in newest_of_shards(seqs):
                if isinstance(self.held_back, Listed):
                    self.held_back = self.held_back.without(up_to(newest)) or None

    def returned(self, seqs: Sequence[int], sending: int) -> None:
        """Forget deliveries whose nak storage has accepted; ``sending`` is the last before the nak.

        A nak brings its messages back, maybe before it is answered. What was sent again since then,
        or is held back, is a delivery that the client has yet to settle.
        """
        self.ledger.returned(seqs, sending)

    # Order ---------------------------------------------------------------------------------------
    def in_order(self, pulled: Pulled) -> bool:
        """Return True if ``pulled`` continues the sequences, so no other client took a message."""
        expected = self.next_consumer_seq
        return (
            pulled.first_consumer_seq == expected
            and pulled.last_consumer_seq == expected + len(pulled) - 1
            and pulled.first_seq >= self.next_seq
        )

    def leaves_a_hole(self, pulled: Pulled) -> bool:
        """Return True if there are stream sequences between the last message and ``pulled``."""
        return pulled.first_seq > self.next_seq

    def advance(self, pulled: Pulled) -> None:
        """Move the position to the end of ``pulled``, which must be in order."""
        self.next_consumer_seq = pulled.last_consumer_seq + 1
        self.next_seq = pulled.last_seq + 1

    def lost_below(self, first_kept_seq: int, before_seq: int) -> tuple[int, int] | None:
        """Return the sequences (closed range) that left the stream before they were sent.

        ``first_kept_seq`` is the first sequence of the stream, ``before_seq`` the next one to
        send. The position moves to the end of the range.
        """
        first, last = self.next_seq, min(first_kept_seq, before_seq) - 1
        if last < first:
            return None
        self.next_seq = last + 1
        return first, last

    def passed(self, seq: int) -> None:
        """Move the position after ``seq``: nothing up to it is left for this subscription."""
        self.next_seq = max(self.next_seq, seq + 1)
