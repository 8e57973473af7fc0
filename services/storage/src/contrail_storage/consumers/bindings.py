"""Which consumers subscriptions hold, as long as they hold them."""

import asyncio
from collections.abc import AsyncIterator, Callable

Key = tuple[int, int]
"""Of a consumer: the number of its stream's first shard, and its id there."""


class Binding(AsyncIterator[bytes]):
    """Holds a consumer until it is closed; has no content, and ends when the consumer is gone."""

    def __init__(self, on_close: "Callable[[Binding], None]") -> None:
        self._on_close = on_close
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __anext__(self) -> bytes:
        """Wait for the end."""
        await asyncio.shield(self._gone)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Hold it no longer."""
        self._on_close(self)

    def end(self) -> None:
        """The consumer is gone."""
        if not self._gone.done():
            self._gone.set_result(None)


class Bindings:
    """The bindings of this node's consumers, which subscriptions anywhere hold through links."""

    def __init__(self) -> None:
        self._held: dict[Key, set[Binding]] = {}

    def hold(self, key: Key, on_release: Callable[[], None]) -> Binding:
        """Bind the consumer ``key``; ``on_release`` is called when that is over."""

        def release(binding: Binding) -> None:
            held = self._held.get(key, set())
            if binding in held:
                held.discard(binding)
                on_release()
            if not held:
                self._held.pop(key, None)

        binding = Binding(release)
        self._held.setdefault(key, set()).add(binding)
        return binding

    def holds(self, key: Key) -> bool:
        """Whether a subscription holds the consumer."""
        return key in self._held

    def end(self, key: Key) -> None:
        """The consumer is gone, and with it what held it."""
        for binding in self._held.pop(key, ()):
            binding.end()
