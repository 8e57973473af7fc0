"""The asynchronous client that serves the synchronous one's sockets."""

import threading
from collections.abc import Callable

from contrail_client.aio import AsyncContrail
from contrail_client.live.blocking import LoopThread


class LiveClient:
    """The asynchronous client of a synchronous one, with its thread: made when it is needed."""

    def __init__(self, make: Callable[[], AsyncContrail]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._client: AsyncContrail | None = None
        self.thread: LoopThread

    def client(self) -> AsyncContrail:
        """The client, whose methods belong into `thread`."""
        with self._lock:
            if self._client is None:
                self.thread = LoopThread()
                self._client = self.thread.run(self._made())
            return self._client

    def close(self) -> None:
        """End both."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            self.thread.run(client.close())
            self.thread.stop()

    async def _made(self) -> AsyncContrail:
        return self._make()
