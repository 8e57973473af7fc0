"""Bindings: a subscription holds its consumer, so that it is not removed as inactive."""

import asyncio
from collections.abc import AsyncIterator, Callable


class Binding(AsyncIterator[bytes]):
    """Holds a consumer until it is closed. It yields nothing and ends when the consumer is gone."""

    def __init__(self, on_close: "Callable[[Binding], None]") -> None:
        self._on_close = on_close
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __anext__(self) -> bytes:
        """Wait until the consumer is gone."""
        await asyncio.shield(self._gone)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Release the consumer."""
        self._on_close(self)

    def end(self) -> None:
        """End the iteration: the consumer is gone."""
        if not self._gone.done():
            self._gone.set_result(None)
