"""Lots: what one pull brought, as the subscription counts and cuts it."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from contrail_common.columns.delivery_columns import DeliveryColumns
from contrail_common.model import message_size
from contrail_gateway.core.ledger import place
from contrail_link.contract import Delivery


@dataclass(frozen=True, slots=True)
class Listed:
    """Deliveries in order, at least one, as :class:`DeliveryColumns` but one by one."""

    deliveries: Sequence[Delivery]

    def __len__(self) -> int:
        return len(self.deliveries)

    @property
    def first_seq(self) -> int:
        """Stream sequence of the first."""
        return self.deliveries[0].message.seq

    @property
    def last_seq(self) -> int:
        """Stream sequence of the last."""
        return self.deliveries[-1].message.seq

    @property
    def first_consumer_seq(self) -> int:
        """Consumer sequence of the first."""
        return self.deliveries[0].consumer_seq

    @property
    def last_consumer_seq(self) -> int:
        """Consumer sequence of the last."""
        return self.deliveries[-1].consumer_seq

    @property
    def seqs(self) -> list[int]:
        """The stream sequences, as places of their shards."""
        return [_place(delivery) for delivery in self.deliveries]

    def begin_within(self, limit: int, most: int) -> tuple[int, int]:
        """How many of the first ``most`` begin within ``limit`` bytes (above 0), and their size."""
        count = size = 0
        while count < most and size < limit:
            size += _size(self.deliveries[count])
            count += 1
        return count, size

    def slice(self, start: int, stop: int) -> "Listed":
        """Those from position ``start`` up to ``stop``."""
        return Listed(self.deliveries[start:stop])

    def without(self, seqs: Container[int]) -> "Listed":
        """The others."""
        return Listed([one for one in self.deliveries if _place(one) not in seqs])


Lot = Listed | DeliveryColumns


def _place(delivery: Delivery) -> int:
    return place(delivery.message.shard or 0, delivery.message.seq)


def _size(delivery: Delivery) -> int:
    """What a message counts for credit: subject, headers and payload."""
    message = delivery.message
    return len(message.subject.encode()) + message_size(message.headers, len(message.payload))
