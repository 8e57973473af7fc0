"""What a log keeps of each group, and of records on their way to the disk."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

OnDurable = Callable[[int, int], None]


class Mark(NamedTuple):
    """Where a group's log stands after its first `position` records."""

    position: int
    last_index: int
    last_term: int
    term: int
    voted_for: str | None


NOTHING: Final = Mark(0, 0, 0, 0, None)


@dataclass(slots=True)
class LogGroup:
    """The log of one group: where it ends, and up to where it is durable."""

    position: int = 0
    last_index: int = 0
    last_term: int = 0
    term: int = 0
    voted_for: str | None = None
    durable: Mark = NOTHING
    on_durable: OnDurable | None = None

    def mark(self) -> Mark:
        """Where it ends now."""
        return Mark(self.position, self.last_index, self.last_term, self.term, self.voted_for)


@dataclass(slots=True)
class LogBatch:
    """Records on their way to the disk; `highest` holds the top entry index of each group."""

    parts: list[bytes] = field(default_factory=list)
    highest: dict[int, int] = field(default_factory=dict)
    size: int = 0
