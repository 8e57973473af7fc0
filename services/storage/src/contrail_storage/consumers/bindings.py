"""Bindings: subscriptions hold consumers, so that they are not removed as inactive."""

import asyncio
from collections.abc import AsyncIterator, Callable

Key = tuple[int, int]
"""The number of the first shard of the consumer's stream, and the consumer's id there."""


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


class Bindings:
    """The bindings of this node's consumers; subscriptions hold them through links."""

    def __init__(self) -> None:
        self._held: dict[Key, set[Binding]] = {}

    def hold(self, key: Key, on_release: Callable[[], None]) -> Binding:
        """Bind the consumer ``key``; ``on_release`` is called when the binding is closed."""

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
        """End all bindings of a consumer that is gone."""
        for binding in self._held.pop(key, ()):
            binding.end()
