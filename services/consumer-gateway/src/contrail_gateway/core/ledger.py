"""The ledger of a subscription: which messages the socket holds unacknowledged."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

HELD_MAX: Final = 65_536
"""Beyond this the oldest are forgotten: their acknowledgement has been overdue for long."""

_SHOWN_MAX: Final = 5
_SEQ_BITS: Final = 64


def place(shard: int, seq: int) -> int:
    """What stands for a sequence of a shard in a ledger; of shard 0 it is the sequence itself.

    So it is of a stream with one shard.
    """
    return shard << _SEQ_BITS | seq


def shard_of_place(at: int) -> int:
    """The shard of a place."""
    return at >> _SEQ_BITS


def seq_of_place(at: int) -> int:
    """The sequence of a place."""
    return at & ((1 << _SEQ_BITS) - 1)


def up_to(at: int) -> range:
    """All places of the same shard up to ``at``, itself included."""
    return range(place(shard_of_place(at), 0), at + 1)


def newest_of_shards(places: Iterable[int]) -> list[int]:
    """The highest of the places of each shard."""
    newest: dict[int, int] = {}
    for at in places:
        shard = shard_of_place(at)
        newest[shard] = max(at, newest.get(shard, 0))
    return list(newest.values())


class Ledger:
    """Sequences that were sent and are not settled, each once however often it was sent.

    Of several shards they are the places that :func:`place` makes.
    """

    def __init__(self, held_max: int = HELD_MAX) -> None:
        self._held: dict[int, None] = {}
        self._held_max = held_max

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, seq: int) -> bool:
        return seq in self._held

    def clear(self) -> None:
        """The socket holds nothing."""
        self._held.clear()

    def sent(self, seqs: Iterable[int]) -> None:
        """The socket holds ``seqs`` from now on."""
        for seq in seqs:
            self._held.pop(seq, None)
            self._held[seq] = None
        while len(self._held) > self._held_max:
            del self._held[next(iter(self._held))]

    def settled(self, seqs: Iterable[int]) -> None:
        """The socket no longer holds ``seqs``."""
        for seq in seqs:
            self._held.pop(seq, None)

    def settled_up_to(self, seq: int) -> None:
        """The socket holds nothing of its shard up to ``seq``, itself included."""
        below = up_to(seq)
        for held in [held for held in self._held if held in below]:
            del self._held[held]

    def find(self, seqs: Sequence[int], ranges: Sequence[tuple[int, int]]) -> tuple[list[int], str]:
        """Those of the held sequences that are named, ascending; ``ranges`` are closed.

        The text tells which of ``seqs`` are not held and which ranges hold none that is, "" when
        there are no such.
        """
        held = self._held
        unknown = [_shown(seq) for seq in seqs if seq not in held]
        found = {seq for seq in seqs if seq in held} if unknown else set(seqs)
        ordered = sorted(held) if ranges else []
        for first, last in _merged(ranges):
            inside = ordered[bisect_left(ordered, first) : bisect_right(ordered, last)]
            if not inside:
                unknown.append(f"{_shown(first)} to {_shown(last)}")
            found.update(inside)
        if not unknown:
            return sorted(found), ""
        shown = ", ".join(unknown[:_SHOWN_MAX]) + (" ..." if unknown[_SHOWN_MAX:] else "")
        return sorted(found), f"not awaiting acknowledgement on this socket: {shown}"


def _shown(at: int) -> str:
    shard = shard_of_place(at)
    return f"{seq_of_place(at)} of shard {shard}" if shard else str(at)


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same sequences in ranges that do not overlap, so that none is looked at twice."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged
