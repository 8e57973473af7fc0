"""The state that a log keeps for each group, and the records on their way to the disk."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

OnDurable = Callable[[int, int], None]


class LogEnd(NamedTuple):
    """End of a group's log after its first `position` records, with the term and vote then."""

    position: int
    last_index: int
    last_term: int
    term: int
    voted_for: str | None


NOTHING: Final = LogEnd(0, 0, 0, 0, None)


@dataclass(slots=True)
class LogGroup:
    """The log of one group: its end, and the part of it that is `durable`."""

    position: int = 0
    last_index: int = 0
    last_term: int = 0
    term: int = 0
    voted_for: str | None = None
    durable: LogEnd = NOTHING
    on_durable: OnDurable | None = None

    def mark(self) -> LogEnd:
        """The current end of the log."""
        return LogEnd(self.position, self.last_index, self.last_term, self.term, self.voted_for)


@dataclass(slots=True)
class LogBatch:
    """Records on their way to the disk; `highest` has the highest entry index of each group."""

    parts: list[bytes] = field(default_factory=list)
    highest: dict[int, int] = field(default_factory=dict)
    size: int = 0
