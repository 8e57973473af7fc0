"""Collects acknowledgements until the next frame, and joins those of one kind. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

from contrail_client.live.frames import Settle, settle_frame
from contrail_client.times import Duration

T = TypeVar("T")

Kind = Literal["ack", "nak", "term", "in_progress"]
Option = Duration | None
"""The delay of a `nak`, or the reason of a `term`."""

SETTLED_MAX: Final = 10_000
"""The most messages that one frame may name: a limit of the server."""

_RANGE_MIN: Final = 3
"""At least this many consecutive sequences are sent as a range, which is shorter then."""


@dataclass(frozen=True, slots=True)
class Settlement(Generic[T]):
    """One acknowledgement. `about` waits until it is durable; None means that nobody waits.

    `alone` sends it in a frame of its own: a frame with several was refused, and the refusal does
    not say which of them is the cause.
    """

    kind: Kind
    option: Option
    seq: int
    token: str
    about: T | None = None
    alone: bool = False


class Settling(Generic[T]):
    """Acknowledgements that are not sent yet, and the messages that the socket holds.

    A socket holds a message from its delivery until its acknowledgement. During that time the
    server accepts the message's sequence. Otherwise, and on every later socket, it accepts only the
    token: a sequence that the socket does not hold has no effect, and the answer is an error.
    """

    def __init__(self, sid: str) -> None:
        self._sid = sid
        # Acknowledgements for the next frames, in order.
        self._waiting: list[Settlement[T]] = []
        # Sequences that the socket holds.
        self._held: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def delivered(self, seq: int) -> None:
        """Note that the socket holds `seq` from now on."""
        self._held.add(seq)

    def add(self, settlement: Settlement[T]) -> None:
        """Queue an acknowledgement for the next frames."""
        self._waiting.append(settlement)

    def lost(self) -> None:
        """Forget what the lost socket held; queued acknowledgements go to the next socket."""
        self._held.clear()

    def clear(self) -> list[T]:
        """Drop all queued acknowledgements; returns the `about` of each that somebody waits for."""
        waiting = [each.about for each in self._waiting if each.about is not None]
        self._waiting.clear()
        return waiting

    def take(self, new_id: Callable[[Sequence[Settlement[T]]], int]) -> list[Settle]:
        """Remove the queued acknowledgements and return their frames.

        `new_id` gives the number of a frame whose answer somebody waits for; it gets the
        acknowledgements in that frame.
        """
        groups: dict[tuple[Any, ...], list[Settlement[T]]] = {}
        for at, each in enumerate(self._waiting):
            own = at if each.alone else None
            # Those that somebody waits for have frames of their own: only these need an answer.
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
        # A message in progress still awaits its acknowledgement.
        if first.kind != "in_progress":
            self._held -= held
        seqs, ranges = _runs(held)
        answer = new_id(group) if first.about is not None else None
        return settle_frame(
            first.kind, first.option, self._sid, id=answer, seqs=seqs, ranges=ranges, tokens=tokens
        )


def _runs(seqs: set[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Split sequences into single ones and inclusive ranges of consecutive ones.

    A range may not span a gap: it names every message in it that the socket holds, and a message in
    the gap may still be in work.
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
