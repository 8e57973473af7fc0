"""Messages as a pandas `DataFrame`. Needs pandas (the extra `pandas`)."""

from typing import Protocol


class Message(Protocol):
    """What a row is made of."""

    @property
    def shard(self) -> int | None:
        """The shard that the sequence is of, where the stream has several."""
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
