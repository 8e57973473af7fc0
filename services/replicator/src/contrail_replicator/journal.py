"""The log of one group for Raft: the newest entries in memory, all entries in the node's log.

The first element is an anchor: index and term of the entry before the oldest one in memory. The
anchor is always applied. An entry counts as durable once the node's log has reported it.
"""

from collections.abc import Callable, Sequence
from typing import Final

from contrail_replicator.messages import SUSPECT
from contrail_replicator.ports import JournalLog, LogEntry, MemberLog, RecoveredLog

HELD_BYTES_MAX: Final = 64 << 20
"""Bytes of entries in memory above which a suspect member, which applies none, takes no more."""


class LogGapError(Exception):
    """The applied index is not within the node's log, so the replica must not take part."""


class GroupJournal:
    """Entries of one group after its applied index, and how far they are durable."""

    def __init__(
        self,
        group: int,
        log: JournalLog,
        recovered: RecoveredLog,
        applied: int,
        member_log: MemberLog | None = None,
    ) -> None:
        entries = list(recovered.entries)
        end = entries[-1][1] if entries else recovered.base_index
        # Entries that the store has or needs are missing. A vote or an ack of this replica could
        # lose committed entries of the whole group.
        if not recovered.base_index <= applied <= end:
            raise LogGapError(
                f"group {group} is applied up to {applied}, but its log has the entries after "
                f"{recovered.base_index} up to {end}"
            )
        self.is_sound: Callable[[bytes], bool] = lambda _data: True
        """Whether an entry is what was proposed; set by the owner."""
        self.group = group
        """The group's number in the node's log."""
        # The node's log, which writes and syncs; None: it serves groups of one only.
        self._log = log
        self._member_log = member_log
        # Flags of the hard state as last recorded, those before, and the position of the record.
        self._flags = self._old_flags = member_log.flags(group) if member_log is not None else 0
        self._flags_position = 0
        # The anchor, then the entries held, without a gap in their indexes. Never empty.
        self._entries: list[LogEntry] = [(b"", recovered.base_index, recovered.base_term)]
        self._entries += entries
        self.size = sum(len(data) for data, _, _ in entries)
        """Bytes of the entries held."""
        self.last_index = end
        """Index of the newest entry, durable or not. Always the index of the last of `_entries`."""
        self.term = recovered.term
        """The current term, as last recorded; durable with `position`."""
        self.voted_for = recovered.voted_for
        """The vote in `term`."""
        self.durable_index = end
        """Highest index that is durable here and not cut since. Never above `last_index`."""
        self.durable_position = 0
        """Records of the group that the node's log has reported durable."""
        self.position = 0
        """Records of the group that were appended. Never below `durable_position`."""
        # The record of the last cut, and the lowest index that was cut to before it was durable.
        # Until it is, the log may report a durable index whose entry was replaced.
        self._cut_position = 0
        self._cut_index = end

    @property
    def flags(self) -> int:
        """Flags of the hard state; a flag that is taken away counts until that is durable."""
        if self.durable_position >= self._flags_position:  # for each message and publish
            return self._flags
        return self._flags | self._old_flags

    @property
    def flags_are_durable(self) -> bool:
        """Whether the disk has the flags."""
        return self.durable_position >= self._flags_position

    @property
    def anchor_index(self) -> int:
        """Index of the entry before the oldest one in memory."""
        return self._entries[0][1]

    @property
    def anchor_term(self) -> int:
        """Term of the entry before the oldest one in memory."""
        return self._entries[0][2]

    @property
    def last_term(self) -> int:
        """Term of the newest entry, or of the anchor."""
        return self._entries[-1][2]

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, position: int) -> LogEntry:
        return self._entries[position]

    def term_at(self, index: int) -> int | None:
        """Term of an entry in memory, or of the anchor; None for any other index."""
        position = index - self._entries[0][1]
        return self._entries[position][2] if 0 <= position < len(self._entries) else None

    def slice(
        self, from_index: int, count: int | None = None, max_bytes: int | None = None
    ) -> list[LogEntry]:
        """Entries from an index on, including the anchor; at least one despite `max_bytes`."""
        position = from_index - self._entries[0][1]
        if position < 0:
            return []
        end = len(self._entries) if count is None else position + count
        if max_bytes is None:
            return self._entries[position:end]
        size = 0
        for stop in range(position, min(end, len(self._entries))):
            size += len(self._entries[stop][0])
            if size > max_bytes and stop > position:
                return self._entries[position:stop]
        return self._entries[position:end]

    def append(self, data: bytes, index: int, term: int) -> None:
        """Add the next entry; it is durable once the node's log says so."""
        self.position = self._log.append(self.group, index, term, data)
        self._entries.append((data, index, term))
        self.last_index = index
        self.size += len(data)

    def truncate(self, from_index: int) -> None:
        """Cut the newest entries, from `from_index` on."""
        last = from_index - 1
        last_term = self.term_at(last)
        if last_term is None:
            raise LogGapError(f"group {self.group} does not hold entry {last}")
        self.position = self._log.truncate(self.group, from_index, last_term)
        self._cut_memory(last)
        # What is on its way to the disk may still end with entries that were cut here.
        pending = self._cut_position > self.durable_position
        self._cut_index = min(self._cut_index, last) if pending else last
        self._cut_position = self.position
        self.durable_index = min(self.durable_index, last)

    def save_hard_state(self, term: int, voted_for: str | None) -> None:
        """Record term and vote."""
        self.position = self._log.save_hard_state(self.group, term, voted_for)
        self.term, self.voted_for = term, voted_for

    def handle_durable(self, position: int, index: int) -> None:
        """Note that the first `position` records are durable; they end the log at `index`."""
        self.durable_position = position
        if position < self._cut_position:
            index = min(index, self._cut_index)
        # After `reset`, what is on its way to the disk may end before the new base.
        self.durable_index = max(index, self._entries[0][1])

    def save_flags(self, flags: int) -> None:
        """Record the flags of the hard state."""
        if flags != self._flags:
            self.position = self._members().save_flags(self.group, flags)
            self._old_flags, self._flags = self.flags, flags
            self._flags_position = self.position

    def reset(self, index: int, term: int) -> None:
        """Replace the whole log by a base; the store has everything up to it, durably."""
        self.position = self._members().reset(self.group, index, term)
        self._entries = [(b"", index, term)]
        self.size = 0
        self.last_index = self.durable_index = self._cut_index = index
        self._cut_position = self.position

    def term_on_disk(self, index: int) -> int | None:
        """Term of an entry that is no longer in memory; None if the disk does not have it."""
        log = self._member_log
        return log.term_at(self.group, index) if log is not None else None

    def read_from_disk(
        self, from_index: int, max_bytes: int, on_read: Callable[[Sequence[LogEntry]], None]
    ) -> None:
        """Call `on_read` later with entries from an index on; with none if they are gone."""
        self._members().read(self.group, from_index, max_bytes, on_read)

    def _members(self) -> MemberLog:
        if self._member_log is None:
            raise RuntimeError(f"the log of group {self.group} is for one member")
        return self._member_log

    def has_capacity(self, size: int) -> bool:
        """Whether the node's log takes `size` more bytes now, and memory those not handed out."""
        if self._flags & SUSPECT and self.size > HELD_BYTES_MAX:
            return False
        return self._log.has_capacity(size)

    def cut_to_durable(self) -> None:
        """Drop the entries that the failed node log did not make durable."""
        self._cut_memory(self.durable_index)

    def restate_end(self) -> None:
        """Write the end of this log to the recovered node log.

        If the failure lost a cut, the disk has entries that are not in memory.
        """
        self.truncate(self.last_index + 1)

    def trim(self, index: int) -> None:
        """Forget entries up to `index`, which becomes the anchor."""
        position = min(index - self._entries[0][1], len(self._entries) - 1)
        if position <= 0:
            return
        for data, _, _ in self._entries[1 : position + 1]:
            self.size -= len(data)
        _, anchor_index, anchor_term = self._entries[position]
        del self._entries[:position]
        self._entries[0] = (b"", anchor_index, anchor_term)

    def trim_to_size(self, applied: int, tail_bytes: int) -> None:
        """Forget the oldest applied entries if more than `tail_bytes` are held.

        Then an eighth less is kept: to forget a few costs as much as all that are held.
        """
        if tail_bytes == 0:
            self.trim(applied)
        elif self.size > tail_bytes:
            surplus, at = self.size - tail_bytes * 7 // 8, 0
            while surplus > 0 and self._entries[at][1] < applied:
                at += 1
                surplus -= len(self._entries[at][0])
            self.trim(self._entries[at][1])

    def _cut_memory(self, last: int) -> None:
        position = last - self._entries[0][1] + 1
        self.size -= sum(len(data) for data, _, _ in self._entries[position:])
        del self._entries[position:]
        self.last_index = last
