"""Acknowledgements gathered until the next frame, joined by kind. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

from contrail_client.live.frames import Settle, settle_frame
from contrail_client.times import Duration

T = TypeVar("T")

Kind = Literal["ack", "nak", "term", "in_progress"]
Option = Duration | None
"""The delay of a nak, the reason of a term."""

SETTLED_MAX: Final = 10_000
"""What one frame may name, as the server limits it."""

_RANGE_MIN: Final = 3
"""From this many on, neighbours are cheaper as a range."""


@dataclass(frozen=True, slots=True)
class Settlement(Generic[T]):
    """One acknowledgement. `about` waits for it to be durable, None does not wait.

    `alone`: a frame of several was refused, which does not say for whom, so this one goes alone.
    """

    kind: Kind
    option: Option
    seq: int
    token: str
    about: T | None = None
    alone: bool = False


class Settling(Generic[T]):
    """Acknowledgements that no frame carries yet, and what the socket still holds.

    The server knows a message by its sequence while the socket holds it: from its delivery until it
    is acknowledged. Otherwise, and on every later socket, it is known by its token alone. A
    sequence that is not held would have the whole frame refused.
    """

    def __init__(self, sid: str) -> None:
        self._sid = sid
        self._waiting: list[Settlement[T]] = []
        self._held: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def delivered(self, seq: int) -> None:
        """The socket holds `seq` from now on."""
        self._held.add(seq)

    def add(self, settlement: Settlement[T]) -> None:
        """Send this with the next frames."""
        self._waiting.append(settlement)

    def lost(self) -> None:
        """The socket is gone, and with it what it held; what waits goes to the next one."""
        self._held.clear()

    def clear(self) -> list[T]:
        """Nothing will be sent any more; answers who waits in vain."""
        waiting = [each.about for each in self._waiting if each.about is not None]
        self._waiting.clear()
        return waiting

    def take(self, new_id: Callable[[Sequence[Settlement[T]]], int]) -> list[Settle]:
        """The frames; `new_id` names one, given all settlements that wait for its answer."""
        groups: dict[tuple[Any, ...], list[Settlement[T]]] = {}
        for at, each in enumerate(self._waiting):
            own = at if each.alone else None
            key = (each.kind, each.option, each.about is not None, own)
            groups.setdefault(key, []).append(each)
        self._waiting.clear()
        return [
            self._frame(group[at : at + SETTLED_MAX], new_id)
            for group in groups.values()
            for at in range(0, len(group), SETTLED_MAX)
        ]

    def _frame(
        self, group: list[Settlement[T]], new_id: Callable[[Sequence[Settlement[T]]], int]
    ) -> Settle:
        first = group[0]
        held = {each.seq for each in group if each.seq in self._held}
        tokens = [each.token for each in group if each.seq not in held]
        if first.kind != "in_progress":
            self._held -= held
        seqs, ranges = _runs(held)
        answer = new_id(group) if first.about is not None else None
        return settle_frame(
            first.kind, first.option, self._sid, id=answer, seqs=seqs, ranges=ranges, tokens=tokens
        )


def _runs(seqs: set[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """The sequences: single ones, and runs of neighbours as closed ranges.

    A range names everything in it that the socket holds, so it may span no gap: what lies there
    may be another message, which is still being worked on.
    """
    single: list[int] = []
    ranges: list[tuple[int, int]] = []
    run: list[int] = []
    for seq in [*sorted(seqs), None]:
        if run and seq != run[-1] + 1:
            if len(run) >= _RANGE_MIN:
                ranges.append((run[0], run[-1]))
            else:
                single += run
            run = []
        if seq is not None:
            run.append(seq)
    return single, ranges
