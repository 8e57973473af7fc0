# Generated from aio/replay.py by `make blocking`. Change that file, not this one.
"""The messages of a replay."""

from collections.abc import Iterator
from typing import Any, Self

from contrail_client.models import StoredMessage
from contrail_client.tables import Rows


class Replay(Iterator[StoredMessage]):
    """The messages of a replay: iterate over them, or read them all into a table."""

    def __init__(self, messages: Iterator[StoredMessage]) -> None:
        self._messages = messages

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StoredMessage:
        return next(self._messages)

    def to_pandas(self) -> Any:
        """The messages that were not iterated over yet, as `tables.to_pandas` returns them.

        The whole table is in memory. For many messages `Contrail.read_split_arrow` is far faster.
        """
        rows = Rows()
        for message in self._messages:
            rows.add(message)
        return rows.to_pandas()
