"""The position of an ordered subscription in each shard of its stream, and its losses there.

Order is kept, and losses are reported, within a shard. A cursor has the positions in all shards,
for a client that reconnects.
"""

from collections.abc import Iterator, Sequence

from contrail_common.cursors import Cursor
from contrail_common.model import ConsumerInfo, StreamInfo
from contrail_common.timeunits import INT64_MAX
from contrail_link.contract.consume import Delivery


class ShardedOrder:
    """The positions of one subscription. Every list has one entry for each shard, by index."""

    def __init__(self, stream: StreamInfo, consumer: ConsumerInfo, begin: Cursor | None) -> None:
        """Begin at ``begin``, or after the last delivery of ``consumer`` if it is None."""
        # For cursors: they are only valid for this incarnation of the stream.
        self._incarnation = stream.incarnation
        delivered = [one.delivered.stream_seq + 1 for one in consumer.shards]
        # The lowest sequences that the subscription has not taken over. They never decrease.
        self._next_seqs = list(begin.next_seqs) if begin is not None else delivered
        # The same for what was sent: `_sent_to` <= `_next_seqs`, as messages may be held back.
        self._sent_to = list(self._next_seqs)
        # The state of each shard at the last look.
        self._states = stream.shards
        # The last sequences at the latest empty pull; see `cover` and `passed`.
        self._covered = [0] * len(self._next_seqs)
        # `lost` only looks below these sequences, once.
        self._before = [INT64_MAX] * len(self._next_seqs)
        # The consumer sequences that the next deliveries must have.
        self._consumer_seqs: list[int] = []
        self.resumed(consumer)

    def resumed(self, consumer: ConsumerInfo) -> None:
        """Continue with ``consumer``, which has replaced a lost one."""
        self._consumer_seqs = [one.delivered.consumer_seq + 1 for one in consumer.shards]
        self._covered = [0] * len(self._next_seqs)

    def in_order(self, deliveries: Sequence[Delivery]) -> bool:
        """Return True if these continue the sequences of each shard.

        If they do not, another client has taken messages of the consumer.
        """
        next_seqs, consumer_seqs = list(self._next_seqs), list(self._consumer_seqs)
        for one in deliveries:
            shard = one.message.shard or 0
            if one.consumer_seq != consumer_seqs[shard] or one.message.seq < next_seqs[shard]:
                return False
            consumer_seqs[shard] += 1
            next_seqs[shard] = one.message.seq + 1
        return True

    def leaves_a_hole(self, deliveries: Sequence[Delivery]) -> bool:
        """Return True if in some shard there are sequences between the last message and these."""
        return any(seq > self._next_seqs[shard] for shard, seq in _first_seqs(deliveries).items())

    def advance(self, deliveries: Sequence[Delivery]) -> None:
        """Move the positions to the end of these deliveries, which must be in order."""
        for one in deliveries:
            shard = one.message.shard or 0
            self._next_seqs[shard] = one.message.seq + 1
            self._consumer_seqs[shard] = one.consumer_seq + 1

    def look_at(self, stream: StreamInfo) -> None:
        """Keep the current state of the stream's shards."""
        self._states = stream.shards

    def stop_before(self, deliveries: Sequence[Delivery]) -> None:
        """Let the next call of :meth:`lost` look only before these deliveries."""
        first = _first_seqs(deliveries)
        self._before = [first.get(shard, 0) for shard in range(len(self._next_seqs))]

    def lost(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the shard and range (closed) of messages that left the stream before being sent.

        The position in the shard moves to the end of the range.
        """
        # `stop_before` applies to one call only.
        before, self._before = self._before, [INT64_MAX] * len(self._next_seqs)
        for shard, state in enumerate(self._states):
            first, last = self._next_seqs[shard], min(state.first_seq, before[shard]) - 1
            if last >= first:
                self._next_seqs[shard] = last + 1
                yield shard, (first, last)

    def passed(self) -> None:
        """Move the positions to those of :meth:`cover`: nothing is left before them."""
        for shard, seq in enumerate(self._covered):
            self._next_seqs[shard] = max(self._next_seqs[shard], seq + 1)

    def cover(self) -> None:
        """Note the current end of the stream, which the next empty pull will have looked at."""
        self._covered = [state.last_seq for state in self._states]

    def sent(self, deliveries: Sequence[Delivery]) -> None:
        """Record that these were sent to the client."""
        for one in deliveries:
            self._sent_to[one.message.shard or 0] = one.message.seq + 1

    def sent_to(self) -> str:
        """Return the cursor after all messages that were sent."""
        return Cursor(self._incarnation, self._sent_to).text()

    def taken_to(self) -> str:
        """Return the cursor after all messages that were taken over, sent or not."""
        return Cursor(self._incarnation, self._next_seqs).text()


def _first_seqs(deliveries: Sequence[Delivery]) -> dict[int, int]:
    """Return the first sequence of each shard."""
    first: dict[int, int] = {}
    for one in deliveries:
        first.setdefault(one.message.shard or 0, one.message.seq)
    return first
