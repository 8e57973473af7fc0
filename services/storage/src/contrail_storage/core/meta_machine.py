"""The meta machine: names of streams, the subjects that they capture, and shard ids.

A stream is created in three steps: the name is reserved, the stream is created in the log of its
shards, and it is listed here. A removal is decided in the log of the first shard. Then the stream
is unlisted, the other shards are dropped, and the name is released. After a crash in between, the
leader finishes or undoes the rest.

The configurations of streams in memory are also here, because a restart creates these streams
again, in new shards.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec

from contrail_common import errors
from contrail_common.model import Advisory, AdvisoryAction, StreamConfig
from contrail_common.partition import SHARDS_MAX
from contrail_common.subject_tree import SubjectTree
from contrail_common.subjects import overlaps
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.erasures import ErasureLedger
from contrail_storage.core.group_table import GroupTable
from contrail_storage.core.node_table import NodeTable
from contrail_storage.core.results import Done, Refused, Reserved, Result, Writes

Stage = Literal["reserved", "listed", "unlisted"]

# The row of the next shard id has this number, which is no shard id.
_COUNTER = 0
STREAMS_MAX = 10_000
"""Most shards of all streams together. One with two consumers takes about 16 KB of memory."""


class StreamEntry(msgspec.Struct, array_like=True, frozen=True):
    """The entry of one stream. ``shard_id`` is the first of ``shards`` consecutive ids.

    ``config`` is set for a stream in memory once it is listed.
    """

    name: str
    shard_id: int
    incarnation: str
    subjects: tuple[str, ...]
    stage: Stage
    shards: int = 1
    config: StreamConfig | None = None
    groups: tuple[int, ...] = ()
    """The group of each shard; empty: the usual one of streams on disk, or in memory."""
    owner: str = ""
    """The node that has a stream in memory; empty: the only one."""

    @property
    def shard_ids(self) -> range:
        """The ids of the stream's shards."""
        return range(self.shard_id, self.shard_id + self.shards)


class MetaMachine:
    """Names and shard ids of all streams."""

    def __init__(self) -> None:
        self.streams: dict[str, StreamEntry] = {}
        self.names: list[str] = []
        """Names of all entries in `streams`, in order."""
        self.erasures = ErasureLedger()
        self.group_table = GroupTable()
        self.node_table = NodeTable()
        self.next_shard_id = 1
        """The next shard id; lower ids are never used again."""
        # Shards of all entries in `streams`.
        self._shard_count = 0
        self.shards_in: Counter[int] = Counter()
        """How many of the shards in `streams` each group has, without the usual groups."""
        # The group of each of these shards.
        self._groups: dict[int, int] = {}
        # The group of the first shard, by shard of each stream that is in several groups.
        self._homes: dict[int, int] = {}
        # The name of each entry in `streams`, by its subjects. Two entries never overlap.
        self._claims: SubjectTree[str] = SubjectTree()

    def apply(self, command: cmd.Command, writes: Writes) -> Result:
        """Apply one command, and add its changes to ``writes``. Never raises."""
        result: Result
        match command:
            case cmd.ReserveStream():
                result = self._reserve(command, writes)
            case cmd.ListStream():
                result = self._list(command, writes)
            case cmd.RenewStream():
                result = self._renew(command, writes)
            case cmd.UnlistStream():
                result = self._unlist(command, writes)
            case cmd.ReleaseStream():
                result = self._release(command.name, writes, command.incarnation)
            case cmd.CreateGroup():
                result = self.group_table.create(command, self.node_table, writes)
            case cmd.NoteStart():
                result = self.node_table.note_start(command, writes)
            case cmd.RegisterNode():
                result = self.node_table.register(command, self.next_shard_id, writes)
                if isinstance(result, Done) and result.changed:
                    self.erasures.reopen(command.name, writes, lost_group=command.number)
            case cmd.RecordErasure() | cmd.FinishErasures() | cmd.ReopenErasures():
                result = self.erasures.apply(command, writes)
            case cmd.AssignShards() | cmd.SkipNumbers():
                result = self._make_up(command, writes)
            case _:
                result = Refused(
                    errors.INTERNAL.code, "the meta machine does not know this command"
                )
        return result

    def overlap(self, subjects: Iterable[str], name: str) -> str | None:
        """A sentence about another stream whose subjects overlap ``subjects``, or None.

        It is the same on every replica, because the tree of subjects has an order of its own.
        """
        for ours in subjects:
            for other in self._claims.overlapping(ours):
                if other != name:
                    claimed = self.streams[other].subjects
                    theirs = next(one for one in claimed if overlaps(ours, one))
                    return f"{ours} overlaps with {theirs} of stream {other}"
        return None

    def capturing(self, subject: str) -> StreamEntry | None:
        """The listed entry whose subjects match the literal ``subject``, or None."""
        entries = (self.streams[name] for name in self._claims.matching(subject))
        return next((entry for entry in entries if entry.stage == "listed"), None)

    def group_of(self, shard_id: int) -> int:
        """The group whose log has the entries of a shard."""
        usual = keys.MEMORY_GROUP if keys.is_in_memory(shard_id) else keys.SHARD_GROUP
        return self._groups.get(shard_id, usual)

    def home_of(self, shard_id: int) -> int:
        """The group of the first shard of the stream that a shard belongs to."""
        home = self._homes.get(shard_id)
        return self.group_of(shard_id) if home is None else home

    def spread_from(self, home: int) -> dict[int, int]:
        """The shards of streams that are in several groups, the first of them in ``home``.

        With their groups, by shard id.
        """
        return {one: self._groups[one] for one, first in self._homes.items() if first == home}

    def loser_of(self, entry: StreamEntry) -> str:
        """Name of the node that lost the only copy of a listed stream; empty if none did."""
        shard_id = entry.shard_id
        if entry.stage != "listed" or keys.is_in_memory(shard_id):
            return ""
        return self.node_table.loser_of(shard_id, self.group_of(shard_id))

    def _entry(self, name: str, incarnation: str) -> StreamEntry | None:
        """The entry of ``name`` if it has this ``incarnation`` ("": any); None otherwise."""
        entry = self.streams.get(name)
        return None if entry is None or incarnation not in ("", entry.incarnation) else entry

    def _reserve(self, command: cmd.ReserveStream, writes: Writes) -> Result:
        if command.name in self.streams:
            return Refused(errors.STREAM_EXISTS.code)
        if not 1 <= command.shards <= SHARDS_MAX or len(command.groups) not in (0, command.shards):
            return Refused(errors.STREAM_CONFIG_INVALID.code, "shards: out of range")
        # Reservations count too, so two creates at the same time cannot exceed the limit.
        if self._shard_count + command.shards > STREAMS_MAX:
            return Refused(
                errors.STREAM_LIMIT.code,
                f"the limit is {STREAMS_MAX} shards over all streams",
            )
        # Checked at the reservation, so that of two creates with overlapping subjects one is
        # refused before anything exists of it.
        overlap = self.overlap(command.subjects, command.name)
        if overlap is not None:
            return Refused(errors.SUBJECT_OVERLAP.code, overlap)
        self._shard_count += command.shards
        shard_id = self._take_numbers(command.shards, in_memory=command.in_memory, writes=writes)
        entry = StreamEntry(
            command.name,
            shard_id,
            command.incarnation,
            command.subjects,
            "reserved",
            command.shards,
            groups=command.groups,
            owner=command.owner,
        )
        self._put(entry, writes)
        return Reserved(shard_id)

    def _take_numbers(self, count: int, *, in_memory: bool, writes: Writes) -> int:
        """Take ``count`` consecutive new shard ids; return the first."""
        # Ids are never used again: rows and log entries of a removed stream may still exist, and a
        # new stream must not inherit them.
        shard_id = self.next_shard_id
        self.next_shard_id += count
        writes.put(self._key(_COUNTER), self.next_shard_id.to_bytes(4, "big"))
        return shard_id | keys.IN_MEMORY if in_memory else shard_id

    def _renew(self, command: cmd.RenewStream, writes: Writes) -> Result:
        entry = self._entry(command.name, command.lost)
        # A stream that is being removed must not come back.
        if entry is None or entry.stage != "listed" or not keys.is_in_memory(entry.shard_id):
            return Refused(errors.STREAM_NOT_FOUND.code)
        writes.delete(self._key(entry.shard_id))
        shard_id = self._take_numbers(entry.shards, in_memory=True, writes=writes)
        renewed = msgspec.structs.replace(entry, shard_id=shard_id, incarnation=command.incarnation)
        self._put(renewed, writes)
        return Reserved(shard_id)

    def _list(self, command: cmd.ListStream, writes: Writes) -> Result:
        entry = self._entry(command.name, command.incarnation)
        # `ListStream` also changes subjects. One that arrives after the removal must not undo it.
        if entry is None or (command.incarnation and entry.stage == "unlisted"):
            return Refused(errors.STREAM_NOT_FOUND.code)
        # Nobody else has subjects that overlap those of the entry.
        added = [one for one in command.subjects if one not in entry.subjects]
        overlap = self.overlap(added, command.name)
        if overlap is not None:
            return Refused(errors.SUBJECT_OVERLAP.code, overlap)
        listed = msgspec.structs.replace(
            entry, subjects=command.subjects, stage="listed", config=command.config
        )
        self._put(listed, writes)
        if entry.stage != "listed":
            writes.advisories.append(_action(command.name, "create"))
        return Done(changed=listed != entry)

    def _make_up(self, command: cmd.AssignShards | cmd.SkipNumbers, writes: Writes) -> Result:
        """Restore the entry of a stream, or skip shard ids, after damage lost commands."""
        if isinstance(command, cmd.SkipNumbers):
            self._take_numbers(command.count, in_memory=False, writes=writes)
            return Done()
        overlap = self.overlap(command.subjects, command.name)
        if overlap is not None:
            return Refused(errors.SUBJECT_OVERLAP.code, overlap)
        # What is known of the name may be from before the lost commands: it is replaced.
        self._release(command.name, writes)
        end = command.shard_id + command.shards
        self._take_numbers(max(end - self.next_shard_id, 0), in_memory=False, writes=writes)
        self._shard_count += command.shards
        entry = StreamEntry(
            command.name,
            command.shard_id,
            command.incarnation,
            command.subjects,
            "listed",
            command.shards,
        )
        self._put(entry, writes)
        return Done()

    def _unlist(self, command: cmd.UnlistStream, writes: Writes) -> Result:
        entry = self._entry(command.name, command.incarnation)
        if entry is None:
            return Refused(errors.STREAM_NOT_FOUND.code)
        self._put(msgspec.structs.replace(entry, stage="unlisted"), writes)
        # Only the first time: a repeated removal, after a crash, is not another event.
        if entry.stage == "listed":
            writes.advisories.append(_action(entry.name, "delete"))
        return Done()

    def _release(self, name: str, writes: Writes, incarnation: str = "") -> Result:
        entry = self._entry(name, incarnation)
        if entry is None:
            return Refused(errors.STREAM_NOT_FOUND.code)
        for subject in entry.subjects:
            self._claims.remove(subject, name)
        del self.names[bisect_left(self.names, name)]
        del self.streams[name]
        self._shard_count -= entry.shards
        for shard_id in entry.shard_ids:
            self._groups.pop(shard_id, None)
            self._homes.pop(shard_id, None)
        self.shards_in.subtract(entry.groups)
        writes.delete(self._key(entry.shard_id))
        return Done()

    def _put(self, entry: StreamEntry, writes: Writes) -> None:
        self._keep(entry)
        writes.put(self._key(entry.shard_id), msgspec.msgpack.encode(entry))

    def _keep(self, entry: StreamEntry) -> None:
        """Keep ``entry``, in place of the one with its name."""
        known = self.streams.get(entry.name)
        if known is None:
            insort(self.names, entry.name)
            self._groups.update(zip(entry.shard_ids, entry.groups, strict=False))
            if len(set(entry.groups)) > 1:
                self._homes.update(dict.fromkeys(entry.shard_ids, entry.groups[0]))
            self.shards_in.update(entry.groups)
        self.streams[entry.name] = entry
        before = () if known is None else known.subjects
        if before != entry.subjects:
            for subject in before:
                self._claims.remove(subject, entry.name)
            for subject in entry.subjects:
                self._claims.add(subject, entry.name)

    @staticmethod
    def _key(shard_id: int) -> bytes:
        return keys.small_key(keys.STREAM, cmd.META_SHARD, shard_id)

    def take_over(self, other: "MetaMachine") -> None:
        """Replace the state by that of ``other``, which must not be used afterwards."""
        self.streams, self.names, self._claims = other.streams, other.names, other._claims
        self.erasures.take_over(other.erasures)
        self.group_table, self.node_table = other.group_table, other.node_table
        self._groups, self.shards_in = other._groups, other.shards_in
        self._homes = other._homes
        self.next_shard_id, self._shard_count = other.next_shard_id, other._shard_count

    def load(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Load the state from its rows, given as (key, value)."""
        for key, value in rows:
            if keys.last_number(key, 4) == _COUNTER:
                self.next_shard_id = int.from_bytes(value, "big")
            else:
                entry = msgspec.msgpack.decode(value, type=StreamEntry)
                self._keep(entry)
                self._shard_count += entry.shards


def _action(stream: str, action: AdvisoryAction) -> Advisory:
    return Advisory(type="stream_action", stream=stream, action=action)
