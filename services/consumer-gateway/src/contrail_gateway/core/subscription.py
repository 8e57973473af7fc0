"""One subscription of a socket: what to ask for next, what may be sent, what it has seen."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from contrail_common.model import ConsumerInfo
from contrail_gateway.core.credit import Credit
from contrail_gateway.core.ledger import Ledger, newest_of_shards, up_to
from contrail_gateway.core.lots import Listed, Lot
from contrail_gateway.core.sharded_order import ShardedOrder

BATCH_MAX: Final = 1_000
BATCH_BYTES_MAX: Final = 384 << 10
"""A batch becomes one frame, which clients must be able to take: many stop at 1 MiB."""


@dataclass(frozen=True, slots=True)
class PullTerms:
    """What the next pull asks for; ``max_bytes`` 0 is for the next message, whatever its size."""

    batch: int
    max_bytes: int


@dataclass(slots=True, eq=False)
class Subscription:
    """``own`` is a consumer of the socket itself, ``ordered`` one that resumes by itself.

    ``cols`` tells that its client takes columns. ``next_seq`` and ``next_consumer_seq`` are where
    an ordered subscription goes on.
    """

    sid: str
    stream: str
    credit: Credit
    own: bool
    ordered: bool
    cols: bool = False
    consumer: str = ""
    leaving: bool = False
    """Nothing more is pulled."""
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
    """Consumer sequence and stream sequence in each shard, where the stream has several."""
    last_sent_ns: int = 0
    order: ShardedOrder | None = None
    """Where an ordered subscription goes on in each shard of a stream that has several."""
    ledger: Ledger = field(default_factory=Ledger)
    held_back: Lot | None = None
    """Pulled beyond the credit, because subjects count for it but not for a pull."""
    _one: bool = False

    def opened(self, info: ConsumerInfo, now_ns: int, from_seq: int = 0) -> None:
        """The consumer is there; it goes on behind what it has delivered, or at ``from_seq``."""
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
        """Ask for no more at once than the consumer allows."""
        config = info.config
        self.batch_max = min(config.max_batch or BATCH_MAX, BATCH_MAX)
        self.batch_bytes_max = min(config.max_bytes or BATCH_BYTES_MAX, BATCH_BYTES_MAX)
        self.expires_max_ns = config.max_expires_ns

    # Asking --------------------------------------------------------------------------------------
    def wanted(self) -> PullTerms | None:
        """What to pull now; None while the credit does not allow a message to begin."""
        credit = self.credit
        if not credit.open or self.held_back:
            return None
        if self._one:
            return PullTerms(1, 0)
        batch = self.batch_max if credit.msgs is None else min(credit.msgs, self.batch_max)
        limit = self.batch_bytes_max
        return PullTerms(batch, limit if credit.bytes is None else min(credit.bytes, limit))

    def too_large(self) -> None:
        """The next message is larger than the pull allowed: it is sent whole, by itself."""
        self._one = True

    # Sending -------------------------------------------------------------------------------------
    def take(self, lot: Lot | None = None) -> Lot | None:
        """What may be sent of what was held back, or else of ``lot``; the rest is held back."""
        credit = self.credit
        if lot is not None:
            self._one = False
        else:
            lot = self.held_back
        self.held_back = lot
        if lot is None or not credit.open:
            return None
        count, size = len(lot), 0
        if credit.msgs is not None:
            count = min(credit.msgs, count)
        if credit.bytes is not None:
            count, size = lot.begin_within(credit.bytes, count)
        credit.spend(count, size)
        self.held_back = lot.slice(count, len(lot)) if count < len(lot) else None
        return lot.slice(0, count)

    def sent(self, lot: Lot, now_ns: int) -> None:
        """``lot`` is on its way to the client."""
        self.last_sent_ns = now_ns
        if self.last_of_shards and isinstance(lot, Listed):
            self._sent_of_shards(lot)
        else:
            self.last_consumer_seq = lot.last_consumer_seq
            self.last_stream_seq = lot.last_seq
        if self.acks and isinstance(lot, Listed):
            self.ledger.sent(lot.seqs)

    def _sent_of_shards(self, lot: Listed) -> None:
        if self.order is not None:
            self.order.sent(lot.deliveries)
        last = self.last_of_shards
        for one in lot.deliveries:
            last[one.message.shard or 0] = one.consumer_seq, one.message.seq
        self.last_consumer_seq = sum(consumer_seq for consumer_seq, _ in last.values())
        self.last_stream_seq = max(seq for _, seq in last.values())

    def give_back(self) -> list[int]:
        """The sequences that were pulled, but will not be sent."""
        lot, self.held_back = self.held_back, None
        return lot.seqs if self.acks and isinstance(lot, Listed) else []

    def settled(self, seqs: Sequence[int]) -> None:
        """``seqs`` were acknowledged, refused or given up for good."""
        if not seqs:
            return
        if self.ack_all:
            for newest in newest_of_shards(seqs):
                self.ledger.settled_up_to(newest)
        else:
            self.ledger.settled(seqs)
        if isinstance(self.held_back, Listed):
            # Held back is what came again: settled under an earlier attempt, nobody wants it now.
            if not self.ack_all:
                self.held_back = self.held_back.without(frozenset(seqs)) or None
                return
            for newest in newest_of_shards(seqs):
                if isinstance(self.held_back, Listed):
                    self.held_back = self.held_back.without(up_to(newest)) or None

    # Order ---------------------------------------------------------------------------------------
    def in_order(self, lot: Lot) -> bool:
        """Whether ``lot`` follows what came before: nobody else took any."""
        expected = self.next_consumer_seq
        return (
            lot.first_consumer_seq == expected
            and lot.last_consumer_seq == expected + len(lot) - 1
            and lot.first_seq >= self.next_seq
        )

    def leaves_a_hole(self, lot: Lot) -> bool:
        """Whether stream sequences before ``lot`` were passed over."""
        return lot.first_seq > self.next_seq

    def advance(self, lot: Lot) -> None:
        """``lot``, which is in order, was taken over."""
        self.next_consumer_seq = lot.last_consumer_seq + 1
        self.next_seq = lot.last_seq + 1

    def lost_below(self, first_kept_seq: int, before_seq: int) -> tuple[int, int] | None:
        """The sequences (closed range) that went away before they could be sent.

        ``first_kept_seq`` is the stream's first, ``before_seq`` the one that is sent next. The
        subscription goes on behind the range.
        """
        first, last = self.next_seq, min(first_kept_seq, before_seq) - 1
        if last < first:
            return None
        self.next_seq = last + 1
        return first, last

    def passed(self, seq: int) -> None:
        """Up to ``seq`` the stream holds nothing more for this subscription."""
        self.next_seq = max(self.next_seq, seq + 1)
