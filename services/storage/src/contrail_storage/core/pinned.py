"""The first messages of a consumer that starts with the last message of each subject.

The list is made when the consumer is created: the newest message of each matching subject at that
moment, by sequence. After the last sequence of that moment the consumer continues normally.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from contrail_common.texts import I64Array, Mask, U32Array

SUBJECTS_MAX: Final = 100_000
"""Subjects that one list may have; it then takes 1.2 MB."""
ROW: Final = 8_192
"""Sequences of one stored row."""
_ENTRY_BYTES: Final = 12


@dataclass(slots=True, frozen=True, eq=False)
class Pinned:
    """Sequences (ascending) and subject numbers of messages; ``end_seq`` is after all of them."""

    seqs: I64Array
    sids: U32Array
    end_seq: int

    @classmethod
    def decode(cls, data: bytes, end_seq: int) -> "Pinned | None":
        """The list that :meth:`encode` encoded; None if ``data`` is not one."""
        count, rest = divmod(len(data), _ENTRY_BYTES)
        if rest or not 0 < count <= SUBJECTS_MAX:
            return None
        seqs = np.frombuffer(data, np.int64, count)
        sids = np.frombuffer(data, np.uint32, count, 8 * count)
        # An archive may be forged. Everything below relies on the order.
        if seqs[-1] >= end_seq or not (np.diff(seqs, prepend=0) > 0).all():
            return None
        return cls(seqs, sids, end_seq)

    def encode(self) -> bytes:
        """The list without ``end_seq``: i64 sequence[n], u32 number[n]."""
        return self.seqs.tobytes() + self.sids.tobytes()

    def rows(self) -> Iterator[bytes]:
        """The encoded list in parts, one for each row."""
        for start in range(0, len(self.seqs), ROW):
            part = slice(start, start + ROW)
            yield self.seqs[part].tobytes() + self.sids[part].tobytes()

    @classmethod
    def of_rows(cls, rows: Iterable[bytes], end_seq: int) -> "Pinned | None":
        """Build the list from its rows; None when there are none."""
        seqs, sids = [], []
        for row in rows:
            count = len(row) // _ENTRY_BYTES
            seqs.append(np.frombuffer(row, np.int64, count))
            sids.append(np.frombuffer(row, np.uint32, count, 8 * count))
        return cls(np.concatenate(seqs), np.concatenate(sids), end_seq) if seqs else None

    def mask(self, seqs: I64Array) -> Mask:
        """A mask of the ``seqs`` that are in the list, or at or after ``end_seq``."""
        at = np.minimum(np.searchsorted(self.seqs, seqs), len(self.seqs) - 1)
        found: Mask = (self.seqs[at] == seqs) | (seqs >= self.end_seq)
        return found

    def next(self, seq: int) -> int:
        """The first sequence from ``seq`` on that is in the list, or at or after ``end_seq``."""
        at = int(np.searchsorted(self.seqs, seq))
        # Nothing of the list is left: normal delivery begins, and not before `end_seq`, because
        # other messages below it were not the newest of their subject.
        return int(self.seqs[at]) if at < len(self.seqs) else max(seq, self.end_seq)

    def rest(self, from_seq: int) -> tuple[I64Array, U32Array]:
        """Sequences and subject numbers of the list from ``from_seq`` on."""
        at = int(np.searchsorted(self.seqs, from_seq))
        return self.seqs[at:], self.sids[at:]
