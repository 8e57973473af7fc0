"""The messages of a replay. `contrail_client.blocking.replay` is generated from this module."""

from collections.abc import AsyncIterator
from typing import Any, Self

from contrail_client.models import StoredMessage
from contrail_client.tables import Rows


class AsyncReplay(AsyncIterator[StoredMessage]):
    """The messages of a replay: iterate over them, or have them all in a table."""

    def __init__(self, messages: AsyncIterator[StoredMessage]) -> None:
        self._messages = messages

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StoredMessage:
        return await anext(self._messages)

    async def to_pandas(self) -> Any:
        """What was not iterated over yet, as `tables.to_pandas` has it: all of it is in memory.

        For volume `Contrail.read_split_arrow` is far faster.
        """
        rows = Rows()
        async for message in self._messages:
            rows.add(message)
        return rows.to_pandas()
