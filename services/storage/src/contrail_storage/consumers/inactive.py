"""Removes consumers that nobody has used for their ``inactive_threshold``."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from contrail_common.errors import ApiError
from contrail_storage.consumers.consumer import Consumer
from contrail_storage.core.agenda import Agenda
from contrail_storage.core.key_layout import is_in_memory
from contrail_storage.replica.changes import ConsumerKey, take

_TOGETHER: Final = 200
"""Changed consumers that are entered in one turn of the event loop."""
_RETRY_S: Final = 1.0
"""Pause before a look at a consumer that cannot be removed, or whose client is at work."""


class InactiveConsumers:
    """Knows when each consumer may be inactive, and looks at it then.

    A use of a consumer does not move that time; the look finds it. A consumer that is never
    removed costs nothing. Keys have the id of the stream's first shard.
    """

    def __init__(
        self,
        find: Callable[[ConsumerKey], Consumer | None],
        drop: Callable[[Consumer, Callable[[], bool]], Awaitable[None]],
    ) -> None:
        """``find`` returns a consumer, None if it is gone (ApiError if it is not on all shards).

        ``drop`` removes a consumer if the function that it gets still returns True once no change
        of the consumer is in progress.
        """
        self._find = find
        self._drop = drop
        self._changed: set[ConsumerKey] = set()
        self._agenda = Agenda[ConsumerKey]()
        """By loop time, in seconds."""

    def note(self, keys: Iterable[ConsumerKey]) -> None:
        """Note that consumers are new, were changed or are gone."""
        self._changed.update(keys)

    async def drop(self) -> None:
        """Remove the consumers that are inactive now."""
        loop = asyncio.get_running_loop()
        while self._changed:
            for key in take(self._changed, _TOGETHER):
                self._enter(key, self._next_s(key, loop.time()))
            await asyncio.sleep(0)
        left = self._agenda.take(loop.time())
        # Streams in memory first (from the end), so that their work is done even if the log fails.
        left.sort(key=lambda key: is_in_memory(key[0]))
        try:
            while left:
                self._enter(left[-1], await self._look(left[-1]))
                left.pop()
        finally:
            self.note(left)

    def _enter(self, key: ConsumerKey, at_s: float | None) -> None:
        if at_s is None:
            self._agenda.leave(key)
        else:
            self._agenda.enter(key, at_s)

    def _next_s(self, key: ConsumerKey, now_s: float) -> float | None:
        """When to look at a consumer; None: never, as long as it does not change."""
        try:
            # A consumer with `max_deliver` is found for another reason: as long as there is an
            # object of it, it gives up on messages, even if nobody pulls.
            consumer = self._find(key)
        except ApiError:
            return now_s + _RETRY_S
        return None if consumer is None else consumer.inactive_from_s(now_s)

    async def _look(self, key: ConsumerKey) -> float | None:
        """Remove a consumer if it is inactive; return when to look again, as `_next_s`."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        at_s = self._next_s(key, now_s)
        if at_s is None or at_s > now_s:
            return at_s
        try:
            consumer = self._find(key)
            if consumer is None:
                return None
            if any(shard.damaged for shard in consumer.stream.shards):
                return now_s + _RETRY_S
            if not consumer.is_at_work():
                await self._drop(consumer, lambda: consumer.inactive_from_s(loop.time()) == at_s)
        except ApiError:  # changed or removed meanwhile, or refused
            pass
        return now_s + _RETRY_S
