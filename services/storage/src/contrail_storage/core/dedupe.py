"""The duplicate window: which message ids were stored lately, and under which sequence.

Ids come hashed (128 bit, keyed per stream); 96 bits of each are kept, with the sequence, in open
addressing tables: 20 bytes a slot. An id is expired exactly when its message's log time is at least
a window ago; since sequences and times ascend together, that is one comparison with a sequence, and
expired slots are simply taken again when a table fills. JetStream's rule holds: an id outlives its
message (delete, purge, ack) until the window ends.
"""

import struct
from array import array
from collections import deque
from collections.abc import Iterable
from typing import Final

from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Writes

ID_BYTES: Final = 16
NO_ID: Final = bytes(ID_BYTES)
_PARTS: Final = 64
_SLOTS_MIN: Final = 64
_LOAD_MAX: Final = 0.75
_WORDS: Final = struct.Struct("<QQ")
_ROW_HEAD: Final = struct.Struct("<qI")


class _Table:
    """One open addressing table: (u64, u32) of the hash to a sequence; 0 is a free slot."""

    __slots__ = ("high", "low", "mask", "seqs", "used")

    def __init__(self, slots: int) -> None:
        self.low = array("Q", bytes(8 * slots))
        self.high = array("I", bytes(4 * slots))
        self.seqs = array("Q", bytes(8 * slots))
        self.mask = slots - 1
        self.used = 0

    def find(self, low: int, high: int) -> int:
        """Slot of the id, or of the free slot that ends its probe."""
        slot = low & self.mask
        seqs = self.seqs
        while seqs[slot] and (self.low[slot] != low or self.high[slot] != high):
            slot = (slot + 1) & self.mask
        return slot

    def put(self, low: int, high: int, seq: int) -> None:
        """Remember the id, which may be there already (expired), under ``seq``."""
        slot = self.find(low, high)
        if not self.seqs[slot]:
            self.low[slot], self.high[slot] = low, high
            self.used += 1
        self.seqs[slot] = seq

    def without(self, floor_seq: int) -> "_Table":
        """A table of the ids from ``floor_seq`` on, with room to grow."""
        kept = [slot for slot, seq in enumerate(self.seqs) if seq >= floor_seq and seq]
        slots = _SLOTS_MIN
        while len(kept) > slots * _LOAD_MAX / 2:
            slots *= 2
        fresh = _Table(slots)
        for slot in kept:
            fresh.put(self.low[slot], self.high[slot], self.seqs[slot])
        return fresh


class DedupeWindow:
    """Message ids of one stream shard within the duplicate window."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self._tables = [_Table(_SLOTS_MIN) for _ in range(_PARTS)]
        self._marks: deque[tuple[int, int, int]] = deque()  # time, last seq, log index
        self._floor_seq = 1
        self._open_ids: list[bytes] = []
        self._open_seqs: list[int] = []

    def __len__(self) -> int:
        return sum(table.used for table in self._tables)

    def expire(self, now_ns: int, window_ns: int, writes: Writes) -> None:
        """Forget the ids whose messages are at least ``window_ns`` old at ``now_ns``."""
        marks = self._marks
        if not marks or marks[0][0] > now_ns - window_ns:
            return
        first_index = last_index = marks[0][2]
        while marks and marks[0][0] <= now_ns - window_ns:
            _, last_seq, last_index = marks.popleft()
            self._floor_seq = last_seq + 1
        writes.delete_range(
            keys.large_key(keys.DEDUPE, self.shard, first_index),
            keys.large_key(keys.DEDUPE, self.shard, last_index + 1),
        )

    def find(self, message_id: bytes) -> int:
        """Sequence that the id was stored under within the window, or 0."""
        low, rest = _WORDS.unpack(message_id)
        table = self._tables[rest & (_PARTS - 1)]
        seq = table.seqs[table.find(low, rest >> 32)]
        return seq if seq >= self._floor_seq else 0

    def add(self, message_id: bytes, seq: int) -> None:
        """Remember the id of the message just given ``seq``; :meth:`seal` ends the entry."""
        low, rest = _WORDS.unpack(message_id)
        part = rest & (_PARTS - 1)
        table = self._tables[part]
        if table.used >= (table.mask + 1) * _LOAD_MAX:
            table = self._tables[part] = table.without(self._floor_seq)
        table.put(low, rest >> 32, seq)

    def seal(
        self, ids: list[bytes], seqs: list[int], time_ns: int, index: int, writes: Writes
    ) -> None:
        """End an append: the ids added in it (or in its entry) become one row."""
        marks = self._marks
        key = keys.large_key(keys.DEDUPE, self.shard, index)
        if marks and marks[-1][2] == index:
            # A second append of the same entry: both stand in the row of the entry.
            self._open_ids += ids
            self._open_seqs += seqs
            marks.pop()
        else:
            self._open_ids, self._open_seqs = ids, seqs
        marks.append((time_ns, seqs[-1], index))
        writes.put(
            key,
            b"".join(
                (
                    _ROW_HEAD.pack(time_ns, len(self._open_ids)),
                    *self._open_ids,
                    array("Q", self._open_seqs).tobytes(),
                )
            ),
        )

    def load(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Take up the window from its rows, given as (key, value) in key order."""
        for key, row in rows:
            time_ns, count = _ROW_HEAD.unpack_from(row)
            seqs = array("Q")
            seqs.frombytes(row[_ROW_HEAD.size + ID_BYTES * count :])
            for at, seq in enumerate(seqs):
                start = _ROW_HEAD.size + ID_BYTES * at
                self.add(row[start : start + ID_BYTES], seq)
            self._marks.append((time_ns, seqs[-1], keys.last_number(key, 8)))
