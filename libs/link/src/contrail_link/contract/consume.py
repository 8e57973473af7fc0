"""Consumers: their configuration, pulls and acknowledgements."""

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from contrail_common.columns.delivery_columns import DeliveryColumns
from contrail_common.model import AckKind, ConsumerConfig, ConsumerInfo, StoredMessage
from contrail_link.contract.remote import REFUSE, REPEAT, UNKNOWN, leader_of, remote
from contrail_link.contract.streams import CreateMode, Page


class PullRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A pull: up to ``batch`` messages, waiting at most ``expires_ns`` for the first.

    ``columns`` asks for columns, which the result has unless a message is delivered again or the
    stream has several shards.
    """

    stream: str
    consumer: str
    batch: int = 1
    expires_ns: int = 0
    max_bytes: int = 0
    no_wait: bool = False
    columns: bool = False


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """One delivered message and its counters; ``num_pending`` counts the messages after it."""

    message: StoredMessage
    consumer_seq: int
    num_delivered: int
    num_pending: int


def in_deliveries(columns: DeliveryColumns) -> list[Delivery]:
    """Return the deliveries of columns as a list."""
    consumer_seq = columns.first_consumer_seq
    pending = columns.num_pending + len(columns) - 1
    return [
        Delivery(message, consumer_seq + at, 1, pending - at)
        for at, message in enumerate(columns.messages())
    ]


class PullResult(msgspec.Struct, frozen=True):
    """Deliveries of one pull; ``shard_id``, ``consumer_id`` and ``epoch`` go into the ack tokens.

    ``columns`` replaces ``deliveries`` if the pull asked for columns and they are possible.
    If the stream has several shards, ``addresses`` has these three values for each of them.
    """

    deliveries: list[Delivery]
    num_pending: int
    shard_id: int = msgspec.field(name="shard")
    consumer_id: int
    epoch: int
    columns: DeliveryColumns | None = None
    addresses: dict[int, tuple[int, int, int]] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no message came in time."""
        return not self.deliveries and self.columns is None

    def address(self, delivery: Delivery) -> tuple[int, int, int]:
        """Return shard id, consumer id and epoch of one of the deliveries."""
        if self.addresses is None or delivery.message.shard is None:
            return self.shard_id, self.consumer_id, self.epoch
        return self.addresses[delivery.message.shard]


class AckItem(msgspec.Struct, frozen=True, gc=False):
    """An acknowledgement of ``seqs``, addressed by the contents of their ack tokens."""

    shard_id: int = msgspec.field(name="shard")
    consumer_id: int
    epoch: int
    seqs: list[int]
    kind: AckKind
    delay_ns: int = 0
    reason: str = ""


class AckResult(msgspec.Struct, frozen=True, gc=False):
    """Outcome of one acknowledgement; ``code`` 0 is success."""

    code: int = 0
    detail: str = ""


class ConsumerHold(Protocol):
    """Something that is held open: an iterator without items that can be closed at any time."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Return itself; the iteration ends when there is nothing left to hold."""
        ...

    async def aclose(self) -> None:
        """Release it; a second call does nothing."""
        ...


class ConsumeLink(Protocol):
    """Consumers: their configuration, pulls and acknowledgements."""

    @remote(16, UNKNOWN, to=leader_of("stream"))
    async def put_consumer(
        self,
        stream: str,
        config: ConsumerConfig,
        mode: CreateMode,
        if_match: int | None,
        if_none: bool,
    ) -> tuple[ConsumerInfo, bool]:
        """Create, find or update a consumer of ``stream``, as ``put_stream`` does for streams."""
        ...

    @remote(17, REPEAT, to=leader_of("stream"))
    async def consumer_info(self, stream: str, consumer: str) -> ConsumerInfo:
        """Return configuration and progress (STREAM_NOT_FOUND, CONSUMER_NOT_FOUND)."""
        ...

    @remote(18, REPEAT, to=leader_of("stream"))
    async def list_consumers(self, stream: str, limit: int, token: str) -> Page:
        """List the consumers of the stream by name."""
        ...

    @remote(19, UNKNOWN, to=leader_of("stream"))
    async def delete_consumer(
        self, stream: str, consumer: str, if_match: int | None = None
    ) -> None:
        """Remove the consumer; its waiting pulls end with CONSUMER_DELETED.

        ``if_match`` is as with ``delete_stream``.
        """
        ...

    @remote(38, REFUSE, to=leader_of("stream"))
    async def bind_consumer(self, stream: str, consumer: str) -> ConsumerHold:
        """Mark the consumer as bound (``push_bound``) and in use while the answer is open.

        The answer ends when the consumer is deleted, and with an ApiError if the link is lost.
        Raises STREAM_NOT_FOUND, CONSUMER_NOT_FOUND.
        """
        ...

    @remote(
        20,
        REFUSE,
        to=leader_of("request.stream"),
        wait_ns=lambda request: 0 if request.no_wait else request.expires_ns,
    )
    async def pull(self, request: PullRequest) -> PullResult:
        """Deliver up to a batch; the result is empty if no message came in time.

        Cancelling the call returns undelivered messages to the consumer.
        """
        ...

    @remote(21, UNKNOWN, to=leader_of("stream"))
    async def acknowledge(
        self, stream: str, consumer: str, items: list[AckItem], sync: bool
    ) -> list[AckResult]:
        """Acknowledge deliveries; with ``sync``, answer only when that is durable.

        Returns one result for each of ``items``.
        Items of another shard or consumer get TOKEN_FORGED; those of an earlier epoch or of a
        deleted consumer with the same name get TOKEN_STALE.
        """
        ...
