"""A member's side: rows of a group that another member reads from one view of its store."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Final

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_storage.state.messages import Close, Open, OpenBlocks, Opened, Read, Request
from contrail_storage.state.rows import Unpacking
from contrail_storage.store.rocks_store import Operation

Fetch = Callable[[str, bytes], Awaitable[bytes]]
"""Asks another node for up to 1 MiB: see `Cluster.fetch`."""

_AHEAD: Final = 3
"""Pieces that are asked for at once; a fourth request stays free for others."""
_TRIES: Final = 3
_AGAIN_S: Final = 0.005


class Fetching:
    """Fetches rows from other members. Used on the event loop."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self.received_bytes = 0
        """For metrics."""

    @asynccontextmanager
    async def open(self, peer: str, request: Open | OpenBlocks) -> AsyncIterator[Opened]:
        """Begin to read rows of another member (ApiError); end it with the context.

        Until then, the other member keeps its log after them.
        """
        opened = msgspec.msgpack.decode(await self._ask(peer, request), type=Opened)
        try:
            yield opened
        finally:
            with suppress(ApiError):  # it ends by itself what nobody reads
                await self._ask(peer, Close(opened.number))

    async def rows(
        self, peer: str, opened: Opened, group: int
    ) -> AsyncGenerator[list[Operation], None]:
        """Yield what writes the rows, piece by piece, and end once all are there.

        Raises ApiError if the other member ends it, and BrokenStateError.
        """
        unpacking = Unpacking(group)
        async with aclosing(self._pieces(peer, opened.number)) as pieces:
            async for piece in pieces:
                yield await asyncio.to_thread(unpacking.operations_of, piece)
                if unpacking.complete:
                    return

    async def _pieces(self, peer: str, number: int) -> AsyncGenerator[bytes, None]:
        """Yield all pieces in order; a few are on their way at once."""
        asked: deque[asyncio.Task[bytes]] = deque()
        piece = 0
        try:
            while True:
                while len(asked) < _AHEAD:
                    asked.append(asyncio.ensure_future(self._piece(peer, number, piece)))
                    piece += 1
                found = await asked.popleft()
                self.received_bytes += len(found)
                yield found
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _piece(self, peer: str, number: int, piece: int) -> bytes:
        tries = 1
        while True:
            try:
                return await self._ask(peer, Read(number, piece))
            except ApiError as error:
                lost = error.spec in (errors.OUTCOME_UNKNOWN, errors.OVERLOADED, errors.NOT_LEADER)
                if not lost or tries == _TRIES:
                    raise
            tries += 1
            await asyncio.sleep(_AGAIN_S)

    async def _ask(self, peer: str, request: Request) -> bytes:
        return await self._fetch(peer, msgspec.msgpack.encode(request))
