"""The ledger of a subscription: the messages that the socket holds and has not settled."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

HELD_MAX: Final = 65_536
"""Entries of a ledger. Above this it drops the oldest, whose ack wait is long over."""

_SHOWN_MAX: Final = 5
_SEQ_BITS: Final = 64


def shard_seq(shard: int, seq: int) -> int:
    """Combine a shard and a sequence into one number, as ledgers use it.

    In shard 0, and in a stream with one shard, it is the sequence itself.
    """
    return shard << _SEQ_BITS | seq


def shard_in(at: int) -> int:
    """Return the shard of a shard sequence."""
    return at >> _SEQ_BITS


def seq_in(at: int) -> int:
    """Return the sequence in its shard."""
    return at & ((1 << _SEQ_BITS) - 1)


def up_to(at: int) -> range:
    """Return all shard sequences of the same shard up to and including ``at``."""
    return range(shard_seq(shard_in(at), 0), at + 1)


def newest_of_shards(shard_seqs: Iterable[int]) -> list[int]:
    """Return the highest shard sequence of each shard."""
    newest: dict[int, int] = {}
    for at in shard_seqs:
        shard = shard_in(at)
        newest[shard] = max(at, newest.get(shard, 0))
    return list(newest.values())


class Ledger:
    """The sequences that were sent and are not settled, without duplicates, oldest first.

    If the stream has several shards, the entries are shard sequences made by :func:`shard_seq`.
    ``sendings``: the number of the last sending.
    """

    def __init__(self, held_max: int = HELD_MAX) -> None:
        # The number of the sending of each sequence, in the order in which they were sent.
        self._held: dict[int, int] = {}
        self.sendings = 0
        self._held_max = held_max

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, seq: int) -> bool:
        return seq in self._held

    def clear(self) -> None:
        """Drop all entries."""
        self._held.clear()

    def sent(self, seqs: Iterable[int]) -> None:
        """Add ``seqs`` as the newest entries."""
        self.sendings += 1
        for seq in seqs:
            # A redelivery moves to the end: its ack wait has begun again.
            self._held.pop(seq, None)
            self._held[seq] = self.sendings
        # A client that never acknowledges would fill the memory. Storage delivers these again.
        while len(self._held) > self._held_max:
            del self._held[next(iter(self._held))]

    def settled(self, seqs: Iterable[int]) -> None:
        """Drop ``seqs``; sequences that are not held are ignored."""
        for seq in seqs:
            self._held.pop(seq, None)

    def returned(self, seqs: Iterable[int], sending: int) -> None:
        """Drop those of ``seqs`` that were not sent again after the sending of that number."""
        for seq in seqs:
            if self._held.get(seq, sending + 1) <= sending:
                del self._held[seq]

    def settled_up_to(self, seq: int) -> None:
        """Drop all entries of the shard of ``seq`` up to and including ``seq``."""
        below = up_to(seq)
        for held in [held for held in self._held if held in below]:
            del self._held[held]

    def find(self, seqs: Sequence[int], ranges: Sequence[tuple[int, int]]) -> tuple[list[int], str]:
        """Return the held sequences in ``seqs`` and ``ranges`` (closed), in ascending order.

        The text names the ``seqs`` that are not held and the ranges without a held sequence; it is
        "" if there are none.
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
    shard = shard_in(at)
    return f"{seq_in(at)} of shard {shard}" if shard else str(at)


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge overlapping ranges, so that no sequence is visited twice."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged
