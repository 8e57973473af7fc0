"""The binding of a consumer to a subscription, which is renewed after the link was lost."""

import asyncio
from typing import Final

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_link.contract.consume import ConsumeLink, ConsumerHold

_RETRY_MIN_S: Final = 0.05
_RETRY_MAX_S: Final = 2.0


class Bound:
    """Binds one consumer at a time for one subscription."""

    def __init__(self, link: ConsumeLink) -> None:
        self._link = link
        # The open call that binds the consumer; None before `to` and after `end`.
        self._held: ConsumerHold | None = None
        # Renews `_held` after each loss of the link.
        self._task: asyncio.Task[None] | None = None

    async def to(self, stream: str, consumer: str) -> None:
        """Bind this consumer, and release the one before. Raises ApiError if that fails."""
        held = await self._link.bind_consumer(stream, consumer)
        before = self._held, self._task
        self._held = held
        self._task = asyncio.create_task(self._keep(held, stream, consumer))
        await _release(*before)

    async def end(self) -> None:
        """Release the consumer."""
        before = self._held, self._task
        self._held = self._task = None
        await _release(*before)

    async def _keep(self, held: ConsumerHold, stream: str, consumer: str) -> None:
        """Bind again after each loss of the link, until the consumer is deleted."""
        retry_s = _RETRY_MIN_S
        while True:
            try:
                # The stream has no chunks: it ends when the consumer is deleted.
                async for _ in held:
                    pass
                return
            except ApiError:
                await held.aclose()  # the link was lost
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _RETRY_MAX_S)
            try:
                held = self._held = await self._link.bind_consumer(stream, consumer)
                retry_s = _RETRY_MIN_S
            except ApiError as error:
                if error.spec in (errors.STREAM_NOT_FOUND, errors.CONSUMER_NOT_FOUND):
                    return


async def _release(held: ConsumerHold | None, task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
    if held is not None:  # not in the task: one cancelled before its first step never runs
        await held.aclose()
    if task is not None:
        await asyncio.wait([task])
