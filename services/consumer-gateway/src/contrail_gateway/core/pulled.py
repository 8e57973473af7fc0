"""The messages of one pull, which the subscription counts and divides."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from contrail_common.columns.blocks import message_size
from contrail_common.columns.delivery_columns import DeliveryColumns
from contrail_gateway.core.ledger import shard_seq
from contrail_link.contract.consume import Delivery


@dataclass(frozen=True, slots=True)
class Listed:
    """At least one delivery, in order; the same interface as :class:`DeliveryColumns`."""

    deliveries: Sequence[Delivery]

    def __len__(self) -> int:
        return len(self.deliveries)

    @property
    def first_seq(self) -> int:
        """Stream sequence of the first delivery."""
        return self.deliveries[0].message.seq

    @property
    def last_seq(self) -> int:
        """Stream sequence of the last delivery."""
        return self.deliveries[-1].message.seq

    @property
    def first_consumer_seq(self) -> int:
        """Consumer sequence of the first delivery."""
        return self.deliveries[0].consumer_seq

    @property
    def last_consumer_seq(self) -> int:
        """Consumer sequence of the last delivery."""
        return self.deliveries[-1].consumer_seq

    @property
    def seqs(self) -> list[int]:
        """The stream sequences with their shards."""
        return [_shard_seq(delivery) for delivery in self.deliveries]

    def begin_within(self, limit: int, most: int) -> tuple[int, int]:
        """Return how many of the first ``most`` begin before ``limit`` bytes, and their size.

        ``limit`` is above 0, so at least one begins.
        """
        count = size = 0
        # A message that begins within the limit is taken whole, as credit is defined.
        while count < most and size < limit:
            size += _size(self.deliveries[count])
            count += 1
        return count, size

    def slice(self, start: int, stop: int) -> "Listed":
        """Return the deliveries from ``start`` up to, but without, ``stop``."""
        return Listed(self.deliveries[start:stop])

    def without(self, seqs: Container[int]) -> "Listed":
        """Return the deliveries whose shard sequences are not in ``seqs``."""
        return Listed([one for one in self.deliveries if _shard_seq(one) not in seqs])


Pulled = Listed | DeliveryColumns


def _shard_seq(delivery: Delivery) -> int:
    return shard_seq(delivery.message.shard or 0, delivery.message.seq)


def _size(delivery: Delivery) -> int:
    """Return the bytes that a message costs of the credit: subject, headers and payload."""
    message = delivery.message
    return len(message.subject.encode()) + message_size(message.headers, len(message.payload))
