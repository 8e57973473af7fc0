"""Messages as a pandas `DataFrame`. Needs pandas (the extra `pandas`)."""

from collections.abc import Iterable
from typing import Any, Protocol


class Tabular(Protocol):
    """A message that can become a row."""

    @property
    def shard(self) -> int | None:
        """The shard of the sequence; None if the stream has only one."""
        ...

    @property
    def seq(self) -> int:
        """Its sequence in the stream."""
        ...

    @property
    def time_ns(self) -> int:
        """When it was stored, in nanoseconds since the epoch."""
        ...

    @property
    def subject(self) -> str:
        """The subject it was published to."""
        ...

    @property
    def headers(self) -> dict[str, list[str]]:
        """Its headers."""
        ...

    @property
    def payload(self) -> bytes:
        """The payload as it was published."""
        ...


class Rows:
    """Collects messages as columns, which take less memory than the messages.

    The constructor raises ImportError if pandas is not installed, before anything is read.
    """

    def __init__(self) -> None:
        self._pandas = _pandas()
        self._columns: dict[str, list[Any]] = {
            name: [] for name in ("shard", "seq", "time", "subject", "headers", "data")
        }

    def add(self, message: Tabular) -> None:
        """Add a message as the next row."""
        columns = self._columns
        columns["shard"].append(message.shard or 0)
        columns["seq"].append(message.seq)
        columns["time"].append(message.time_ns)
        columns["subject"].append(message.subject)
        columns["headers"].append(message.headers)
        columns["data"].append(message.payload)

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`, with the columns of an Arrow replay."""
        frame = self._pandas.DataFrame(self._columns)
        frame["time"] = self._pandas.to_datetime(frame["time"], unit="ns", utc=True)
        return frame.astype({"shard": "int32", "seq": "int64"})


def to_pandas(messages: Iterable[Tabular]) -> Any:
    """Messages as a `pandas.DataFrame`; ImportError when pandas is not installed.

    Columns: `shard`, `seq`, `time` (UTC, nanoseconds), `subject`, `headers` and `data` (bytes).
    """
    rows = Rows()
    for each in messages:
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
