"""Where an ordered subscription stands in each shard of its stream, and what it missed there.

Order is kept within a shard. Losses are told by shard too, and a cursor says where all of them go
on, for a client that comes back.
"""

from collections.abc import Iterator, Sequence

from contrail_common.cursors import Cursor
from contrail_common.model import ConsumerInfo, StreamInfo
from contrail_common.timeunits import INT64_MAX
from contrail_link.contract import Delivery


class ShardedOrder:
    """The places of one subscription: lists with an entry for each shard of the stream."""

    def __init__(self, stream: StreamInfo, consumer: ConsumerInfo, begin: Cursor | None) -> None:
        """It goes on behind what ``consumer`` has delivered, or at ``begin``."""
        self._incarnation = stream.incarnation
        delivered = [one.delivered.stream_seq + 1 for one in consumer.shards]
        self._next_seqs = list(begin.next_seqs) if begin is not None else delivered
        self._sent_to = list(self._next_seqs)
        self._states = stream.shards
        self._covered = [0] * len(self._next_seqs)
        self._before = [INT64_MAX] * len(self._next_seqs)
        self._consumer_seqs: list[int] = []
        self.resumed(consumer)

    def resumed(self, consumer: ConsumerInfo) -> None:
        """``consumer`` delivers from now on."""
        self._consumer_seqs = [one.delivered.consumer_seq + 1 for one in consumer.shards]
        self._covered = [0] * len(self._next_seqs)

    # Order ---------------------------------------------------------------------------------------
    def in_order(self, deliveries: Sequence[Delivery]) -> bool:
        """Whether these follow what came before in each shard: nobody else took any."""
        next_seqs, consumer_seqs = list(self._next_seqs), list(self._consumer_seqs)
        for one in deliveries:
            shard = one.message.shard or 0
            if one.consumer_seq != consumer_seqs[shard] or one.message.seq < next_seqs[shard]:
                return False
            consumer_seqs[shard] += 1
            next_seqs[shard] = one.message.seq + 1
        return True

    def leaves_a_hole(self, deliveries: Sequence[Delivery]) -> bool:
        """Whether sequences before the first of some shard were passed over."""
        return any(seq > self._next_seqs[shard] for shard, seq in _first_seqs(deliveries).items())

    def advance(self, deliveries: Sequence[Delivery]) -> None:
        """These, which are in order, were taken over."""
        for one in deliveries:
            shard = one.message.shard or 0
            self._next_seqs[shard] = one.message.seq + 1
            self._consumer_seqs[shard] = one.consumer_seq + 1

    # Losses --------------------------------------------------------------------------------------
    def look_at(self, stream: StreamInfo) -> None:
        """The stream as it is now."""
        self._states = stream.shards

    def stop_before(self, deliveries: Sequence[Delivery]) -> None:
        """Only what lies before these is to be looked for next."""
        first = _first_seqs(deliveries)
        self._before = [first.get(shard, 0) for shard in range(len(self._next_seqs))]

    def lost(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Shard and sequences (closed range) of what went away before it could be sent.

        The subscription goes on behind each.
        """
        before, self._before = self._before, [INT64_MAX] * len(self._next_seqs)
        for shard, state in enumerate(self._states):
            first, last = self._next_seqs[shard], min(state.first_seq, before[shard]) - 1
            if last >= first:
                self._next_seqs[shard] = last + 1
                yield shard, (first, last)

    def passed(self) -> None:
        """Up to what :meth:`cover` noted the stream holds nothing more for this subscription."""
        for shard, seq in enumerate(self._covered):
            self._next_seqs[shard] = max(self._next_seqs[shard], seq + 1)

    def cover(self) -> None:
        """The next pull that finds nothing has looked at all that the stream holds now."""
        self._covered = [state.last_seq for state in self._states]

    # Going on ------------------------------------------------------------------------------------
    def sent(self, deliveries: Sequence[Delivery]) -> None:
        """These are on their way to the client."""
        for one in deliveries:
            self._sent_to[one.message.shard or 0] = one.message.seq + 1

    def sent_to(self) -> str:
        """The cursor behind all that was sent."""
        return Cursor(self._incarnation, self._sent_to).text()

    def taken_to(self) -> str:
        """The cursor behind all that was taken over, sent or not."""
        return Cursor(self._incarnation, self._next_seqs).text()


def _first_seqs(deliveries: Sequence[Delivery]) -> dict[int, int]:
    """The first sequence of each shard."""
    first: dict[int, int] = {}
    for one in deliveries:
        first.setdefault(one.message.shard or 0, one.message.seq)
    return first
