"""Pulling from all shards of a stream as one consumer.

Each shard has a dispatcher. A pull tries all shards, each time beginning with another one. Only one
dispatcher selects at a time, so that together they stay within ``max_ack_pending``.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from contrail_common import errors
from contrail_common.columns.blocks import message_size
from contrail_common.columns.delivery_columns import HEADERS_STEP, DeliveryColumns
from contrail_common.errors import ApiError
from contrail_common.model import StoredMessage
from contrail_link.contract.consume import Delivery, PullRequest, PullResult
from contrail_storage.consumers.dispatcher import Dispatcher, serve
from contrail_storage.consumers.pull_batch import PULL_BYTES_MAX


class ShardedDispatcher:
    """The dispatchers of one consumer, in the order of the stream's shards."""

    def __init__(self, dispatchers: Sequence[Dispatcher]) -> None:
        self.dispatchers = tuple(dispatchers)
        # Index of the dispatcher that the next pull begins with.
        self._first = 0
        lock = asyncio.Lock()
        for dispatcher in self.dispatchers:
            dispatcher.join(tuple(one for one in self.dispatchers if one is not dispatcher), lock)

    async def pull(self, request: PullRequest) -> PullResult:
        """Serve a pull as ``Dispatcher.pull`` does, over all shards."""
        request = msgspec.structs.replace(request, columns=False)
        found: list[Delivery] = []

        async def attempt() -> bool:
            await self._take(request, found)
            return bool(found)

        try:
            await serve(self.dispatchers, request, attempt)
            return await self._result(found)
        except BaseException:
            # A cancelled pull ends here too: its messages go to the next pull.
            for dispatcher in self.dispatchers:
                number = dispatcher.shard.machine.shard
                dispatcher.give_back([one for one in found if one.message.shard == number])
            raise

    async def _take(self, request: PullRequest, found: list[Delivery]) -> None:
        """Add available messages of all shards to ``found``, up to a batch."""
        size = 0
        too_small: ApiError | None = None
        begin, count = self._first, len(self.dispatchers)
        for step in range(count):
            at = (begin + step) % count
            dispatcher = self.dispatchers[at]
            try:
                taken = await dispatcher.take(_rest(request, found, size))
            except ApiError as error:
                if error.spec is errors.PULL_TOO_SMALL:
                    too_small = error  # other shards may have smaller messages
                    continue
                if found:
                    break  # send what was taken; the next pull gets the error
                raise
            assert not isinstance(taken, DeliveryColumns)
            if taken:
                self._first = (at + 1) % count
            found += [_in_shard(dispatcher, one) for one in taken]
            size += await _size_in_steps(taken)
            if len(found) >= request.batch or size >= (request.max_bytes or PULL_BYTES_MAX):
                break
        if too_small is not None and not found:
            raise too_small

    async def _result(self, found: list[Delivery]) -> PullResult:
        pending = sum([await dispatcher.num_pending() for dispatcher in self.dispatchers])
        last = pending
        counted: list[Delivery] = []
        for one in reversed(found):
            counted.append(Delivery(one.message, one.consumer_seq, one.num_delivered, pending))
            pending += one.num_delivered == 1
        addresses = {
            dispatcher.shard.machine.shard: (
                dispatcher.shard.machine.shard_id,
                dispatcher.consumer.consumer_id,
                dispatcher.consumer.epoch,
            )
            for dispatcher in self.dispatchers
        }
        return PullResult(counted[::-1], last, *addresses[0], addresses=addresses)


def _rest(request: PullRequest, found: list[Delivery], size: int) -> PullRequest:
    """Return the rest of a pull after ``found`` with ``size`` bytes was taken."""
    if not found:
        return request
    left = max((request.max_bytes or PULL_BYTES_MAX) - size, 1)
    return msgspec.structs.replace(request, batch=request.batch - len(found), max_bytes=left)


async def _size_in_steps(deliveries: list[Delivery]) -> int:
    total = step = 0
    for one in deliveries:
        if step > HEADERS_STEP:
            await asyncio.sleep(0)
            step = 0
        payload_bytes = len(one.message.payload)
        size = message_size(one.message.headers, payload_bytes)
        total += size
        step += size - payload_bytes
    return total


def _in_shard(dispatcher: Dispatcher, delivery: Delivery) -> Delivery:
    one, number = delivery.message, dispatcher.shard.machine.shard
    message = StoredMessage(one.seq, one.subject, one.time_ns, one.headers, one.payload, number)
    return Delivery(message, delivery.consumer_seq, delivery.num_delivered, delivery.num_pending)
