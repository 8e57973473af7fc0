"""Messages as a pandas `DataFrame`. Needs pandas (the extra `pandas`)."""

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from contrail_client.models import StoredMessage


class Rows:
    """Gathers messages as columns, which take less room than the messages."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {
            name: [] for name in ("shard", "seq", "time", "subject", "headers", "data")
        }

    def add(self, message: "StoredMessage") -> None:
        """Take the next message."""
        columns = self._columns
        columns["shard"].append(message.shard or 0)
        columns["seq"].append(message.seq)
        columns["time"].append(message.time_ns)
        columns["subject"].append(message.subject)
        columns["headers"].append(message.headers)
        columns["data"].append(message.payload)

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`, with the columns of an Arrow replay."""
        pandas = _pandas()
        frame = pandas.DataFrame(self._columns)
        frame["time"] = pandas.to_datetime(frame["time"], unit="ns", utc=True)
        return frame.astype({"shard": "int32", "seq": "int64"})


def to_pandas(messages: Iterable["StoredMessage"]) -> Any:
    """Messages as a `pandas.DataFrame`; ImportError when pandas is not installed.

    Columns: `shard`, `seq`, `time` (UTC, nanoseconds), `subject`, `headers` and `data` (bytes).
    """
    _pandas()  # before anything is read
    rows = Rows()
    for each in messages:
        rows.add(each)
    return rows.to_pandas()


class Replay(Iterator["StoredMessage"]):
    """The messages of a replay: iterate over them, or have them all in a table."""

    def __init__(self, messages: Iterator["StoredMessage"]) -> None:
        self._messages = messages

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> "StoredMessage":
        return next(self._messages)

    def to_pandas(self) -> Any:
        """What was not iterated over yet, as `tables.to_pandas` has it: all of it is in memory.

        For volume `Contrail.read_split_arrow` is far faster.
        """
        return to_pandas(self._messages)


class AsyncReplay(AsyncIterator["StoredMessage"]):
    """As `Replay`, for asyncio."""

    def __init__(self, messages: AsyncIterator["StoredMessage"]) -> None:
        self._messages = messages

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> "StoredMessage":
        return await anext(self._messages)

    async def to_pandas(self) -> Any:
        """As `Replay.to_pandas`."""
        _pandas()
        rows = Rows()
        async for each in self._messages:
            rows.add(each)
        return rows.to_pandas()


def _pandas() -> Any:
    try:
        import pandas  # noqa: PLC0415 - the SDK is useful without it
    except ImportError as error:
        raise ImportError(
            "to_pandas requires pandas: pip install 'contrail-client[pandas]'"
        ) from error
    return pandas
