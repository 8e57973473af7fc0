"""One subscription of a socket: what to ask for next, what may be sent, what it has seen."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from contrail_common.link import Delivery
from contrail_common.model import ConsumerInfo, message_size
from contrail_gateway.core.credit import Credit
from contrail_gateway.core.ledger import Ledger

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

    ``next_seq`` and ``next_consumer_seq`` are where an ordered subscription goes on.
    """

    sid: str
    stream: str
    credit: Credit
    own: bool
    ordered: bool
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
    last_sent_ns: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    held_back: deque[Delivery] = field(default_factory=deque)
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
    def take(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """What may be sent of what was held back and of ``deliveries``; the rest is held back."""
        if deliveries:
            self._one = False
        waiting = self.held_back
        waiting.extend(deliveries)
        credit = self.credit
        if credit.bytes is None:
            # Nobody counts bytes, and messages need not be counted one by one.
            count = len(waiting) if credit.msgs is None else min(credit.msgs, len(waiting))
            credit.spend(count, 0)
            return [waiting.popleft() for _ in range(count)]
        taken: list[Delivery] = []
        while waiting and credit.open:
            delivery = waiting.popleft()
            credit.spend(1, _size(delivery))
            taken.append(delivery)
        return taken

    def sent(self, deliveries: Sequence[Delivery], now_ns: int) -> None:
        """``deliveries`` (at least one) are on their way to the client."""
        last = deliveries[-1]
        self.last_sent_ns = now_ns
        self.last_consumer_seq = last.consumer_seq
        self.last_stream_seq = last.message.seq
        if self.acks:
            self.ledger.sent([delivery.message.seq for delivery in deliveries])

    def give_back(self) -> list[int]:
        """The sequences that were pulled, but will not be sent."""
        seqs = [delivery.message.seq for delivery in self.held_back] if self.acks else []
        self.held_back.clear()
        return seqs

    def settled(self, seqs: Sequence[int]) -> None:
        """``seqs`` were acknowledged, refused or given up for good."""
        if self.ack_all and seqs:
            self.ledger.settled_up_to(max(seqs))
        else:
            self.ledger.settled(seqs)

    # Order ---------------------------------------------------------------------------------------
    def in_order(self, deliveries: Sequence[Delivery]) -> bool:
        """Whether ``deliveries`` (at least one) follow what came before: nobody else took any."""
        first, last = deliveries[0], deliveries[-1]
        expected = self.next_consumer_seq
        return (
            first.consumer_seq == expected
            and last.consumer_seq == expected + len(deliveries) - 1
            and first.message.seq >= self.next_seq
        )

    def leaves_a_hole(self, deliveries: Sequence[Delivery]) -> bool:
        """Whether stream sequences before ``deliveries`` (at least one) were passed over."""
        return deliveries[0].message.seq > self.next_seq

    def advance(self, deliveries: Sequence[Delivery]) -> None:
        """``deliveries`` (at least one, in order) were taken over."""
        last = deliveries[-1]
        self.next_consumer_seq = last.consumer_seq + 1
        self.next_seq = last.message.seq + 1

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


def _size(delivery: Delivery) -> int:
    """What a message counts for credit: subject, headers and payload."""
    message = delivery.message
    return len(message.subject.encode()) + message_size(message.headers, len(message.payload))
