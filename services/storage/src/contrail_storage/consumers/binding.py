"""Bindings: a subscription holds its consumer, so that it is not removed as inactive."""

import asyncio
from collections.abc import AsyncIterator, Callable

from contrail_common.errors import ApiError


class Binding(AsyncIterator[bytes]):
    """Holds a consumer until it is closed. It yields nothing and ends when the consumer is gone.

    It is cut by an ApiError if another node leads the consumer's stream from now on.
    """

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

    def end(self, error: ApiError | None) -> None:
        """End the iteration: the consumer is gone, or it is cut by ``error``."""
        if self._gone.done():
            return
        if error is None:
            self._gone.set_result(None)
        else:
            self._gone.set_exception(error)
            self._gone.exception()  # nobody may wait for it
