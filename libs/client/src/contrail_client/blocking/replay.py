# Generated from aio/replay.py by `make blocking`. Change that file, not this one.
"""The messages of a replay."""

from collections.abc import Iterator
from typing import Any, Self

from contrail_client.models import StoredMessage
from contrail_client.tables import Rows


class Replay(Iterator[StoredMessage]):
    """The messages of a replay: iterate over them, or have them all in a table."""

    def __init__(self, messages: Iterator[StoredMessage]) -> None:
        self._messages = messages

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StoredMessage:
        return next(self._messages)

    def to_pandas(self) -> Any:
        """What was not iterated over yet, as `tables.to_pandas` has it: all of it is in memory.

        For volume `Contrail.read_split_arrow` is far faster.
        """
        rows = Rows()
        for message in self._messages:
            rows.add(message)
        return rows.to_pandas()
