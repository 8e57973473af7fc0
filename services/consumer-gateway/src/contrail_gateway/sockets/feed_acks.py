"""The acknowledgements of one subscription, on their way to storage."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import AckKind
from contrail_edge.http.steps import Steps
from contrail_gateway.core.frames import FrameId, Ok
from contrail_gateway.core.ledger import shard_seq
from contrail_gateway.core.session import SETTLED_MAX, Settlement, too_many_settled
from contrail_gateway.core.subscription import Subscription
from contrail_gateway.sockets.feed_host import Host
from contrail_link.contract.consume import AckItem, AckResult

_TOGETHER: Final = 5_000
"""Acknowledgements per step. The event loop may serve other work between two steps."""
ACK_BYTES: Final = 64
"""Bytes that one unanswered acknowledgement counts against the limits of a socket."""
_log: Final = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _UnansweredAcks:
    """Acknowledgements of one frame that are not answered yet, of ``count`` messages.

    ``unknown`` describes the sequences of the frame that this socket does not hold, or is "".
    ``sending``: the last sending of the ledger before them.
    """

    frame_id: FrameId | None
    kind: AckKind
    items: list[AckItem]
    count: int
    unknown: str
    sending: int


class FeedAcks:
    """Forwards acknowledgements to storage, in the order of their frames, and answers the frames.

    All fields belong to the event loop.
    """

    def __init__(self, host: Host, sub: Subscription) -> None:
        # Shard id, consumer id and epoch of the last deliveries, by shard of the stream.
        # Acknowledgements carry them. Invariant: the ledger only holds deliveries of these.
        self.addresses: dict[int, tuple[int, int, int]] = {0: (0, 0, 0)}
        # The session of the socket; it outlives the feed.
        self._host = host
        # The subscription, whose ledger has the messages that are not settled yet.
        self._sub = sub
        # Acknowledgements for the next call to storage, in the order of their frames.
        self._acks: list[_UnansweredAcks] = []
        # The task that forwards `_acks`; None when there are none. At most one runs, which keeps
        # acknowledgements in order.
        self._acking: asyncio.Task[None] | None = None
        # Set after each answer to acknowledgements; a draining feed waits for it.
        self._settled = asyncio.Event()

    async def wait_settled(self) -> None:
        """Wait until all messages of the subscription are settled."""
        while len(self._sub.ledger) or self._acks:
            self._settled.clear()
            await self._settled.wait()

    def settle(self, settlement: Settlement, frame_id: FrameId | None) -> Steps[None]:
        """Queue acknowledgements. All that are queued in one pass of the event loop go together."""
        items: list[AckItem] = []
        for start in range(0, len(settlement.seqs), _TOGETHER):
            items += settlement.items(self.addresses, slice(start, start + _TOGETHER))
            yield
        count = len(settlement.seqs)
        if settlement.tokens:
            named = yield from self._open(settlement)
            items += named
            count += sum(len(item.seqs) for item in named)
        self._host.session.begin(count, ACK_BYTES * count)
        kind, sending = settlement.kind, self._sub.ledger.sendings
        self._acks.append(
            _UnansweredAcks(frame_id, kind, items, count, settlement.unknown, sending)
        )
        if self._acking is None:
            self._acking = asyncio.create_task(self._acknowledge())
            self._host.later(self._acking)

    def _open(self, settlement: Settlement) -> Steps[list[AckItem]]:
        opener = self._host.tokens.opener(self._sub.stream, self._sub.consumer)
        items: list[AckItem] = []
        count = 0
        for token in settlement.tokens:
            head, seq = opener.open(token)
            seqs = head.seqs(0, len(head) - 1) if seq is None else [seq]
            count += len(seqs)
            if count > SETTLED_MAX:
                raise too_many_settled()
            address = (head.shard_id, head.consumer_id, head.epoch)
            items.append(
                AckItem(*address, seqs, settlement.kind, settlement.delay_ns, settlement.reason)
            )
            yield
        return items

    async def _acknowledge(self) -> None:
        """Forward queued acknowledgements until there are none.

        Those that arrive during a call go together in the next one.
        """
        while self._acks:
            waiting, self._acks = self._acks, []
            items = [item for one in waiting for item in one.items]
            # An answer promises that the acknowledgements are durable. Without an id nobody waits
            # for that.
            sync = any(one.frame_id is not None for one in waiting)
            results: Sequence[AckResult] | ApiError
            try:
                results = await self._host.link.acknowledge(
                    self._sub.stream, self._sub.consumer, items, sync
                )
            except ApiError as error:
                results = error
            except Exception:
                # The task must live on: without it, later acknowledgements would wait for ever.
                _log.exception("acknowledge_failed")
                results = ApiError(errors.INTERNAL)
            self._notify(waiting, results)
            self._settled.set()
        self._acking = None

    def _notify(
        self, waiting: list[_UnansweredAcks], results: Sequence[AckResult] | ApiError
    ) -> None:
        at = 0
        for one in waiting:
            self._host.answered(one.count, ACK_BYTES * one.count)
            if isinstance(results, ApiError):
                self._host.refuse(one.frame_id, self._sub.sid, results)
                continue
            own, at = results[at : at + len(one.items)], at + len(one.items)
            self._taken(one, own)

    def _taken(self, waiting: _UnansweredAcks, results: Sequence[AckResult]) -> None:
        # Storage names shards by id, the ledger by their number in the stream.
        shards = {address[0]: shard for shard, address in self.addresses.items()}
        done = [
            shard_seq(shards.get(item.shard_id, 0), seq)
            for item, result in zip(waiting.items, results, strict=True)
            if not result.code and waiting.kind != "in_progress"
            for seq in item.seqs
        ]
        if waiting.kind == "nak":
            self._sub.returned(done, waiting.sending)
        else:
            self._sub.settled(done, waiting.kind)
        self._host.counts.acks += len(done)
        refused = next((result for result in results if result.code), None)
        if refused is not None:
            error = errors.from_code(refused.code, refused.detail)
            error.applied = None  # others of the frame may have been applied
            self._host.refuse(waiting.frame_id, self._sub.sid, error)
        elif waiting.unknown:
            # Each message is acknowledged by itself, as in JetStream: the known ones are done.
            error = ApiError(errors.NOT_SENT_HERE, waiting.unknown)
            self._host.refuse(waiting.frame_id, self._sub.sid, error)
        elif waiting.frame_id is not None:
            self._host.send(Ok(id=waiting.frame_id))
