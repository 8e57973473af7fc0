"""The messages of a replay. `contrail_client.blocking.replay` is generated from this module."""

from collections.abc import AsyncIterator
from typing import Any, Self

from contrail_client.models import StoredMessage
from contrail_client.tables import Rows


class AsyncReplay(AsyncIterator[StoredMessage]):
    """The messages of a replay: iterate over them, or read them all into a table."""

    def __init__(self, messages: AsyncIterator[StoredMessage]) -> None:
        self._messages = messages

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StoredMessage:
        return await anext(self._messages)

    async def to_pandas(self) -> Any:
        """The messages that were not iterated over yet, as `tables.to_pandas` returns them.

        The whole table is in memory. For many messages `Contrail.read_split_arrow` is far faster.
        """
        rows = Rows()
        async for message in self._messages:
            rows.add(message)
        return rows.to_pandas()
