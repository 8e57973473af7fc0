"""Advisories: the newest ones are kept in memory while a listener reads them, and never stored.

A listener is a reader with a position, so a slow one costs nothing. When it falls behind the kept
advisories, the answer says how many it missed.
"""

import asyncio
import re
import secrets
from collections import deque
from typing import Final

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import Advisory
from contrail_common.timeunits import NS_PER_S
from contrail_link.contract.admin import EventsRequest, EventsResult

KEPT_MAX: Final = 4_096
KEPT_BYTES_MAX: Final = 2 << 20
READERS_MAX: Final = 1_024
LINGER_S: Final = 60.0
"""Time without a reader after which advisories are no longer kept; longer than readers pause."""
_ADVISORY_BYTES: Final = 256
_DIGITS: Final = re.compile("[0-9]{1,19}")


class AdvisoryHub:
    """Keeps advisories for readers on the event loop, and none while ``listening`` is False.

    A position is valid for one period of listening. After an older one, the number of missed
    advisories is unknown.
    """

    def __init__(
        self,
        kept_max: int = KEPT_MAX,
        kept_bytes_max: int = KEPT_BYTES_MAX,
        readers_max: int = READERS_MAX,
        linger_s: float = LINGER_S,
    ) -> None:
        self.listening = False
        """Whether a reader came within the last ``linger_s``."""
        self.readers = 0
        """Readers that wait for news."""
        self._kept_max = kept_max
        self._kept_bytes_max = kept_bytes_max
        self._readers_max = readers_max
        self._linger_s = linger_s
        # Random name of the period of listening; a part of every position.
        self._period = ""
        # The newest advisories of this period, numbered up to `_last`, and their total size.
        self._kept: deque[Advisory] = deque()
        self._bytes = 0
        self._last = 0
        """Number of the newest advisory of this period."""
        # Loop time when a reader last came or ended its wait.
        self._heard_at = 0.0
        # Done at the next advisory; shared by all waiting readers. None while nobody waits.
        self._news: asyncio.Future[None] | None = None

    # Notifying -----------------------------------------------------------------------------------

    def notify(self, advisories: list[Advisory], time_ns: int, stream: str = "") -> None:
        """Keep what happened at ``time_ns``; ``stream`` is for advisories that name none."""
        # Nobody reads them: no memory, and no work for each advisory.
        if not self.listening:
            return
        for advisory in advisories:
            self._last += 1
            advisory.id = self._position(self._last)
            advisory.time_ns = time_ns
            advisory.stream = advisory.stream or stream
            self._kept.append(advisory)
            self._bytes += _size(advisory)
        while len(self._kept) > self._kept_max or self._bytes > self._kept_bytes_max:
            self._bytes -= _size(self._kept.popleft())
        if self._news is not None:
            self._news.set_result(None)
            self._news = None

    # Reading -------------------------------------------------------------------------------------

    async def read(self, asked: EventsRequest) -> EventsResult:
        """Return advisories after a position; see ``StorageLink.read_events``."""
        self._listen()
        after = self._number(asked.after) if asked.after else self._last
        if after is None:
            return EventsResult([], self._position(self._last - len(self._kept)), None)
        deadline = asyncio.get_running_loop().time() + asked.wait_ns / NS_PER_S
        while True:
            first = self._last - len(self._kept)
            if after < first:
                return EventsResult([], self._position(first), first - after)
            found, after = self._select(asked, after)
            if found or not await self._wait_until(deadline):
                return EventsResult(found, self._position(after))

    def _select(self, asked: EventsRequest, after: int) -> tuple[list[Advisory], int]:
        found: list[Advisory] = []
        first = self._last - len(self._kept)
        for at in range(after - first, len(self._kept)):
            advisory = self._kept[at]
            if _matches(asked, advisory):
                found.append(advisory)
                if len(found) >= asked.limit:
                    return found, first + at + 1
        return found, self._last

    async def _wait_until(self, deadline: float) -> bool:
        """Wait for another advisory; False when the deadline passes first."""
        loop = asyncio.get_running_loop()
        left_s = deadline - loop.time()
        if left_s <= 0:
            return False
        if self.readers >= self._readers_max:
            raise ApiError(errors.TOO_MANY_WAITERS, "too many listeners", applied=False)
        if self._news is None:
            self._news = loop.create_future()
        self.readers += 1
        try:
            done, _ = await asyncio.wait([self._news], timeout=left_s)
        finally:
            self.readers -= 1
            self._heard_at = loop.time()
        return bool(done)

    # Listening -----------------------------------------------------------------------------------

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time()
        if not self.listening:
            self.listening = True
            self._period = secrets.token_hex(4)
            loop.call_later(self._linger_s, self._look_for_listeners)

    def _look_for_listeners(self) -> None:
        loop = asyncio.get_running_loop()
        left_s = self._heard_at + self._linger_s - loop.time()
        if self.readers or left_s > 0:
            loop.call_later(max(left_s, self._linger_s / 2), self._look_for_listeners)
            return
        self.listening = False
        self._kept.clear()
        self._bytes = self._last = 0

    def _position(self, number: int) -> str:
        return f"{self._period}-{number}"

    def _number(self, position: str) -> int | None:
        """Return the number in a position of this period; None for any other position."""
        period, _, number = position.partition("-")
        if period != self._period or not _DIGITS.fullmatch(number):
            return None
        return int(number) if int(number) <= self._last else None


def _matches(asked: EventsRequest, advisory: Advisory) -> bool:
    return (
        (not asked.stream or advisory.stream == asked.stream)
        and (not asked.consumer or advisory.consumer == asked.consumer)
        and (not asked.types or advisory.type in asked.types)
    )


def _size(advisory: Advisory) -> int:
    texts = len(advisory.stream) + len(advisory.consumer) + len(advisory.reason)
    return _ADVISORY_BYTES + texts
